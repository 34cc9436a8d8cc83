package unlock_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestADiskThatNeverBecameAClustersIsFormattedAndNobodyIsAsked(t *testing.T) {
	for _, state := range []disk.State{disk.StateBlank, disk.StateNew} {
		t.Run(state.String(), func(t *testing.T) {
			w := newFixture(t)
			j := w.cluster(w.like(), w.owner)
			w.disk.state, w.disk.format = state, errors.New("the device is not ready")
			r := w.bootFailing(attestv1.Reason_REASON_STATE_DISK)
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			if !w.disk.wrote || j.asked() > 0 {
				t.Errorf("formatted %t, asked %d times", w.disk.wrote, j.asked())
			}
			if d, err := w.desired.Load(); err != nil || d == nil || d.Uncompared != component.UncomparedNew { // B8
				t.Errorf("kept is %+v, %v", d, err)
			}
			lines := w.lines()
			for _, want := range []string{"muster: formatting the state disk: 0 % of 32 MiB", "muster: formatting the state disk: 50 % of 32 MiB", "muster: formatting the state disk: 100 % of 32 MiB", "muster: the state disk is open"} {
				if !slices.Contains(lines, want) {
					t.Errorf("no line %q in %q", want, lines)
				}
			}
			if len(lines) > 2*12+3 {
				t.Errorf("%d lines: %q", len(lines), lines)
			}
		})
	}
}

// The cluster of the key that opened the disk is unknown if the disk is found open.
func TestADiskThatIsFoundOpenIsClosedAndOpenedAnew(t *testing.T) {
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	w.disk.state = disk.StateOpen
	if err := w.boot().end(t); err != nil || w.disk.closed != 1 || w.disk.opens != 1 || j.asked() != 1 {
		t.Errorf("%v, closed %d times, opened %d times, asked %d times", err, w.disk.closed, w.disk.opens, j.asked())
	}
	w.lockedTo(clusterID)
}

// The machine does not reboot with the process, so PCR 15 stays as it is, and no joinservice gives the key again.
func TestAProcessThatDiesWhenTheDiskIsOpenAndTheMachineLockedHasDoneItsWork(t *testing.T) {
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	if err := w.boot().end(t); err != nil || w.disk.opens != 1 {
		t.Fatal(err, w.disk.opens) // the next process can't see whether this one ended after that
	}
	w.lockedTo(clusterID)
	j.script(refuses(attestv1.Reason_REASON_LOCK_FOREIGN, 0))
	if err := w.boot().end(t); err != nil || w.disk.closed != 0 || w.disk.opens != 1 || j.asked() != 1 {
		t.Errorf("%v, closed %d times, opened %d times, asked %d times", err, w.disk.closed, w.disk.opens, j.asked())
	}
	w.lockedTo(clusterID)
}

// A disk that its maker's own cluster opens must not run in a machine that is locked to another cluster, or unlocked.
func TestAJoinserviceSpeaksForTheClusterOfItsOwnMachineAlone(t *testing.T) {
	w := newFixture(t)
	other := keys.ClusterID(bytes.Repeat([]byte{0xC2}, 32))
	j := w.cluster(w.like(), w.owner) // its machine is locked to clusterID
	j.script(func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
		resp, err := gives(right)(req)
		resp.ClusterId = other[:]
		return resp, err
	})
	r := w.bootFailing(attestv1.Reason_REASON_LOCK_FOREIGN)
	if w.disk.tried > 0 || !bytes.Equal(w.machine.PCRs()[attest.LockPCR], make([]byte, 32)) {
		t.Errorf("tried %d keys, PCR 15 %x", w.disk.tried, w.machine.PCRs()[attest.LockPCR])
	}
	j.script(gives(right))
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	w.lockedTo(clusterID)
}

// B1: a machine that was locked to another cluster since its boot never opens a disk; a wrong key does not lock it.
func TestTheFirstKeyThatOpensTheDiskDecidesTheCluster(t *testing.T) {
	w := newFixture(t)
	w.meta.Role = "control-plane"
	other := keys.ClusterID(bytes.Repeat([]byte{0xC2}, 32))
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	w.recovery = func(ctx context.Context, _ keys.DiskID, try unlock.Try) error {
		if err := try(ctx, parsed(t, wrong), other, component.Desired{}); !errors.Is(err, disk.ErrWrongKey) {
			t.Errorf("a wrong key: %v", err)
		}
		if !bytes.Equal(w.machine.PCRs()[attest.LockPCR], make([]byte, 32)) {
			t.Error("a wrong key has locked the machine")
		}
		w.machine.SetPCR(attest.LockPCR, bytes.Repeat([]byte{1}, 32)) // the lock fails once the disk is open
		if err := try(ctx, parsed(t, right), clusterID, component.Desired{}); attest.ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
			t.Errorf("opened in a machine of another cluster: %v", err)
		}
		w.machine.SetPCR(attest.LockPCR, make([]byte, 32))
		// No other cluster takes the open disk.
		if err := try(ctx, parsed(t, wrong), other, component.Desired{}); err != nil {
			t.Errorf("the lock is not taken up: %v", err)
		}
		<-ctx.Done()
		return nil
	}
	if err := w.boot().end(t); err != nil || w.disk.opens != 1 {
		t.Errorf("%v, opened %d times", err, w.disk.opens)
	}
	w.lockedTo(clusterID)
}

func TestALockedDiskIsOpenedByTheKeyOfAJoinservice(t *testing.T) {
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if w.disk.opens != 1 || j.asked() != 1 {
		t.Errorf("opened %d times, asked %d times", w.disk.opens, j.asked())
	}
	req := j.requests[0]
	if req.GetNodeName() != "node2" || req.GetRole() != joinv1.Role_ROLE_WORKER || req.GetDiskId() != diskID {
		t.Errorf("asked %v", req)
	}
	if p := j.peers[0]; p.Machine() != w.machine.ID() || !bytes.Equal(p.Claims().PCR(15), make([]byte, 32)) {
		t.Errorf("asked as %s with PCR 15 %x", p.Machine(), p.Claims().PCR(15))
	}
	if metric(t, r, attestv1.Reason_REASON_ACCEPTED) != 1 {
		t.Error("muster_unlock_attempts_total")
	}
	// K3
	screen, err := os.ReadFile(w.screen)
	if err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string][]byte{"log": w.log.Bytes(), "console": screen} {
		if bytes.Contains(text, right) || bytes.Contains(text, []byte(hex.EncodeToString(right))) {
			t.Errorf("the key is on the %s", what)
		}
	}
	if lines := w.lines(); !slices.Contains(lines, "muster: the state disk is open") {
		t.Errorf("console %q", lines)
	}
}

// The refusal of a joinservice is reported with its reason, and the machine asks again until it gets the key.
func TestARefusalIsToldAndTheMachineAsksAgain(t *testing.T) {
	for reason, words := range map[attestv1.Reason]string{
		attestv1.Reason_REASON_NOT_ENROLLED:    "no longer enrolled, for example after muster forget",
		attestv1.Reason_REASON_POLICY_REFUSED:  "measurements are not in the owner's policy",
		attestv1.Reason_REASON_DISK_MISMATCH:   "another state disk",
		attestv1.Reason_REASON_NAME_TAKEN:      "belongs to another one",
		attestv1.Reason_REASON_KMS_UNAVAILABLE: "key service",
	} {
		t.Run(attest.ReasonName(reason), func(t *testing.T) {
			w := newFixture(t)
			j := w.cluster(w.like(), w.owner)
			j.script(refuses(reason, 0))
			r := w.bootFailing(reason)
			// A refusal that repeats must not write another line.
			eventually(t, "asked again", func() bool { return j.asked() > 5 })
			j.script(gives(right))
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("muster: waiting for the key of the state disk: %s by %s (", attest.ReasonName(reason), j.addr)
			count := 0
			for _, l := range w.lines() {
				if strings.HasPrefix(l, want) && strings.Contains(l, words) && strings.Contains(l, "; next try in 1 s") {
					count++
				}
				if strings.Contains(l, "joinservice's log") {
					t.Errorf("more than the reason: %q", l)
				}
			}
			if count != 1 {
				t.Errorf("logged %d times: %q", count, w.lines())
			}
		})
	}
}

func TestTheJoinservicesHintWinsAndTheStatusSaysWhenTheNextAttemptIs(t *testing.T) {
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_BUSY, 10*time.Minute))
	r := w.bootFailing(attestv1.Reason_REASON_BUSY)
	s, err := r.GetStatus(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	id := w.machine.ID()
	if s.GetPhase() != initv1.Phase_PHASE_UNLOCKING || s.GetLastReason() != attestv1.Reason_REASON_BUSY || s.GetRemedy() == "" || s.GetFailedAttempts() != 1 || !bytes.Equal(s.GetMachineId(), id[:]) ||
		s.GetNodeName() != "node2" || s.GetRole() != "worker" || !slices.Equal(s.GetJoinEndpoints(), []string{j.addr}) || s.GetSince() == nil {
		t.Errorf("status %v", s)
	}
	if wait := s.GetNextAttempt().AsTime().Sub(s.GetLastAttempt().AsTime()); s.GetLastAttempt() == nil || wait < 9*time.Minute {
		t.Errorf("next try in %s", wait)
	}
	if strings.Contains(s.String(), "joinservice's log") { // R1
		t.Errorf("an unauthenticated client learns more than the reason: %v", s)
	}
	eventually(t, "the console says how many minutes", func() bool {
		return slices.ContainsFunc(w.lines(), func(l string) bool { return strings.HasSuffix(l, " min") })
	})
}

// The joinservice may be one of another cluster of the same owner: its key opens nothing, and the next one is asked.
func TestAKeyThatDoesNotOpenTheDiskIsToldAndTheNextJoinserviceIsAsked(t *testing.T) {
	w := newFixture(t)
	first := w.cluster(w.like(), w.owner)
	first.script(gives(wrong))
	w.timing.Stagger = time.Hour // the first in the list is asked first
	second := w.cluster(w.like(), w.owner)
	r := w.bootFailing(attestv1.Reason_REASON_STATE_DISK)
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if first.asked() != 1 || second.asked() != 1 || w.disk.tried != 2 || w.disk.opens != 1 {
		t.Errorf("asked %d and %d times, tried %d keys", first.asked(), second.asked(), w.disk.tried)
	}
}

func TestAnAnswerThatHasNotItsFormIsRefused(t *testing.T) {
	for name, spoil := range map[string]func(*joinv1.IssueRejoinTicketResponse){
		"no ticket ID":       func(r *joinv1.IssueRejoinTicketResponse) { r.TicketId = nil },
		"a short cluster ID": func(r *joinv1.IssueRejoinTicketResponse) { r.ClusterId = r.GetClusterId()[1:] },
		"no key":             func(r *joinv1.IssueRejoinTicketResponse) { r.DiskKey = nil },
		"a long key":         func(r *joinv1.IssueRejoinTicketResponse) { r.DiskKey = make([]byte, 33) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			j := w.cluster(w.like(), w.owner)
			j.script(func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
				resp, err := gives(right)(req)
				spoil(resp)
				return resp, err
			})
			r := w.bootFailing(attestv1.Reason_REASON_REQUEST_INVALID)
			if w.disk.tried > 0 {
				t.Error("its key was tried")
			}
			j.script(gives(right))
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// The machine verifies the joinservice that may open its disk, as it verifies the one that may make it a node (A7).
func TestAJoinserviceIsJudgedBeforeItIsAsked(t *testing.T) {
	for name, tt := range map[string]struct {
		setUp func(t *testing.T, w *fixture) *joinservice
		want  attestv1.Reason // 0: accepted
	}{
		"another owner's": {func(t *testing.T, w *fixture) *joinservice {
			_, other, err := ed25519.GenerateKey(nil)
			if err != nil {
				t.Fatal(err)
			}
			return w.cluster(w.like(), other)
		}, attestv1.Reason_REASON_POLICY_SIGNATURE},
		"one that booted something else": {func(t *testing.T, w *fixture) *joinservice {
			return w.cluster(attesttest.NewMachine(t, w.ca, attesttest.Options{Image: "other"}), w.owner)
		}, attestv1.Reason_REASON_POLICY_REFUSED},
		"one whose TPM no root certifies": {func(t *testing.T, w *fixture) *joinservice {
			return w.cluster(attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), w.owner)
		}, attestv1.Reason_REASON_EK_UNTRUSTED},
		"a worker, with the real policy": {func(_ *testing.T, w *fixture) *joinservice {
			return w.cluster(attesttest.NewMachine(w.t, w.ca, attesttest.Options{}), w.owner, attesttest.ControlPlanes(w.planes...))
		}, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"without an owner's key: one that booted something else": {func(t *testing.T, w *fixture) *joinservice {
			w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
			return w.cluster(attesttest.NewMachine(t, w.ca, attesttest.Options{Image: "other"}), w.owner)
		}, attestv1.Reason_REASON_POLICY_REFUSED},
		"without an owner's key: one that booted the same": {func(_ *testing.T, w *fixture) *joinservice {
			w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
			return w.cluster(w.like(), w.owner)
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			j := tt.setUp(t, w)
			if tt.want == 0 {
				if err := w.boot().end(t); err != nil {
					t.Fatal(err)
				}
				return
			}
			r := w.bootFailing(tt.want)
			if j.asked() > 0 {
				t.Error("it was asked")
			}
			eventually(t, "the console says why", func() bool {
				return slices.ContainsFunc(w.lines(), func(l string) bool {
					return strings.Contains(l, "this machine does not accept what "+j.addr+" answers: "+attest.ReasonName(tt.want))
				})
			})
			good := w.cluster(w.like(), w.owner)
			w.set(func(w *fixture) { w.meta.JoinEndpoints = []string{good.addr} })
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestAnOlderPolicyThanOneOfThisBootIsRefused(t *testing.T) {
	w := newFixture(t)
	w.timing.Stagger = time.Hour
	newer := w.cluster(w.like(), w.owner, func(p *attestv1.Policy) { p.Serial = 7 })
	newer.script(refuses(attestv1.Reason_REASON_KMS_UNAVAILABLE, 0))
	r := w.boot()
	eventually(t, "the newer policy was seen", func() bool { return newer.asked() > 0 })
	older := w.cluster(w.like(), w.owner)
	w.set(func(w *fixture) { w.meta.JoinEndpoints = []string{older.addr} })
	eventually(t, "the older one is refused", func() bool { return metric(t, r, attestv1.Reason_REASON_POLICY_INVALID) > 0 })
	if older.asked() > 0 {
		t.Error("it was asked")
	}
}

// After each failure the machine retries, and continues once the failure is repaired.
func TestWhatIsWrongIsToldAndTriedAgain(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil  func(w *fixture, j *joinservice)
		repair func(w *fixture, j *joinservice)
		want   attestv1.Reason
		line   string
	}{
		"metadata that can't be read": {
			func(w *fixture, _ *joinservice) { w.unreadable = errors.New("line 3: no such role") },
			func(w *fixture, _ *joinservice) { w.set(func(w *fixture) { w.unreadable = nil }) },
			attestv1.Reason_REASON_MACHINE_CONFIG, "waiting for the key of the state disk: MACHINE_CONFIG",
		},
		"metadata that name nobody": {
			func(w *fixture, _ *joinservice) { w.meta.JoinEndpoints = nil },
			func(w *fixture, j *joinservice) { w.set(func(w *fixture) { w.meta.JoinEndpoints = []string{j.addr} }) },
			attestv1.Reason_REASON_MACHINE_CONFIG, "waiting for the key of the state disk: the metadata name no joinservice",
		},
		"nobody who answers": {
			func(w *fixture, _ *joinservice) { w.meta.JoinEndpoints = []string{"127.0.0.1:1"} },
			func(w *fixture, j *joinservice) { w.set(func(w *fixture) { w.meta.JoinEndpoints = []string{j.addr} }) },
			attestv1.Reason_REASON_NOT_READY, "waiting for the key of the state disk: no joinservice can be reached at 127.0.0.1:1",
		},
		"a header that Muster did not write": {
			func(w *fixture, _ *joinservice) {
				w.disk.broken = attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the cipher is null")
			},
			func(w *fixture, _ *joinservice) { w.disk.set(func(v *volume) { v.broken = nil }) },
			attestv1.Reason_REASON_STATE_DISK, "can't use the state disk: STATE_DISK (the state disk can't be used): the cipher is null",
		},
		"a device that is not there yet": {
			func(w *fixture, _ *joinservice) { w.disk.broken = os.ErrNotExist },
			func(w *fixture, _ *joinservice) { w.disk.set(func(v *volume) { v.broken = nil }) },
			attestv1.Reason_REASON_STATE_DISK, "can't use the state disk",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			j := w.cluster(w.like(), w.owner)
			tt.spoil(w, j)
			r := w.bootFailing(tt.want)
			if j.asked() > 0 {
				t.Error("a joinservice was asked")
			}
			eventually(t, "the console says "+tt.line, func() bool {
				return slices.ContainsFunc(w.lines(), func(l string) bool { return strings.HasPrefix(l, "muster: "+tt.line) })
			})
			s, err := r.GetStatus(t.Context(), nil)
			if err != nil || s.GetLastReason() != tt.want {
				t.Errorf("status %v, %v", s, err)
			}
			tt.repair(w, j)
			if err := r.end(t); err != nil || w.disk.opens != 1 {
				t.Errorf("%v, opened %d times", err, w.disk.opens)
			}
		})
	}
}

func TestAMachineTellsThatItsDiskHasNoIntegrity(t *testing.T) {
	for integrity, want := range map[string]float64{metadata.IntegrityNone: 1, metadata.IntegrityHMAC: 0} {
		w := newFixture(t)
		w.cluster(w.like(), w.owner)
		w.image.StateDisk.Integrity = integrity
		r := w.boot()
		if got := refusaltest.Sum(r.families(t), "muster_insecure_config", "reason", metadata.InsecureIntegrity); got != want {
			t.Errorf("%s: %v", integrity, got)
		}
		if err := r.end(t); err != nil {
			t.Error(err)
		}
	}
}

func TestItEndsWithItsContextAlone(t *testing.T) {
	w := newFixture(t)
	w.meta.JoinEndpoints = []string{"127.0.0.1:1"}
	r := w.bootFailing(attestv1.Reason_REASON_NOT_READY)
	r.stop()
	if err := r.end(t); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// This runs the whole process: it serves its status to every HTTPS client, and ends when the disk is open.
func TestServeTellsItsStatusUntilTheDiskIsOpen(t *testing.T) {
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_NOT_ENROLLED, 0))
	done := make(chan error, 1)
	go func() { done <- unlock.Serve(t.Context(), w.config()) }()
	addr := w.logged("init")
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	client := initv1connect.NewMachineServiceClient(&http.Client{Transport: transport}, "https://"+addr)
	eventually(t, "the status has the reason", func() bool {
		s, err := client.GetStatus(t.Context(), &initv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return s.GetPhase() == initv1.Phase_PHASE_UNLOCKING && s.GetLastReason() == attestv1.Reason_REASON_NOT_ENROLLED
	})
	transport.CloseIdleConnections()
	j.script(gives(right))
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("it does not end")
	}
}

func TestNewWantsItsParts(t *testing.T) {
	w := newFixture(t)
	cfg := w.config()
	if _, err := unlock.New(cfg); err == nil || !strings.Contains(err.Error(), "required") {
		t.Errorf("without Metrics: %v", err)
	}
	if err := unlock.Serve(t.Context(), unlock.Config{}); err == nil {
		t.Error("an empty configuration is served")
	}
}
