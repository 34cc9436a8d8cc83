package bench

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStagesEndWithTheirEventsInOrder(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(ms int, text string) event { return event{start.Add(time.Duration(ms) * time.Millisecond), text} }
	stages := []stage{{"a", "first"}, {"b", "second"}}
	got, err := split(start, []event{at(10, "noise"), at(20, "the first mark"), at(30, "first again"), at(50, "second"), at(90, "later")}, stages)
	if err != nil || math.Abs(got["a"]-0.02) > 1e-9 || math.Abs(got["b"]-0.03) > 1e-9 {
		t.Errorf("split gives %v, %v; want a = 0.02, b = 0.03", got, err)
	}
	if _, err := split(start, []event{at(5, "second"), at(20, "first")}, stages); err == nil || !strings.Contains(err.Error(), `"second"`) {
		t.Errorf("events in the wrong order: %v, want an error that names the mark", err)
	}
}

func TestMedianAndSpread(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want spread
	}{{[]float64{3}, spread{3, 3, 3}}, {[]float64{5, 1, 3}, spread{1, 3, 5}}, {[]float64{4, 1, 3, 2}, spread{1, 2.5, 4}}} {
		var samples []Sample
		for _, v := range c.in {
			samples = append(samples, Sample{Init: Times{Ready: v}})
		}
		if got := spreadOf(samples, func(s Sample) float64 { return s.Init.Ready }); got != c.want {
			t.Errorf("%v: %v, want %v", c.in, got, c.want)
		}
	}
}

func TestUsageIsReadFromProc(t *testing.T) {
	stat := func(pid, user, system string) string {
		return pid + " (a) name) S 1 1 1 0 -1 4194560 1 2 3 4 " + user + " " + system + " 0 0 20 0"
	}
	out := strings.Join([]string{
		"args /usr/bin/bootstrapper attester ", stat("7", "100", "50"), "VmHWM:\t    2048 kB",
		"args sh ", stat("8", "900", "900"), "VmHWM:\t   99999 kB",
		"args /joinservice --listen=:9090 ", stat("9", "20", "10"), "VmHWM:\t   1024 kB",
		"args /kms --listen=:9001 ", stat("10", "2", "1"), "VmHWM:\t   512 kB",
		"args /usr/bin/bootstrapper run ", stat("11", "30", "10"), "VmHWM:\t   512 kB",
		"100",
	}, "\n")
	got, err := parseUsage([]byte(out))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Usage{CPU: 1.5, RSS: 2}); got["attester"] != want {
		t.Errorf("attester: %v, want %v", got["attester"], want)
	}
	if want := (Usage{CPU: 0.3, RSS: 1}); got["joinservice"] != want {
		t.Errorf("joinservice: %v, want %v", got["joinservice"], want)
	}
	if _, err := parseUsage([]byte(strings.Replace(out, "/kms ", "/other ", 1))); err == nil || !strings.Contains(err.Error(), "kms") {
		t.Errorf("without a key service: %v, want an error that names it", err)
	}
}

func TestRequestsOfATicketAreCounted(t *testing.T) {
	line := func(user, verb, resource, sub, stage, at string) string {
		return `{"stage":"` + stage + `","verb":"` + verb + `","user":{"username":"` + user + `"},"objectRef":{"resource":"` + resource + `","subresource":"` + sub + `"},"requestReceivedTimestamp":"2026-01-01T00:00:` + at + `Z"}`
	}
	const joinservice, kms = "system:serviceaccount:muster-system:joinservice", "system:serviceaccount:muster-system:kms"
	log := strings.Join([]string{
		line(kms, "create", "tokenreviews", "", "ResponseComplete", "09.500000"),
		line(joinservice, "create", "attestednodes", "", "ResponseComplete", "10.100000"),
		line(joinservice, "update", "attestednodes", "status", "ResponseComplete", "10.200000"),
		line(joinservice, "update", "attestednodes", "status", "ResponseStarted", "10.200000"),
		line(joinservice, "watch", "attestednodes", "", "ResponseComplete", "10.300000"),
		line("system:node:node1", "update", "nodes", "status", "ResponseComplete", "10.300000"),
		line(joinservice, "update", "attestednodes", "status", "ResponseComplete", "11.100000"),
		line(joinservice, "get", "leases", "", "ResponseComplete", "09.900000"),
	}, "\n")
	at := func(ms int) time.Time { return time.Date(2026, 1, 1, 0, 0, 10, ms*1e6, time.UTC) }
	got, err := countRequests([]byte(log), at(0), at(1000))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"kms create tokenreviews": 1, "joinservice create attestednodes": 1, "joinservice update attestednodes/status": 1}
	if len(got) != len(want) {
		t.Errorf("requests: %v, want %v", got, want)
	}
	for k, n := range want {
		if got[k] != n {
			t.Errorf("%s: %d times, want %d", k, got[k], n)
		}
	}
}

func TestFiguresGoBetweenTheMarksOfThePage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "performance.md"))
	if err != nil {
		t.Fatal(err)
	}
	once, err := between(page, "| figures |")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(once), "| figures |") || !strings.HasPrefix(string(once), "# Performance") {
		t.Errorf("the page became %s", once)
	}
	if twice, err := between(once, "| figures |"); err != nil || string(twice) != string(once) {
		t.Errorf("the second time changes the page: %v", err)
	}
	if _, err := between([]byte("no marks"), ""); err == nil {
		t.Error("a page without marks was taken")
	}
}

func TestTablesNameEveryStageOnce(t *testing.T) {
	stages := map[string]float64{"init: verify the joinservice": 1}
	for _, s := range append(append([]stage{}, initStages...), joinStages...) {
		stages[s.name] = 1
	}
	s := Sample{Stages: stages, Resources: map[string]Usage{"kms": {1, 2}}, Requests: map[string]int{"kms create tokenreviews": 1}}
	text := tables(Results{Muster: []Sample{s, s}, Kubeadm: []Sample{{}}})
	for name := range stages {
		if n := strings.Count(text, "| "+name+" |"); n != 1 {
			t.Errorf("stage %s is in the tables %d times", name, n)
		}
	}
}
