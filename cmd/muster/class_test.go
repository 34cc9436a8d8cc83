package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The owner sees the values that a class accepts, and a warning if rules over the event log require nothing about Secure Boot.
func TestAddClassShowsTheValuesAndWarnsOfSecureBoot(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, tt := range map[string]struct {
		secureBoot, eventLog, warned bool
	}{
		"values":                    {},
		"values, Secure Boot on":    {secureBoot: true},
		"event log":                 {eventLog: true, warned: true},
		"event log, Secure Boot on": {secureBoot: true, eventLog: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{SecureBoot: tt.secureBoot})
			w := serveWaiting(t, m)
			policy := save(t, filepath.Join(t.TempDir(), "policy.yaml"), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			add := func(class string, more ...string) (out, log string) {
				t.Helper()
				var o, l strings.Builder
				args := append([]string{"policy", "add-class", class, "--from", w.addr, "--policy", policy, "--timeout", "10m"}, more...)
				if tt.eventLog {
					args = append(args, "--event-log")
				}
				if err := (&app{stdout: &o, stderr: &l}).run(t.Context(), args); err != nil {
					t.Fatal(err)
				}
				return o.String(), l.String()
			}
			out, log := add("rack-1")
			for _, i := range []int{0, 2, 3, 7} {
				if line := fmt.Sprintf("\nPCR %d        %s\n", i, hex.EncodeToString(m.PCRs()[i])); !strings.Contains(out, line) {
					t.Errorf("no line %q:\n%s", line, out)
				}
			}
			if !strings.Contains(out, "before muster policy apply") {
				t.Errorf("it does not say when the class counts:\n%s", out)
			}
			if got := strings.Contains(log, "class rack-1 requires nothing about Secure Boot"); got != tt.warned {
				t.Errorf("warned: %t, want %t: %q", got, tt.warned, log)
			}
			out, log = add("rack-2", "--output", "json")
			var got struct {
				PCRs map[string]string `json:"pcrs"`
			}
			if err := json.Unmarshal([]byte(out), &got); err != nil || len(got.PCRs) != 4 || got.PCRs["7"] != hex.EncodeToString(m.PCRs()[7]) {
				t.Errorf("%v: %s", err, out)
			}
			if got := strings.Contains(log, "Warning: "); got != tt.warned {
				t.Errorf("warned: %t, want %t: %q", got, tt.warned, log)
			}
		})
	}
}

// An address may lead to another machine, which the owner did not handle.
func TestAddClassTakesNoOtherMachinesValues(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m)
	path := filepath.Join(t.TempDir(), "policy.yaml")
	save(t, path, attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	add := func(id string) error {
		return (&app{stdout: io.Discard, stderr: io.Discard}).run(t.Context(), []string{"policy", "add-class", "rack-1", "--from", w.addr, "--policy", path, "--timeout", "10m", "--machine-id", id})
	}
	err = add(strings.Repeat("ab", 32))
	if attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED || !strings.Contains(err.Error(), m.ID().String()) {
		t.Errorf("%v", err)
	}
	if err := add("abc"); err == nil || !strings.Contains(err.Error(), "--machine-id") {
		t.Errorf("%v", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the policy was changed: %v", err)
	}
	if err := add(m.ID().String()); err != nil {
		t.Error(err)
	}
}
