//go:build vm

package vm

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// upgradeTime is how long an emulated machine may take: it attests, fetches two programs and two images, and kubeadm upgrades it.
const upgradeTime = 60 * time.Minute

// B8, B11: the confined units upgrade Kubernetes on a machine of the real image, and its next boot accepts what they have installed.
func TestAMachineIsUpgradedToTheNextKubernetes(t *testing.T) {
	old, now := strings.TrimPrefix(driver.PreviousRelease().Version, "v"), strings.TrimPrefix(driver.CurrentRelease().Version, "v")
	w := prepare(t, func(_ *fixture, u *driver.Up) { u.Previous, u.Preinstalled = true, nil })
	if _, err := w.AddNode(t.Context(), driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: w.hash}); err != nil {
		t.Fatal(err)
	}
	w.initialize(t, "192.168.77.11", "--kubernetes", old)
	v := w.worker("node7")
	v.StateMiB = 2 * stateMiB // it stages the programs of the next release beside those of this one
	boot := w.join(t, v, node7)
	runs := func(version string) func(context.Context) error {
		return func(ctx context.Context) error {
			out, err := w.Kubectl(ctx, "get", "node", "node7", "-o", `jsonpath={.status.nodeInfo.kubeletVersion} {.status.conditions[?(@.type=="Ready")].status} {.spec.unschedulable}`)
			if want := "v" + version + " True "; err == nil && out != want {
				err = fmt.Errorf("node7 is %q, want %q", out, want)
			}
			return err
		}
	}
	until(t, joinTime, runs(old))
	start := time.Now()
	if err := w.orders(t, "upgrade", "kubernetes", now, "--components", driver.NextComponents, "--yes", "--wait", upgradeTime.String())(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("upgraded after %.0f s", time.Since(start).Seconds())
	until(t, joinTime, runs(now))
	marker := w.mark(t, "node7")

	w.boot(t, "node7", w.image)
	w.ready(t, "node7", boot)
	until(t, joinTime, runs(now))
	if got := w.pod(t, "node7", "read", "cat", markerFile); got != marker {
		t.Errorf("after the reboot a container reads %q, want %q", got, marker)
	}
}
