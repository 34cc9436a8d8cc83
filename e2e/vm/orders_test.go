//go:build vm

package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/lab/driver"
)

// orderTime is how long an emulated machine may take from an order to its report: two attestations, and what was ordered.
const orderTime = 25 * time.Minute

// B11: a machine of the real image, whose units are confined by systemd, executes its owner's orders without a login there.
func TestAMachineExaminesItselfAndRestartsByOrder(t *testing.T) {
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
	done := make(chan error, 1)
	go func() {
		out, progress, err := w.Run(t.Context(), driver.Owner, "", "muster", "reboot", "node7", "--yes", "--timeout", orderTime.String())
		t.Logf("muster reboot node7: %v\n%s%s", err, progress, out)
		done <- err
	}()
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
	w.boot(t, "node7", w.image)
	w.ready(t, "node7", boot)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
