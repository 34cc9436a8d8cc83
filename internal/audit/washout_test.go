package audit

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// flood causes refusals at the highest rates that are recorded, by the test's own clock.
type flood struct {
	s   *UnattestedRefusals
	r   *RefusalLimits
	now time.Time
}

func newFlood(t *testing.T, l *Log) *flood {
	t.Helper()
	f := &flood{now: time.Unix(1000, 0)}
	var err error
	if f.s, err = NewUnattestedRefusals("joinservice", l, slog.New(slog.DiscardHandler), prometheus.NewRegistry()); err != nil {
		t.Fatal(err)
	}
	if f.r, err = NewRefusalLimits(f.s); err != nil {
		t.Fatal(err)
	}
	f.s.now, f.r.now = func() time.Time { return f.now }, func() time.Time { return f.now }
	return f
}

// second is one second of refusals of unattested peers and of a hundred machines, each as often as it can.
func (f *flood) second(t *testing.T) {
	t.Helper()
	f.now = f.now.Add(time.Second)
	long := strings.Repeat("x", 10_000)
	for range 20 {
		f.s.take(Record{Event: "connection refused", Detail: long})
	}
	for i := range 100 {
		machine := fmt.Sprintf("%064d", i)
		if err := f.r.Write(machine, Record{Machine: machine, Event: "ticket refused", Detail: long}); err != nil {
			t.Fatal(err)
		}
	}
	if f.now.Second() == 0 {
		f.s.report()
		f.r.report()
	}
}

func sizeOf(t *testing.T, pattern string) (size int64) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	return size
}

// Refused peers, for however long and as often as they like, remove no record of an action: neither that of the first
// ticket, nor any between (J3).
func TestRefusalsNeverTakeThePlaceOfATicket(t *testing.T) {
	const limit = 32 << 10
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	l, err := openLog(path, limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	f := newFlood(t, l)
	tickets := 0
	ticket := func() {
		t.Helper()
		if err := l.Write(Record{Event: "ticket issued", Ticket: fmt.Sprintf("%032x", tickets)}); err != nil {
			t.Fatal(err)
		}
		tickets++
	}
	ticket()
	oldest := path // until the first refusals were removed three times over
	for rounds, began := 0, f.now; rounds < 3; {
		if f.second(t); f.now.Sub(began) > time.Hour {
			t.Fatal("no hour of refusals fills their files")
		}
		b, err := os.ReadFile(RefusedPath(path) + ".5")
		if err == nil && !bytes.HasPrefix(b, []byte(oldest)) {
			oldest = string(b[:min(len(b), 60)])
			rounds++
			ticket()
		}
	}
	if n := ticketsIn(t, path); n != tickets {
		t.Errorf("%d records of tickets are left of %d", n, tickets)
	}
	b, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(b), fmt.Sprintf(`"ticket":"%032x"`, 0)) {
		t.Errorf("the record of the first ticket is gone: %v", err)
	}
	if bytes.Contains(b, []byte("refused")) {
		t.Error("refusals are among what was done")
	}
	if got := sizeOf(t, RefusedPath(path)+"*"); got > 6*limit {
		t.Errorf("refusals take %d bytes, want at most %d", got, 6*limit)
	}
	if n := ticketsIn(t, RefusedPath(path)); n > 0 {
		t.Errorf("%d tickets are among the refusals", n)
	}
}

// This checks docs/operate.md on a day of refusals: the rates of records times their size.
func TestADayOfRefusalsIsAsLargeAsDocumented(t *testing.T) {
	var out bytes.Buffer
	l := NewStream(&out)
	f := newFlood(t, l)
	for range 600 {
		f.second(t)
	}
	const day = 24 * 60 * 60
	most := func(rate, burst float64) float64 { return (rate*day + burst) * MaxRefusal / 1e6 }
	unattested, machine, all := most(recordRate, recordBurst), most(eachRate, eachBurst), most(allRate, allBurst)
	if per := float64(out.Len()) / 600 * day / 1e6; per > 2*unattested+all+most(1, 0)+most(allBurst/600.0, 0) {
		t.Errorf("%.0f MB a day", per)
	}
	text, err := os.ReadFile("../../docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("unauthenticated peers: at most %.0f MB a day", unattested),
		fmt.Sprintf("machines that get no session: at most %.0f MB a day", unattested),
		fmt.Sprintf("one refused machine: at most %.0f MB a day", machine),
		fmt.Sprintf("all refused machines: at most %.0f MB a day", all),
		fmt.Sprintf("at least %.0f hours", math.Floor(keep*float64(maxSize)/1e6/(2*unattested+all)*24)),
	} {
		if !strings.Contains(strings.Join(strings.Fields(string(text)), " "), want) {
			t.Errorf("docs/operate.md does not say %q", want)
		}
	}
}
