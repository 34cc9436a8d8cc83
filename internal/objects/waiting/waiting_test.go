package waiting

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// listed returns n entries of each address. Those of a list lack a place in it.
func listed(list string, n int, addresses ...string) map[string]Entry {
	out := map[string]Entry{}
	for _, a := range addresses {
		for i := range n {
			out[fmt.Sprintf("%s-%02d", a, i)] = Entry{Address: a, List: list, Since: time.Unix(int64(i), 0)}
		}
	}
	return out
}

func sources(n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("192.0.2.%d", i))
	}
	return out
}

func TestUnlistedMachinesHavePlacesOfTheirOwn(t *testing.T) {
	const bare = "tpm2.bareMachineIds"
	for name, tt := range map[string]struct {
		have  map[string]Entry
		e     Entry
		evict string
		ok    bool
	}{
		"the first":                             {nil, Entry{Address: "10.0.0.1", List: bare}, "", true},
		"the last of a source":                  {listed(bare, MaxOfSource-1, "10.0.0.1"), Entry{Address: "10.0.0.1", List: bare}, "", true},
		"one more than a source may have":       {listed(bare, MaxOfSource, "10.0.0.1"), Entry{Address: "10.0.0.1", List: bare}, "", false},
		"one of another source":                 {listed(bare, MaxOfSource, "10.0.0.1"), Entry{Address: "10.0.0.2", List: bare}, "", true},
		"one of the same IPv6 network":          {listed(bare, MaxOfSource, "2001:db8::1"), Entry{Address: "2001:db8::ffff", List: bare}, "", false},
		"one of another IPv6 network":           {listed(bare, MaxOfSource, "2001:db8::1"), Entry{Address: "2001:db8:0:1::1", List: bare}, "", true},
		"one without an address":                {listed(bare, MaxOfSource, ""), Entry{List: bare}, "", false},
		"a source with many makes room":         {listed(bare, MaxOfSource, sources(8)...), Entry{Address: "10.0.0.2", List: bare}, "192.0.2.7-07", true},
		"a source with one more keeps it":       {listed(bare, 1, sources(64)...), Entry{Address: "10.0.0.2", List: bare}, "", false},
		"a source that would have as many":      {listed(bare, 2, sources(32)...), Entry{Address: "192.0.2.3", List: bare}, "", false},
		"unlisted machines take no other place": {listed(bare, MaxOfSource, sources(8)...), Entry{Address: "192.0.2.1"}, "", true},
		"others take no place of theirs":        {listed("", 1, sources(64)...), Entry{Address: "192.0.2.1", List: bare}, "", true},
		"others have no bound for a source":     {listed("", Max-1, "10.0.0.1"), Entry{Address: "10.0.0.1"}, "", true},
		"one more than others may be":           {listed("", Max, "10.0.0.1"), Entry{Address: "10.0.0.2"}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			if evict, ok := Room(tt.have, tt.e); evict != tt.evict || ok != tt.ok {
				t.Errorf("evict %q, %v; want %q, %v", evict, ok, tt.evict, tt.ok)
			}
		})
	}
}

// The worst case of docs/limits.md: what the ConfigMap has if all places are taken by the longest entries.
func TestAFullListFitsAConfigMap(t *testing.T) {
	full := map[string]string{}
	for _, list := range []string{"", "tpm2.platformRoots[31].machineIds"} {
		for i := range Max {
			e := Entry{
				Node: strings.Repeat("n", 63), Role: "control-plane", Reason: "PLAIN_STATE_REFUSED", Address: "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
				Endorsement: "ek-certificate", Instance: strings.Repeat(`"`, 1000), Image: strings.Repeat("i", 63), Class: strings.Repeat("c", 63),
				List: list, Differs: strings.Repeat(`\`, 1000), Since: time.Now(), Last: time.Now(),
			}
			text, err := e.Short().Encode()
			if err != nil {
				t.Fatal(err)
			}
			full[fmt.Sprintf("%064x", len(list)<<8|i)] = text
		}
	}
	entries, bad := Parse(full)
	if len(entries) != Max+MaxUnlisted || len(bad) > 0 {
		t.Fatalf("%d entries, %d of them can't be read", len(entries), len(bad))
	}
	b, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d entries, %d KiB", len(full), len(b)>>10)
	if size := (Max + MaxUnlisted) * (MaxSize + 64); size > 512<<10 {
		t.Errorf("entries of the largest size are %d bytes", size)
	}
}

func TestATextIsShortenedAndNotCutWithinACharacter(t *testing.T) {
	e := Entry{Differs: strings.Repeat("ä", maxText), Instance: "x"}.Short()
	if len(e.Differs) != maxText || e.Instance != "x" {
		t.Errorf("%d bytes", len(e.Differs))
	}
	if e = (Entry{Differs: "x" + strings.Repeat("ä", maxText)}).Short(); len(e.Differs) != maxText-1 || strings.ContainsRune(e.Differs, '\uFFFD') {
		t.Errorf("%d bytes: %q", len(e.Differs), e.Differs)
	}
}

func TestOnlyAMachineThatLacksAListIsListable(t *testing.T) {
	for name, tt := range map[string]struct {
		e    Entry
		want bool
	}{
		"no list lacks it":             {Entry{Reason: "POLICY_REFUSED"}, false},
		"it booted something else":     {Entry{List: "tpm2.machineIds", Differs: "PCR 11"}, false},
		"only a list lacks it":         {Entry{List: "tpm2.machineIds"}, true},
		"it differs and needs no list": {Entry{Differs: "PCR 11"}, false},
	} {
		if got := tt.e.Listable(); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
