package crash

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

// long reports whether this is `make test-crash`, which makes more runs of the same tests.
func long() bool { return os.Getenv("MUSTER_CRASH_LONG") != "" }

// runs returns how many runs to make: few, or many for `make test-crash`.
func runs(few, many int) int {
	if long() {
		return many
	}
	return few
}

// seeded returns a source of chance whose seed is printed, and taken from MUSTER_CRASH_SEED if set.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("MUSTER_CRASH_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("MUSTER_CRASH_SEED: %v", err)
		}
		seed = n
	}
	t.Logf("seed: MUSTER_CRASH_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// ending is how a machine's first lives end.
type ending struct {
	killAt    []int         // for each life the effect at which it ends; later lives are not killed
	killIn    []string      // the same by name
	killAfter time.Duration // when the first is killed from outside; 0: not
	hold      string        // where the first waits to be killed, if it gets there before
	reboot    bool          // the machine boots again after each kill
}

const livesAtMost = 12

// bringUp makes the machine a node, like its supervisor and its owner: it restarts a killed process, and repeats a
// failed call.
func (h *host) bringUp(t *testing.T, kind journal.Kind, e ending) (kills int) {
	t.Helper()
	req, id := request(h.mirror)
	for life := range livesAtMost {
		at := -1
		if life < len(e.killAt) {
			at = e.killAt[life]
		}
		h.plan.KillIn = ""
		if life < len(e.killIn) {
			h.plan.KillIn = e.killIn[life]
		}
		h.plan.Hold = nil
		if life == 0 && e.hold != "" {
			h.hold(e.hold)
		}
		l := h.start(at)
		if life == 0 && e.killAfter > 0 {
			timer := time.AfterFunc(e.killAfter, l.kill)
			defer timer.Stop()
		}
		if kind == journal.KindInit {
			if addr := l.addr(t); addr != "" {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				result, err := l.callInit(ctx, addr, req, id)
				cancel()
				if err == nil && string(result.GetClusterId()) != string(id[:]) {
					t.Fatalf("life %d: a result of another cluster", life)
				}
				if err != nil && !dead(l) {
					t.Fatalf("life %d: init: %v\n%s", life, err, l.log)
				}
			}
		}
		if err := l.end(); err == nil {
			return kills
		} else if !l.killed() {
			t.Fatalf("life %d ended with %v\n%s", life, err, l.log)
		}
		kills++
		if e.reboot {
			h.reboot()
		}
	}
	t.Fatalf("not a node after %d lives", livesAtMost)
	return 0
}

// dead reports whether the process is gone, or about to be: a connection is cut before its
// end is known.
func dead(l *life) bool {
	select {
	case <-l.over:
		return true
	case <-time.After(patience):
		return false
	}
}

// pointsOf returns the effects of one life that is not killed.
func pointsOf(t *testing.T, h *host, kind journal.Kind) []string {
	t.Helper()
	h.bringUp(t, kind, ending{})
	return h.effects()
}

// B3: the bootstrapper of an init is killed with SIGKILL at every write of its journal, around the extension of PCR
// 15, and in every phase; in `make test` at a third of these points, beginning at a random one. When it is started
// again, with or without a reboot, and the owner calls again, the machine is the first node of the same cluster.
func TestAnInitThatIsKilledAnywhereEndsAsANode(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_, id := request(b.mirror)
	killEverywhere(t, journal.KindInit, id, runs(3, 1), func(t *testing.T) *host { return b.newHost(t, first(), nil) })
}

// B3: the same for a join, of a worker and of a control plane.
func TestAJoinThatIsKilledAnywhereEndsAsANode(t *testing.T) {
	// A control plane differs only in its files: half as many points, if there is little time.
	for role, every := range map[string]int{"worker": runs(3, 1), "control-plane": runs(6, 1)} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			j := newJoinservice(t, b)
			killEverywhere(t, journal.KindJoin, joinCluster, every, func(t *testing.T) *host {
				return b.newHost(t, meta{Name: "node2", Role: role, JoinEndpoints: []string{j.addr}}, j.ownerKey)
			})
		})
	}
}

// killEverywhere kills at each every-th point.
func killEverywhere(t *testing.T, kind journal.Kind, id [32]byte, every int, newHost func(*testing.T) *host) {
	chance := seeded(t)
	points := pointsOf(t, newHost(t), kind)
	if len(points) < 20 {
		t.Fatalf("only %d points: %q", len(points), points)
	}
	t.Logf("%d points: %s", len(points), strings.Join(points, "; "))
	check := func(t *testing.T, h *host) {
		t.Helper()
		if err := h.isNode(kind, id); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(strings.Join(h.effects(), "\n"))
		}
	}
	for at := chance.IntN(every); at < len(points); at += every {
		name := points[at]
		reboot := chance.IntN(2) == 0
		h := newHost(t)
		kills := h.bringUp(t, kind, ending{killAt: []int{at}, reboot: reboot})
		if kills != 1 {
			t.Errorf("%d (%s): killed %d times", at, name, kills)
		}
		check(t, h)
		if t.Failed() {
			t.Fatalf("killed at %d, %s; reboot %v", at, name, reboot)
		}
	}
	// Killed in kubeadm, and then while that is cleaned up.
	for _, name := range []string{"kubeadm reset begins", "kubeadm reset is over", "the journal says components"} {
		h := newHost(t)
		half := "kubeadm " + string(kind) + " is half done"
		if kills := h.bringUp(t, kind, ending{killIn: []string{half, name}}); kills != 2 {
			t.Errorf("%s: killed %d times", name, kills)
		}
		check(t, h)
	}
	// Killed again and again, at random points, until it succeeds.
	for range runs(2, 50) {
		e := ending{reboot: chance.IntN(2) == 0}
		for range 1 + chance.IntN(5) {
			e.killAt = append(e.killAt, chance.IntN(len(points)))
		}
		h := newHost(t)
		h.bringUp(t, kind, e)
		check(t, h)
		if t.Failed() {
			t.Fatalf("killed at %v; reboot %v", e.killAt, e.reboot)
		}
	}
	// Killed from outside, at any instruction: a process that is faster than the kill waits at its last step.
	began := time.Now()
	h := newHost(t)
	h.bringUp(t, kind, ending{})
	whole := time.Since(began)
	hit, n := 0, runs(4, 100)
	for range n {
		e := ending{reboot: chance.IntN(2) == 0, killAfter: 1 + within(chance, whole), hold: points[len(points)-1]}
		h := newHost(t)
		hit += h.bringUp(t, kind, e)
		check(t, h)
		if t.Failed() {
			t.Fatalf("killed after %s; reboot %v", e.killAfter, e.reboot)
		}
	}
	t.Logf("killed from outside %d times within %s", hit, whole)
	if hit != n {
		t.Errorf("%d of %d kills from outside found the process alive", hit, n)
	}
}

// within returns a random time below limit.
func within(chance *rand.Rand, limit time.Duration) time.Duration {
	return time.Duration(chance.Int64N(int64(limit)))
}
