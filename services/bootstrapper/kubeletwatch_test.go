package bootstrapper_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// units is a machine with a bootstrapper unit, which is started when it does not run.
type units struct {
	*machinetest.Machine
	w *fixture

	mu    sync.Mutex
	lives []*running
}

func (u *units) Unit(ctx context.Context, verb, unit string) error {
	if err := u.Machine.Unit(ctx, verb, unit); err != nil || unit != machine.UnitBootstrapper {
		return err
	}
	if verb != "start" {
		u.w.t.Errorf("%s: one that is at work would be interrupted", verb)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if n := len(u.lives); n == 0 || u.lives[n-1].over() {
		u.lives = append(u.lives, u.w.boot())
	}
	return nil
}

// over reports whether this run of the bootstrapper has ended, and keeps its error.
func (r *running) over() bool {
	select {
	case err := <-r.done:
		r.done <- err
		return true
	default:
		return false
	}
}

// watch runs the renewal's check of the kubelet's certificate until the test ends. looks counts the checks.
func (w *fixture) watch(t *testing.T) (u *units, looks *atomic.Int64) {
	t.Helper()
	u, looks = &units{Machine: w.machine, w: w}, new(atomic.Int64)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() {
		done <- kubelet.Watch(ctx, kubelet.WatchConfig{
			Root: w.root, Machine: u, Interval: 5 * time.Millisecond, Log: slog.New(slog.NewJSONHandler(w.logged, nil)),
			Now: func() time.Time { looks.Add(1); return w.now() },
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		for _, r := range u.lives {
			r.kill(t)
		}
	})
	return u, looks
}

// passes moves the clock while the machine runs.
func (w *fixture) passes(d time.Duration) { w.now = func() time.Time { return time.Now().Add(d) } }

// The node is not rebooted, and only the renewal starts its bootstrapper.
func TestANodeThatRanOnWhenItsKubeletsCertificateEndedComesBack(t *testing.T) {
	for name, become := range map[string]func(t *testing.T) (*fixture, *joinservice){
		"a worker asks a joinservice": joined,
		"a control plane signs them itself": func(t *testing.T) (*fixture, *joinservice) {
			w := first(t)
			r := w.boot()
			if out := w.init(t.Context(), r, w.request()); out.err != nil {
				t.Fatal(out.err, w.logged)
			}
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			return w, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := become(t)
			before, calls := w.kubeletPair(t, clientFile), len(w.machine.Calls())
			w.passes(26 * time.Hour)
			if j != nil {
				j.ahead.Store(int64(26 * time.Hour))
			}
			u, _ := w.watch(t)
			eventually(t, "its kubelet has another certificate, and runs", func() bool {
				u.mu.Lock()
				defer u.mu.Unlock()
				return len(u.lives) == 1 && u.lives[0].over()
			})
			client := w.kubeletPair(t, clientFile)
			if now := w.now(); client.Equal(before) || now.Before(client.NotBefore) || now.After(client.NotAfter) || !w.machine.Running(machine.UnitKubelet) {
				t.Errorf("it has one of %s to %s", client.NotBefore, client.NotAfter)
			}
			if bytes.Equal(client.RawSubjectPublicKeyInfo, before.RawSubjectPublicKeyInfo) {
				t.Error("the key is the old one")
			}
			if c := w.machine.Calls()[calls:]; !slices.Contains(c, "stop "+machine.UnitKubelet) || c[len(c)-1] != "start "+machine.UnitKubelet {
				t.Errorf("the kubelet that has the old one in its memory was not restarted: %q", c)
			}
			if j != nil && len(j.renewedCSRs()) != 1 {
				t.Errorf("it asked %d times", len(j.renewedCSRs()))
			}
			w.holdsNoLongLife(t)
		})
	}
}

// The kubelet renews its certificates itself while it can, also one that is about to end or looks not yet valid by this machine's clock.
func TestAKubeletThatCanAskItselfIsLeftAlone(t *testing.T) {
	for name, passed := range map[string]time.Duration{"at half of its life": 30 * time.Minute, "just before its end": 50 * time.Minute, "with a clock that was put back": -30 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			w, j := joined(t)
			w.passes(passed)
			u, looks := w.watch(t)
			eventually(t, "it has looked", func() bool { return looks.Load() > 10 })
			u.mu.Lock()
			defer u.mu.Unlock()
			if len(u.lives) > 0 || !w.machine.Running(machine.UnitKubelet) || len(j.renewedCSRs()) > 0 {
				t.Error("the bootstrapper was started")
			}
		})
	}
}

// J7: the joinservice refuses by the same call as at a boot. Until the ban is lifted, the node has one bootstrapper that asks, and no kubelet.
func TestABannedNodeThatRunsOnGetsNothing(t *testing.T) {
	w, j := joined(t)
	before := w.kubeletPair(t, clientFile)
	w.passes(2 * time.Hour)
	j.ahead.Store(int64(2 * time.Hour))
	j.onRenewal(func(int, *joinv1.RenewNodeCertificatesResponse) error {
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "no")
	})
	u, looks := w.watch(t)
	eventually(t, "it is refused again and again", func() bool { return len(j.renewedCSRs()) > 3 && looks.Load() > 10 })
	u.mu.Lock()
	lives := len(u.lives)
	u.mu.Unlock()
	if lives != 1 || w.machine.Running(machine.UnitKubelet) || !w.kubeletPair(t, clientFile).Equal(before) {
		t.Errorf("%d bootstrappers; its kubelet runs, or has another certificate", lives)
	}
	j.onRenewal(nil)
	eventually(t, "it is back once it is allowed", func() bool {
		return w.machine.Running(machine.UnitKubelet) && !w.kubeletPair(t, clientFile).Equal(before)
	})
}

// Neither a unit that fails nor a file that is gone stops the watch.
func TestTheWatchGoesOnWhenTheBootstrapperDoesNotStart(t *testing.T) {
	w, _ := joined(t)
	w.passes(0)
	if err := os.Remove(filepath.Join(w.root, clientFile)); err != nil {
		t.Fatal(err)
	}
	var failed atomic.Int64
	w.machine.Step = func(name string) error {
		if name == "start "+machine.UnitBootstrapper && failed.Add(1) < 5 {
			return errors.New("no")
		}
		return nil
	}
	u, _ := w.watch(t)
	eventually(t, "it is back", func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		return len(u.lives) > 0 && u.lives[0].over()
	})
	if c := w.kubeletPair(t, clientFile); w.now().After(c.NotAfter) || !w.machine.Running(machine.UnitKubelet) {
		t.Errorf("it has one to %s", c.NotAfter)
	}
}

func TestAWatchWithoutAMachineIsRefused(t *testing.T) {
	if err := kubelet.Watch(t.Context(), kubelet.WatchConfig{Root: "/", Interval: time.Hour, Now: time.Now, Log: slog.Default()}); err == nil {
		t.Error("it ran")
	}
}
