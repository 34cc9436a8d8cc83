//go:build runbook

package runbook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

var planes = []string{"node1", "node2", "node3"}

// state are the folders of a control plane's disk that differ from one machine or moment to another.
var state = []string{"etcd", "kubelet", "kubernetes", "muster"}

// rolledBack has a provider restore the disks of all control planes, as of one moment, and not their TPMs. Nothing of
// the cluster is served until its owner has accepted what it would revive (B7, docs/recovery.md).
func (w *fixture) rolledBack(t *testing.T) {
	each(t, planes, func(n string) error { return w.KillNode(t.Context(), n) })
	copies := t.TempDir()
	disk := func(n string) string { return filepath.Join(w.Dir, "machines", n, "disk") }
	each(t, planes, func(n string) error { return exchange(t.Context(), disk(n), filepath.Join(copies, n)) })
	start := time.Now()
	each(t, planes, func(n string) error { _, err := w.RebootNode(t.Context(), n); return err })
	w.back(t, start, planes...)
	w.Muster(t, "ban", "node5", "--yes")
	ids := w.known(t)
	w.Muster(t, "status") // the folder knows the ban

	each(t, planes, func(n string) error {
		return errors.Join(w.KillNode(t.Context(), n), exchange(t.Context(), filepath.Join(copies, n), disk(n)))
	})
	each(t, planes, func(n string) error { _, err := w.RebootNode(t.Context(), n); return err })
	epoch := ""
	for _, n := range planes {
		labtest.Eventually(t, func(ctx context.Context) error {
			_, said, err := w.Run(ctx, driver.Owner, "", "muster", "recover", address(n), "--machine-id", ids[n].Spec.MachineID)
			said += fmt.Sprint(err)
			if err == nil || !strings.Contains(said, "CLUSTER_ROLLED_BACK") || !strings.Contains(said, "not on this disk: node5") {
				return fmt.Errorf("muster recover %s: %s", n, said)
			}
			_, after, _ := strings.Cut(said, "--accept-epoch ") // of the remedy
			number, _, _ := strings.Cut(after, ";")
			if epoch == "" {
				epoch = number
			}
			if number != epoch {
				t.Fatalf("%s has epoch %s, node1 %s", n, number, epoch)
			}
			return nil
		})
	}
	w.say(t, "all control planes wait with epoch %s", epoch)
	if out, err := w.kubectl(t.Context(), "get", "--raw", "/readyz"); err == nil {
		t.Fatalf("an API server of before answers: %s", out)
	}
	for _, n := range planes {
		if out, err := w.At(t.Context(), n, "", "pgrep", "-x", "kubelet|etcd|kube-apiserver"); err == nil {
			t.Fatalf("%s runs a part of the cluster of before: process %s", n, out)
		}
	}

	start = time.Now()
	for _, n := range planes {
		w.Muster(t, "recover", address(n), "--machine-id", ids[n].Spec.MachineID, "--accept-epoch", epoch)
	}
	w.back(t, start, planes...)
	w.voters(t, "node1", planes...)
	for _, command := range []string{"status", "doctor"} {
		if _, said, err := w.Run(t.Context(), driver.Owner, "", "muster", command); err == nil || !strings.Contains(said+err.Error(), "node5") {
			t.Errorf("muster %s does not fail for the ban that was undone: %v\n%s", command, err, said)
		}
	}

	// The steps of the page that follow.
	w.Muster(t, "ban", "node5", "--yes")
	w.Muster(t, "unban", "node5")
	if _, err := w.RebootNode(t.Context(), "node5"); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(w.OwnerDir(), "muster-"+clusterName, "known.json"))
	if err != nil {
		t.Fatal(err)
	}
	var folder struct{ Epoch uint64 }
	if err := json.Unmarshal(b, &folder); err != nil {
		t.Fatal(err)
	}
	if _, err := w.kubectl(t.Context(), "-n", "muster-system", "patch", "configmap", "muster-epoch", "--type", "merge", "-p", fmt.Sprintf(`{"data":{"epoch":"%d","history":null}}`, folder.Epoch+100)); err != nil {
		t.Fatal(err)
	}
	w.back(t, start, "node5")
	w.well(t)
}

// exchange replaces the state in one folder by that in another.
func exchange(ctx context.Context, from, to string) error {
	for _, f := range state {
		if err := os.RemoveAll(filepath.Join(to, f)); err != nil {
			return err
		}
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if out, err := exec.CommandContext(ctx, "cp", "-a", "--", filepath.Join(from, f), to).CombinedOutput(); err != nil {
			return fmt.Errorf("copy %s: %w: %s", f, err, out)
		}
	}
	return nil
}
