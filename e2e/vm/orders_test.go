//go:build vm

package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/lab/driver"
)

// orderTime is how long an emulated machine may take from an order to its report: two attestations, and what was ordered.
const orderTime = 25 * time.Minute

// B11: a machine of the real image, whose units are confined by systemd, executes its owner's orders without a login there.
func TestAMachineExecutesItsOwnersOrders(t *testing.T) {
	w := bringUp(t)
	boot := w.join(t, w.worker("node7"), node7)
	out, progress, err := w.Run(t.Context(), driver.Owner, "", "muster", "doctor", "--node", "node7", "--output", "json", "--timeout", orderTime.String())
	t.Logf("muster doctor --node node7: %v\n%s%s", err, progress, out)
	var found checkup.Report
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		t.Fatal(err)
	}
	for _, f := range found.Findings {
		if f.Level == checkup.Fail {
			t.Errorf("node7 says %+v", f)
		}
	}
	for _, check := range []string{"TPM", "EK certificate", "event log", "journal", "node lock", "clock", "joinservices", "kernel"} {
		if i := slices.IndexFunc(found.Findings, func(f checkup.Finding) bool { return f.Check == check }); i < 0 || found.Findings[i].Level != checkup.OK {
			t.Errorf("node7 does not find %q in order", check)
		}
	}
	t.Run("it restarts", func(t *testing.T) {
		boot = w.goesDown(t, boot, w.image, w.orders(t, "reboot", "node7", "--yes", "--timeout", orderTime.String()))
	})
	t.Run("it erases its disk and joins anew", func(t *testing.T) {
		disk := func() string {
			out, err := w.Kubectl(t.Context(), "get", "attestednode", "node7", "-o", "jsonpath={.spec.diskID}")
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		before := disk()
		w.goesDown(t, boot, w.image, w.orders(t, "reset", "node7", "--yes", "--wait", orderTime.String()))
		if after := disk(); after == before || after == "" {
			t.Errorf("it has the disk %q, and had %q", after, before)
		}
		if out, err := w.Kubectl(t.Context(), "get", "attesteddisk", before, "-o", "jsonpath={.spec.erased} {.spec.salt}"); err != nil || out != "true " {
			t.Errorf("the old disk: %q, %v", out, err)
		}
	})
}

// B11: the units of a control plane that execute what only it is ordered to do.
func TestAControlPlaneExecutesItsOwnersOrders(t *testing.T) {
	w := loneControlPlane(t)
	until(t, orderTime, func(ctx context.Context) error { // it attests every five minutes
		_, err := w.Kubectl(ctx, "wait", "attestednode/node5", "--for=jsonpath={.status.ekPublic}", "--timeout=1s")
		return err
	})
	for _, command := range [][]string{
		{"verify", "node5", "--timeout", orderTime.String()},
		{"backup", "--timeout", orderTime.String()},
		{"rotate", string(clusterinfo.ServiceAccountKey), "--yes", "--wait", "40m"},
		{"rotate", string(clusterinfo.ServiceAccountKey), "--finish", "--early", "--yes", "--wait", "40m"},
	} {
		start := time.Now()
		if err := w.orders(t, command...)(t.Context()); err != nil {
			t.Errorf("muster %s: %v", strings.Join(command, " "), err)
		}
		t.Logf("muster %s: %.0f s", strings.Join(command, " "), time.Since(start).Seconds())
	}
}

// orders is a command of the owner.
func (w *fixture) orders(t *testing.T, args ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		out, progress, err := w.Run(ctx, driver.Owner, "", append([]string{"muster"}, args...)...)
		t.Logf("muster %s: %v\n%s%s", strings.Join(args, " "), err, progress, out)
		return err
	}
}

// goesDown runs a command of the owner that takes node7 down, boots it again with an image, and returns its next boot as a node.
func (w *fixture) goesDown(t *testing.T, boot, image string, command func(context.Context) error) string {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- command(t.Context()) }()
	until(t, orderTime, func(ctx context.Context) error { // QEMU ends instead of starting again
		s, err := w.Status(ctx)
		if err != nil {
			return err
		}
		if i := slices.IndexFunc(s.Machines, func(m driver.Machine) bool { return m.Name == "node7" }); i < 0 || s.Machines[i].Running {
			return fmt.Errorf("node7 still runs")
		}
		return nil
	})
	w.boot(t, "node7", image)
	boot = w.ready(t, "node7", boot)
	if err := <-done; err != nil {
		t.Error(err)
	}
	return boot
}
