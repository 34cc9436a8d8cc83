//go:build vm

package vm

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/labtest"
)

// A node whose certificates end comes back by itself, with an encrypted state disk and under the real units: first
// while it runs and its only control plane is away, then while it is off itself. No clock is changed: its
// certificates live ten minutes, and it is cut off for longer.
func TestANodeThatIsCutOffForLongerThanItsCertificatesLiveComesBack(t *testing.T) {
	t.Parallel() // it mostly waits
	w := bringUp(t)
	w.ShortenCertificates(t)
	first := w.join(t, w.worker("node7"), node7)

	if err := w.KillNode(t.Context(), "node1"); err != nil {
		t.Fatal(err)
	}
	w.allEnd(t)
	if _, err := w.RebootNode(t.Context(), "node1"); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	w.says(t, "node7", "the node node7 has new certificates", joinTime)
	w.renewed(t, "node7", back)
	if boot := w.ready(t, "node7", ""); boot != first {
		t.Errorf("boot %q, and was %q: it has rebooted", boot, first)
	}

	if err := w.KillVM(t.Context(), "node7"); err != nil {
		t.Fatal(err)
	}
	w.allEnd(t)
	back = time.Now()
	w.boot(t, "node7", w.image)
	w.says(t, "node7", "the node node7 has new certificates", joinTime)
	w.renewed(t, "node7", back)
	w.ready(t, "node7", first)
}

// allEnd waits until every certificate of a node that was issued so far has ended.
func (w *fixture) allEnd(t *testing.T) {
	t.Helper()
	end := time.Now().Add(labtest.ShortLife + time.Minute)
	until(t, 2*labtest.ShortLife, func(context.Context) error {
		if time.Now().Before(end) {
			return fmt.Errorf("certificates may live until %s", end)
		}
		return nil
	})
}

// renewed waits until the node's kubelet has renewed its Lease after that time: with its present certificate.
func (w *fixture) renewed(t *testing.T, name string, after time.Time) {
	t.Helper()
	until(t, joinTime, func(ctx context.Context) error {
		out, err := w.Kubectl(ctx, "-n", "kube-node-lease", "get", "lease", name, "-o", "jsonpath={.spec.renewTime}")
		if err != nil {
			return err
		}
		if renewed, err := time.Parse(time.RFC3339Nano, out); err != nil || renewed.Before(after) {
			return fmt.Errorf("%s's lease is of %s: %w", name, out, err)
		}
		return nil
	})
	t.Logf("%s is heard of %.0f s later", name, time.Since(after).Seconds())
}
