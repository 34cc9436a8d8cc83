package ownerview

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/objects/waiting"
)

func entry(t *testing.T, e waiting.Entry) string {
	t.Helper()
	text, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// ofSource returns as many entries that a list lacks as one source may have.
func ofSource(t *testing.T, e waiting.Entry) map[string]string {
	t.Helper()
	out := map[string]string{}
	e.List, e.Address = "l", "192.0.2.1"
	for i := range waiting.MaxOfSource {
		out[fmt.Sprintf("%02x", i)] = entry(t, e)
	}
	return out
}

func with(m map[string]string, key, value string) map[string]string {
	m[key] = value
	return m
}

func TestTheListOfWhoWaitsIsKeptShortAndQuiet(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	old := waiting.Entry{Node: "node3", Role: "worker", Reason: "POLICY_REFUSED", Since: now.Add(-10 * time.Minute), Last: now.Add(-30 * time.Second)}
	news := func(change func(*waiting.Entry)) map[string]*waiting.Entry {
		e := waiting.Entry{Machine: "aa", Reason: "POLICY_REFUSED", Last: now}
		change(&e)
		return map[string]*waiting.Entry{"aa": &e}
	}
	unlisted, cut := old, old
	unlisted.List, unlisted.Address = "l", "192.0.2.1"
	cut.Differs = strings.Repeat("d", 999)
	cut = cut.Short()
	full := map[string]string{}
	for i := range waiting.Max {
		full[fmt.Sprintf("%02x", i)] = entry(t, old)
	}
	for name, tt := range map[string]struct {
		have map[string]string
		news map[string]*waiting.Entry
		want string // the patch of aa: "" for none, "null", or a part of it
	}{
		"a new machine":                                          {nil, news(func(*waiting.Entry) {}), `"since":"2026-11-21T12:00:00Z"`},
		"the same again at once":                                 {map[string]string{"aa": entry(t, old)}, news(func(*waiting.Entry) {}), ""},
		"the same after a while":                                 {map[string]string{"aa": entry(t, old)}, news(func(e *waiting.Entry) { e.Last = now.Add(time.Minute) }), `"since":"2026-11-21T11:50:00Z"`},
		"another reason":                                         {map[string]string{"aa": entry(t, old)}, news(func(e *waiting.Entry) { e.Reason = "BANNED" }), `"since":"2026-11-21T12:00:00Z"`},
		"a name that it said before":                             {map[string]string{"aa": entry(t, old)}, news(func(e *waiting.Entry) { e.Reason = "BANNED" }), `"node":"node3"`},
		"an admitted machine":                                    {map[string]string{"aa": entry(t, old)}, map[string]*waiting.Entry{"aa": nil}, "null"},
		"an admitted machine that never waited":                  {nil, map[string]*waiting.Entry{"aa": nil}, ""},
		"one that has not come for an hour":                      {map[string]string{"aa": entry(t, waiting.Entry{Reason: "X", Last: now.Add(-61 * time.Minute)})}, nil, "null"},
		"what is no entry":                                       {map[string]string{"aa": "{"}, nil, "null"},
		"one more than fit":                                      {full, news(func(*waiting.Entry) {}), ""},
		"an entry that is too long":                              {nil, news(func(e *waiting.Entry) { e.Node = strings.Repeat("x", waiting.MaxSize) }), ""},
		"one that a list lacks, beside a full list of others":    {full, news(func(e *waiting.Entry) { e.List = "l" }), `"list":"l"`},
		"another that a list lacks, of a source with all places": {ofSource(t, old), news(func(e *waiting.Entry) { e.List, e.Address = "l", "192.0.2.1" }), ""},
		"one that a list lacks, of another source":               {ofSource(t, old), news(func(e *waiting.Entry) { e.List, e.Address = "l", "192.0.2.2" }), `"list":"l"`},
		"one that is no longer lacking":                          {map[string]string{"aa": entry(t, unlisted)}, news(func(*waiting.Entry) {}), `"reason":"POLICY_REFUSED"`},
		"one that a list lacks now, without a place":             {with(ofSource(t, old), "aa", entry(t, old)), news(func(e *waiting.Entry) { e.List, e.Address = "l", "192.0.2.1" }), "null"},
		"a text that is cut again":                               {map[string]string{"aa": entry(t, cut)}, news(func(e *waiting.Entry) { *e = cut; e.Machine, e.Last, e.Differs = "aa", now, strings.Repeat("d", 999) }), ""},
	} {
		t.Run(name, func(t *testing.T) {
			patch := waitingPatch(tt.have, tt.news, now)
			v, there := patch["aa"]
			b, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			got := string(b)
			if s, ok := v.(string); ok {
				got = s
			}
			if there != (tt.want != "") || !strings.Contains(got, tt.want) {
				t.Errorf("patch %v, want %q", patch, tt.want)
			}
			if len(patch) > 1 {
				t.Errorf("others change too: %v", patch)
			}
		})
	}
}

// What is noted between two writes has the bounds of the list: a flood of machines that a list lacks leaves room for others.
func TestAFloodOfUnlistedMachinesLeavesRoom(t *testing.T) {
	r := New(nil, nil)
	note := func(machine, address, list string) bool {
		r.Refused(waiting.Entry{Machine: machine, Node: "n", Address: address, List: list, Reason: "EK_UNTRUSTED", Last: time.Unix(int64(len(r.wait)), 0)})
		return r.wait[machine] != nil
	}
	for i := range 40 {
		for j := range 40 {
			note(fmt.Sprintf("flood-%d-%d", i, j), fmt.Sprintf("192.0.2.%d", i), "l")
		}
	}
	if n := len(r.wait); n != waiting.MaxUnlisted {
		t.Errorf("%d are noted, and there is room for %d", n, waiting.MaxUnlisted)
	}
	if !note("own", "10.0.0.1", "l") || !note("refused", "192.0.2.1", "") {
		t.Error("there is no room for others")
	}
	if note("one more", "192.0.2.1", "l") {
		t.Error("a source of the flood displaces another")
	}
	if len(r.wait) != waiting.MaxUnlisted+1 {
		t.Errorf("%d are noted", len(r.wait))
	}
}
