package renewal

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// looks makes the renewer check the bans a number of times, each time with the result of the check before.
func looks(t *testing.T, r *Renewer, times int) error {
	t.Helper()
	seen := map[string]time.Time{}
	for range times {
		banned, _, err := r.endStreams(t.Context(), seen, time.Time{})
		if err != nil {
			return err
		}
		seen = banned
	}
	return nil
}

// Invariant J10.
func TestTheAPIServerRestartsOnceABannedNodeIsEvicted(t *testing.T) {
	for name, tt := range map[string]struct {
		with     func(*memoryCluster)
		looks    int
		want     []string
		wantText string
	}{
		"no node is banned": {func(*memoryCluster) {}, 3, nil, ""},
		"banned and evicted": {func(c *memoryCluster) { c.banned = map[string]string{"1": "node2"} }, 5,
			[]string{"lease", "kube-apiserver", "released"}, ""},
		"two of them": {func(c *memoryCluster) { c.banned = map[string]string{"1": "node2", "2": "node3"} }, 5,
			[]string{"lease", "kube-apiserver", "released"}, ""},
		"not evicted yet":       {func(c *memoryCluster) { c.banned, c.stays = map[string]string{"1": "node2"}, "node2" }, 3, nil, ""},
		"gone by the next look": {func(c *memoryCluster) { c.banned = map[string]string{"1": "node2"} }, 1, nil, ""},
		"another control plane restarts": {func(c *memoryCluster) {
			c.banned, c.down = map[string]string{"1": "node2"}, []string{"kube-apiserver-node3"}
		}, 3,
			[]string{"lease", "released"}, "kube-apiserver-node3"},
		"this one is banned too": {func(c *memoryCluster) { c.banned, c.out = map[string]string{"1": "node2"}, true }, 3, nil, "banned"},
	} {
		t.Run(name, func(t *testing.T) {
			root := newControlPlane(t)
			c := &memoryCluster{root: root, lease: new(sync.Mutex)}
			tt.with(c)
			before := leaves(t, root)
			err := looks(t, newRenewer(t, c, at(t, root, 0.1)), tt.looks)
			if tt.wantText == "" && err != nil || tt.wantText != "" && (err == nil || !strings.Contains(err.Error(), tt.wantText)) {
				t.Errorf("error %v, want %q", err, tt.wantText)
			}
			if !slices.Equal(c.order, tt.want) {
				t.Errorf("done: %q, want %q", c.order, tt.want)
			}
			for name, c := range leaves(t, root) {
				if !c.Equal(before[name]) {
					t.Errorf("%s was renewed", name)
				}
			}
		})
	}
}

// Each ban restarts the API server once, also after a restart of this program. A lifted ban restarts nothing, and is removed from the file by the next
// ban.
func TestEachBanRestartsTheAPIServerOnce(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex)}
	restarts := func(banned map[string]string) int {
		t.Helper()
		c.banned, c.order = banned, nil
		for range 2 {
			if err := looks(t, newRenewer(t, c, at(t, root, 0.1)), 3); err != nil {
				t.Fatal(err)
			}
		}
		n := 0
		for _, what := range c.order {
			if what == apiServer {
				n++
			}
		}
		return n
	}
	for i, step := range []struct {
		banned map[string]string
		want   int
	}{
		{map[string]string{"1": "node2"}, 1},
		{nil, 0},
		{map[string]string{"1": "node2"}, 0}, // the same ban: the file still has it
		{map[string]string{"2": "node3"}, 1},
		{map[string]string{"1": "node2", "2": "node3"}, 1},
	} {
		if got := restarts(step.banned); got != step.want {
			t.Errorf("step %d: %d restarts, want %d", i, got, step.want)
		}
	}
}

// A tenant's finalizer can hold an eviction for any time: watches end anyway, and once more when nothing is held.
func TestAnEvictionThatIsHeldRestartsTheAPIServerTwice(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex), banned: map[string]string{"1": "node2"}, stays: "node2"}
	now, seen := at(t, root, 0.1), map[string]time.Time{}
	for i, step := range []struct {
		after time.Duration
		stays string
		want  int // restarts so far
	}{
		{0, "node2", 0}, {evictedWithin - time.Second, "node2", 0}, {evictedWithin, "node2", 1}, {time.Hour, "node2", 1}, {time.Hour, "", 2}, {2 * time.Hour, "", 2},
	} {
		c.stays = step.stays
		r := newRenewer(t, c, now.Add(step.after)) // each time as in a new process
		var err error
		if seen, _, err = r.endStreams(t.Context(), seen, time.Time{}); err != nil {
			t.Fatal(err)
		}
		if got := len(c.order) / 3; got != step.want {
			t.Errorf("step %d: %d restarts, want %d", i, got, step.want)
		}
	}
	// The ban is lifted, and there is another one.
	c.banned = map[string]string{"2": "node3"}
	for range 2 {
		var err error
		if seen, _, err = newRenewer(t, c, now).endStreams(t.Context(), seen, time.Time{}); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(root, restarted)); err != nil || string(text) != `["2"]` {
		t.Errorf("%s, %v", text, err)
	}
}

// Killed after any step, it restarts the API server at the next start, and a renewal of certificates afterwards does only its own work.
func TestKilledAnywhereARestartIsFinished(t *testing.T) {
	for step := 1; ; step++ {
		root := newControlPlane(t)
		c := &memoryCluster{root: root, lease: new(sync.Mutex), banned: map[string]string{"1": "node2"}}
		r := newRenewer(t, c, at(t, root, 0.1))
		done := 0
		r.plane.step = func(string) error {
			if done++; done == step {
				return errKilled
			}
			return nil
		}
		err := looks(t, r, 2)
		if err == nil {
			if step < 3 {
				t.Errorf("%d steps", step)
			}
			return
		}
		if !errors.Is(err, errKilled) {
			t.Fatal(err)
		}
		c.banned = nil // lifted meanwhile: the restart is finished anyway
		r = newRenewer(t, c, at(t, root, 0.1))
		if err := looks(t, r, 2); err != nil {
			t.Fatal(err)
		}
		annotated(t, r.plane, apiServer)
	}
}

// A control plane that stays broken does not keep watches open for ever.
func TestABrokenControlPlaneIsNotWaitedForForEver(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex), banned: map[string]string{"1": "node2"}, down: []string{"etcd-node3"}}
	now := at(t, root, 0.1)
	r := newRenewer(t, c, now)
	if _, done, err := r.endStreams(t.Context(), map[string]time.Time{"1": now}, now.Add(-restartWithin+time.Second)); err == nil || done {
		t.Errorf("restarted: %v", err)
	}
	if _, done, err := r.endStreams(t.Context(), map[string]time.Time{"1": now}, now.Add(-restartWithin)); err != nil || !done {
		t.Errorf("not restarted: %v", err)
	}
}

func TestADamagedFileOfBansIsNamed(t *testing.T) {
	root := newControlPlane(t)
	if err := os.WriteFile(filepath.Join(root, restarted), []byte("["), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &memoryCluster{root: root, lease: new(sync.Mutex), banned: map[string]string{"1": "node2"}}
	if err := looks(t, newRenewer(t, c, at(t, root, 0.1)), 1); err == nil || !strings.Contains(err.Error(), restarted) {
		t.Errorf("error %v", err)
	}
}
