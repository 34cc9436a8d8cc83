//go:build runbook

package runbook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// exchangedDisk gives a worker another disk, which is blank. In the lab a disk is folders, which are not encrypted; e2e/vm does the same with a real one.
func (w *fixture) exchangedDisk(t *testing.T, node string) {
	before := w.known(t)[node]
	if err := w.KillNode(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	for _, f := range append([]string{"enabled", "programs"}, state...) {
		if err := os.RemoveAll(filepath.Join(w.Dir, "machines", node, "disk", f)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.RebootNode(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	var s appraisal.MachineStatus
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := w.At(ctx, driver.Owner, "", "muster", "status", "--endpoint", address(node), "--output", "json")
		if err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(out), &s); err != nil {
			return err
		}
		if s.Reason != "DISK_MISMATCH" {
			return fmt.Errorf("%s waits with %q", node, s.Reason)
		}
		return nil
	})
	if s.Disk == "" || s.Disk == before.Spec.DiskID {
		t.Fatalf("its disk is %q, and was %q", s.Disk, before.Spec.DiskID)
	}
	start := time.Now()
	w.owner(t, "disk-replace", node, "DISK="+s.Disk)
	w.back(t, start, node)
	w.owner(t, "node-ready", node)
	now := w.known(t)[node]
	if now.UID != before.UID || now.Spec.MachineID != before.Spec.MachineID || now.Spec.DiskID != s.Disk {
		t.Errorf("enrolled: %+v", now.Spec)
	}
	w.refusesKey(t, before.Spec.DiskID)
	w.well(t)
}

// refusesKey ends the key of a disk that is gone, as the page says.
func (w *fixture) refusesKey(t *testing.T, disk string) {
	t.Helper()
	w.Muster(t, "forget", "--erase", "--disk", disk, "--yes")
	out, err := w.kubectl(t.Context(), "get", "attesteddisk", disk, "-o", "jsonpath={.spec.erased} {.spec.salt}")
	if err == nil && out != "true " {
		err = errors.New(out)
	}
	if err != nil {
		t.Errorf("the old disk's key: %v", err)
	}
}
