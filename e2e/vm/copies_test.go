//go:build vm

package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/lab/driver"
)

// copied is a virtual machine with a copy of another one's state disk, firmware variables and TPM, at an address of
// its own. It is not powered yet.
func (w *fixture) copied(t *testing.T, of, as string) driver.VM {
	t.Helper()
	from, to := filepath.Dir(w.StateDisk(of)), filepath.Dir(w.StateDisk(as))
	if err := os.MkdirAll(to, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(copySparse(w.StateDisk(as), w.StateDisk(of)), copySparse(w.FirmwareVariables(as), w.FirmwareVariables(of)), copyFolder(filepath.Join(to, "tpm"), filepath.Join(from, "tpm"))); err != nil {
		t.Fatal(err)
	}
	v := w.worker(as)
	v.MetadataName = of
	return v
}

// copyFolder copies a folder and its subfolders, without sockets.
func copyFolder(to, from string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := copyFolder(filepath.Join(to, e.Name()), filepath.Join(from, e.Name())); err != nil {
				return err
			}
		}
		if !e.Type().IsRegular() {
			continue
		}
		b, err := os.ReadFile(filepath.Join(from, e.Name()))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, e.Name()), b, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// attested returns the AttestedNode.
func (w *fixture) attested(ctx context.Context, name string) (*v1alpha1.AttestedNode, error) {
	out, err := w.Kubectl(ctx, "get", "attestednode", name, "-o", "json")
	if err != nil {
		return nil, err
	}
	var n v1alpha1.AttestedNode
	return &n, json.Unmarshal([]byte(out), &n)
}

// A provider copies a virtual machine with its TPM (J11), in both orders. At the end its owner erases the disk, and no copy of it opens any more (K4).
func TestOfAMachineAndItsCopyOneRunsAndAnErasedDiskOpensForNobody(t *testing.T) {
	w := bringUp(t)
	boot := w.join(t, w.worker("node7"), node7)
	marker := w.mark(t, "node7")
	enrolled, err := w.attested(t.Context(), "node7")
	if err != nil {
		t.Fatal(err)
	}
	machine, disk := enrolled.Spec.MachineID, enrolled.Spec.DiskID

	t.Run("the secret of a boot is the same before and after the state disk is open", func(t *testing.T) {
		w.boot(t, "node7", w.image)
		boot = w.ready(t, "node7", boot)
		n, err := w.attested(t.Context(), "node7") // written when the initramfs asked for the key
		if err != nil || n.Status.Boot == nil {
			t.Fatal(n, err)
		}
		// The running system attests with the same one, or the API would have another hash.
		until(t, joinTime, func(ctx context.Context) error {
			now, err := w.attested(ctx, "node7")
			if err == nil && !now.Status.LastVerdict.Time.After(n.Status.LastVerdict.Time.Time) {
				err = fmt.Errorf("no verdict since %s", n.Status.LastVerdict.Time)
			}
			if err == nil && now.Status.Boot.SecretHash != n.Status.Boot.SecretHash {
				t.Fatalf("boot %+v, was %+v", now.Status.Boot, n.Status.Boot)
			}
			return err
		})
	})

	t.Run("a copy gets no key while the original runs", func(t *testing.T) {
		if _, err := w.AddVM(t.Context(), w.copied(t, "node7", "node8")); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node8", "MACHINE_CLONED", joinTime)
		t.Logf("audit record: %s", w.refusal(t, time.Time{}, "MACHINE_CLONED", "rejoin refused", node7, node8))
		w.cloned(t, node7, node8)
		if got := w.pod(t, "node7", "read", "cat", markerFile); got != marker {
			t.Errorf("the original's marker is %q, want %q", got, marker)
		}
		if err := w.RemoveVM(t.Context(), "node8"); err != nil {
			t.Fatal(err)
		}
		w.Muster(t, "replace", "node7", "--tpm", machine, "--yes")
		w.boot(t, "node7", w.image)
		boot = w.ready(t, "node7", boot)
	})

	t.Run("a copy that comes first gets it, and the original is refused and reported", func(t *testing.T) {
		if err := w.KillVM(t.Context(), "node7"); err != nil {
			t.Fatal(err)
		}
		if _, err := w.AddVM(t.Context(), w.copied(t, "node7", "node8")); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node8", "this machine is the node node7", joinTime)
		w.boot(t, "node7", w.image)
		w.says(t, "node7", "MACHINE_CLONED", joinTime)
		w.cloned(t, node8, node7)
		// The owner knows which one is the copy.
		if err := w.RemoveVM(t.Context(), "node8"); err != nil {
			t.Fatal(err)
		}
		w.Muster(t, "replace", "node7", "--tpm", machine, "--yes")
		boot = w.ready(t, "node7", boot)
		if got := w.pod(t, "node7", "read2", "cat", markerFile); got != marker {
			t.Errorf("the marker is %q, want %q", got, marker)
		}
	})

	t.Run("an erased disk opens for nobody", func(t *testing.T) {
		if err := w.KillVM(t.Context(), "node7"); err != nil {
			t.Fatal(err)
		}
		t.Log(w.Muster(t, "forget", "node7", "--erase", "--yes"))
		w.boot(t, "node7", w.image)
		w.says(t, "node7", "NOT_ENROLLED", joinTime)
		// Nor does its owner enroll the machine with it again.
		out, said, err := w.Run(t.Context(), driver.Owner, "", "muster", "enroll", "node7", "--role", "worker", "--machine-id", machine, "--disk-id", disk)
		if err == nil || !strings.Contains(said+err.Error(), "DISK_ERASED") {
			t.Errorf("%v\n%s%s", err, said, out)
		}
		// An administrator who writes another salt gets another key, which opens nothing.
		w.MustKubectl(t, "delete", "attesteddisk", disk)
		w.Apply(t, fmt.Sprintf("apiVersion: muster.dev/v1alpha1\nkind: AttestedDisk\nmetadata: {name: %s}\nspec: {machineID: %s, salt: %s, rootVersion: 1}\n", disk, machine, strings.Repeat("5a", 32)))
		w.Muster(t, "enroll", "node7", "--role", "worker", "--machine-id", machine, "--disk-id", disk)
		w.says(t, "node7", "STATE_DISK", joinTime)
	})
}

// cloned waits until the owner's output names two machines, one of which was refused.
func (w *fixture) cloned(t *testing.T, accepted, refused string) {
	t.Helper()
	until(t, joinTime, func(ctx context.Context) error {
		n, err := w.attested(ctx, "node7")
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == v1alpha1.ConditionCloned && c.Status == "True" && strings.Contains(c.Message, "at "+refused) && strings.Contains(c.Message, "at "+accepted) {
				t.Log(c.Message)
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", n.Status.Conditions)
	})
	out, err := w.At(t.Context(), driver.Owner, "", "muster", "status", "--check")
	if err == nil || !strings.Contains(out+err.Error(), "MACHINE_CLONED") {
		t.Errorf("muster status --check: %v\n%s", err, out)
	}
}
