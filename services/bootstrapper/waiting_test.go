package bootstrapper_test

import (
	"context"
	"crypto/sha256"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The reason why a machine waits is on its console, in its log, and in the answer to `muster status --endpoint`.
func TestWhatAMachineWaitsForIsOnItsConsoleInItsLogAndInItsStatus(t *testing.T) {
	refuses := func(r attestv1.Reason) func(*fixture, *joinservice) {
		return func(_ *fixture, j *joinservice) {
			j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
				return nil, attest.RefuseFor(time.Hour, r, "details that are for the joinservice's log")
			}, nil)
		}
	}
	for name, tt := range map[string]struct {
		cause  func(w *fixture, j *joinservice)
		reason string // empty: no failure
		line   string // JOINSERVICE is replaced by the address
	}{
		"no joinservice can be reached": {
			func(w *fixture, _ *joinservice) { w.meta.JoinEndpoints = []string{"127.0.0.1:1"} },
			"NOT_READY", "no joinservice can be reached at 127.0.0.1:1; next try in ",
		},
		"refused by the policy": {
			refuses(attestv1.Reason_REASON_POLICY_REFUSED),
			"POLICY_REFUSED", "POLICY_REFUSED by JOINSERVICE (this machine's measurements are not in the owner's policy); next try in ",
		},
		"banned": {refuses(attestv1.Reason_REASON_BANNED), "BANNED", "BANNED by JOINSERVICE (the owner has banned this machine); next try in "},
		"an approval is pending": {
			refuses(attestv1.Reason_REASON_CERTIFICATE_PENDING),
			"CERTIFICATE_PENDING", "CERTIFICATE_PENDING by JOINSERVICE (the cluster did not sign the certificates in time); next try in ",
		},
		"another machine becomes a control plane": {
			refuses(attestv1.Reason_REASON_CONTROL_PLANE_BUSY),
			"CONTROL_PLANE_BUSY", "CONTROL_PLANE_BUSY by JOINSERVICE (another machine is about to become a control plane; this one follows after it); next try in ",
		},
		"the clock is off": {
			func(w *fixture, _ *joinservice) { w.now = func() time.Time { return time.Now().Add(-3 * time.Hour) } },
			"CLOCK_SKEW", "this machine does not accept what JOINSERVICE answers: CLOCK_SKEW (the clock of this machine and the cluster's differ: set the wrong one); next try in ",
		},
		"an init is waited for": {
			func(w *fixture, _ *joinservice) {
				w.meta.JoinEndpoints, w.meta.Role = nil, "control-plane"
				hash := sha256.Sum256([]byte("secret"))
				w.meta.InitSecretHash = &hash
			},
			"", "the metadata name no joinservice (joinEndpoints); `muster init` can make it the first of a new one; next try in ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := worker(t)
			tt.cause(w, j)
			w.screen = filepath.Join(t.TempDir(), "console")
			if err := os.WriteFile(w.screen, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			r := w.boot()
			defer r.kill(t)
			want := "muster: waiting to join a cluster: " + strings.ReplaceAll(tt.line, "JOINSERVICE", j.addr)
			eventually(t, "the console shows "+want, func() bool {
				b, err := os.ReadFile(w.screen)
				if err != nil {
					t.Fatal(err)
				}
				return strings.Contains(string(b), want) && strings.Contains(string(b), "muster: this machine has the ID "+w.tpm.ID().String()+"\r\n")
			})
			s, err := appraisal.AskMachine(t.Context(), appraisal.VerifyConfig{Target: peerdial.Target{
				Addr: r.addr, Purpose: attest.PurposeMachine, Policy: attesttest.ParsedPolicy(t, w.ca, []*attesttest.Machine{w.tpm}), Locks: []attest.Lock{attest.Unlocked()},
			}})
			if err != nil {
				t.Fatal(err)
			}
			if s.Phase != "waiting" || s.Reason != tt.reason || !s.Proven || s.InitAllowed != (tt.reason == "") {
				t.Errorf("status %+v", s)
			}
			if tt.reason == "" {
				return
			}
			if s.Remedy == "" || s.FailedAttempts == 0 || s.LastAttempt == nil {
				t.Errorf("status %+v", s)
			}
			if !slices.ContainsFunc(strings.Split(w.logged.String(), "\n"), func(l string) bool {
				return strings.Contains(l, `"msg":"not joined yet"`) && strings.Contains(l, `"reason":"`+tt.reason+`"`)
			}) {
				t.Errorf("the log has no %s: %s", tt.reason, w.logged)
			}
		})
	}
}
