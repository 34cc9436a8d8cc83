package unlock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The reason why a machine waits is on its console, in its log, and in the answer to `muster status --endpoint`.
func TestWhatAMachineWaitsForIsOnItsConsoleInItsLogAndInItsStatus(t *testing.T) {
	refused := func(r attestv1.Reason) func(*fixture, *joinservice) {
		return func(_ *fixture, j *joinservice) { j.script(refuses(r, time.Hour)) }
	}
	unreachable := func(w *fixture, _ *joinservice) { w.meta.JoinEndpoints = []string{"127.0.0.1:1"} }
	const key = "waiting for the key of the state disk: "
	for name, tt := range map[string]struct {
		cause  func(w *fixture, j *joinservice)
		reason string
		line   string // JOINSERVICE is replaced by the address
	}{
		"no joinservice can be reached": {unreachable, "NOT_READY", key + "no joinservice can be reached at 127.0.0.1:1; next try in "},
		"the owner's key is waited for": {
			func(w *fixture, j *joinservice) {
				unreachable(w, j)
				w.meta.Role = "control-plane"
			},
			"NOT_READY", key + "no joinservice can be reached at 127.0.0.1:1; `muster recover` also opens it; next try in ",
		},
		"no joinservice is named": {
			func(w *fixture, _ *joinservice) { w.meta.JoinEndpoints = nil },
			"MACHINE_CONFIG", key + "the metadata name no joinservice (joinEndpoints); next try in ",
		},
		"refused by the policy": {
			refused(attestv1.Reason_REASON_POLICY_REFUSED),
			"POLICY_REFUSED", key + "POLICY_REFUSED by JOINSERVICE (this machine's measurements are not in the owner's policy); next try in ",
		},
		"forgotten": {
			refused(attestv1.Reason_REASON_NOT_ENROLLED), "NOT_ENROLLED",
			key + "NOT_ENROLLED by JOINSERVICE (this machine is no longer enrolled, for example after muster forget: it joins as new with an empty state disk, or continues with this one if the owner enrolls it again with its disk); next try in ",
		},
		"the control plane is busy": {
			refused(attestv1.Reason_REASON_BUSY), "BUSY", key + "BUSY by JOINSERVICE (too many machines ask at once, or this one reboots twice within two minutes; it tries again by itself); next try in ",
		},
		"the disk can't be used": {
			func(w *fixture, _ *joinservice) {
				w.disk.broken = attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the cipher is null")
			},
			"STATE_DISK", "can't use the state disk: STATE_DISK (the state disk can't be used): the cipher is null; next try in ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			j := w.cluster(w.like(), w.owner)
			tt.cause(w, j)
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- unlock.Serve(ctx, w.config()) }()
			defer func() {
				stop()
				if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}()
			addr := w.logged("init")
			want := "muster: " + strings.ReplaceAll(tt.line, "JOINSERVICE", j.addr)
			eventually(t, "the console shows "+want, func() bool {
				return slices.ContainsFunc(w.lines(), func(l string) bool { return strings.HasPrefix(l, want) })
			})
			// The machine reads its ID before it asks for a key, so not for a disk that can't be used.
			if id := "muster: this machine has the ID " + w.machine.ID().String(); slices.Contains(w.lines(), id) != (tt.reason != "STATE_DISK") {
				t.Errorf("the console shows %q: %q", id, w.lines())
			}
			s, err := appraisal.AskMachine(t.Context(), appraisal.VerifyConfig{Target: peerdial.Target{
				Addr: addr, Purpose: attest.PurposeMachine, Policy: attesttest.ParsedPolicy(t, w.ca, []*attesttest.Machine{w.machine}), Locks: []attest.Lock{attest.Unlocked()},
			}})
			if err != nil {
				t.Fatal(err)
			}
			if s.Phase != "unlocking" || s.Reason != tt.reason || s.Remedy == "" || s.FailedAttempts == 0 || s.LastAttempt == nil || !s.Proven {
				t.Errorf("status %+v", s)
			}
			if !slices.ContainsFunc(strings.Split(string(w.log.Bytes()), "\n"), func(l string) bool {
				return strings.Contains(l, `"msg":"not unlocked yet"`) && strings.Contains(l, `"reason":"`+tt.reason+`"`)
			}) {
				t.Errorf("the log has no %s: %s", tt.reason, w.log.Bytes())
			}
		})
	}
}
