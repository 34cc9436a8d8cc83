package records

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

func TestTheListOfWhoWaitsIsKeptShortAndQuiet(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	old := waiting.Entry{Node: "node3", Role: "worker", Reason: "POLICY_REFUSED", Since: now.Add(-10 * time.Minute), Last: now.Add(-30 * time.Second)}
	news := func(change func(*waiting.Entry)) map[string]*waiting.Entry {
		e := waiting.Entry{Machine: "aa", Reason: "POLICY_REFUSED", Last: now}
		change(&e)
		return map[string]*waiting.Entry{"aa": &e}
	}
	full := map[string]string{}
	for i := range waiting.Max {
		full[fmt.Sprintf("%02x", i)] = entry(t, old)
	}
	for name, tt := range map[string]struct {
		have map[string]string
		news map[string]*waiting.Entry
		want string // the patch of aa: "" for none, "null", or a part of it
	}{
		"a new machine":                         {nil, news(func(*waiting.Entry) {}), `"since":"2026-11-21T12:00:00Z"`},
		"the same again at once":                {map[string]string{"aa": entry(t, old)}, news(func(*waiting.Entry) {}), ""},
		"the same after a while":                {map[string]string{"aa": entry(t, old)}, news(func(e *waiting.Entry) { e.Last = now.Add(time.Minute) }), `"since":"2026-11-21T11:50:00Z"`},
		"another reason":                        {map[string]string{"aa": entry(t, old)}, news(func(e *waiting.Entry) { e.Reason = "BANNED" }), `"since":"2026-11-21T12:00:00Z"`},
		"a name that it said before":            {map[string]string{"aa": entry(t, old)}, news(func(e *waiting.Entry) { e.Reason = "BANNED" }), `"node":"node3"`},
		"an admitted machine":                   {map[string]string{"aa": entry(t, old)}, map[string]*waiting.Entry{"aa": nil}, "null"},
		"an admitted machine that never waited": {nil, map[string]*waiting.Entry{"aa": nil}, ""},
		"one that has not come for an hour":     {map[string]string{"aa": entry(t, waiting.Entry{Reason: "X", Last: now.Add(-61 * time.Minute)})}, nil, "null"},
		"what is no entry":                      {map[string]string{"aa": "{"}, nil, "null"},
		"one more than fit":                     {full, news(func(*waiting.Entry) {}), ""},
		"an entry that is too long":             {nil, news(func(e *waiting.Entry) { e.Node = strings.Repeat("x", waiting.MaxSize) }), ""},
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
