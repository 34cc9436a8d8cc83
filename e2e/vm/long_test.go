//go:build vm

package vm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/rollout"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
)

// worker is a virtual machine that is to join the cluster of node1.
func (w *fixture) worker(name string) driver.VM {
	return driver.VM{Name: name, Image: w.image, StateMiB: stateMiB, JoinEndpoints: []string{joinservice1}}
}

// Power cuts at random times: in the first boot, while it joins, and in a boot after that; and one at a chosen time,
// when the machine has just become a node and files from other programs are seconds old.
func TestPowerCutsAtRandomMoments(t *testing.T) {
	w := bringUp(t)
	if _, err := w.AddVM(t.Context(), w.worker("node7")); err != nil {
		t.Fatal(err)
	}
	w.cut(t, "node7", "formatting the state disk", 60*time.Second)
	w.boot(t, "node7", w.image)
	w.acceptFirmware(t, node7)
	w.cut(t, "node7", "fetching /usr/local/bin/", 45*time.Second)
	w.boot(t, "node7", w.image)
	w.cut(t, "node7", "this machine is a node", 0)
	w.boot(t, "node7", w.image)
	first := w.ready(t, "node7", "")
	w.boot(t, "node7", w.image) // images are seconds old
	w.cut(t, "node7", "looking for a joinservice", 60*time.Second)
	w.boot(t, "node7", w.image)
	w.ready(t, "node7", first)
}

// cut cuts the power within a time after the console has had a text.
func (w *fixture) cut(t *testing.T, name, after string, within time.Duration) {
	t.Helper()
	w.says(t, name, after, joinTime)
	moment := rand.N(within + 1)
	select {
	case <-time.After(moment):
	case <-t.Context().Done():
		t.Fatal(t.Context().Err())
	}
	if err := w.KillVM(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(w.console(t, name)), "\n")
	t.Logf("power cut %.1f s after %q; the last line was: %s", moment.Seconds(), after, driver.CleanLine(lines[len(lines)-1]))
}

// boot powers a machine on with an image.
func (w *fixture) boot(t *testing.T, name, image string) {
	t.Helper()
	if _, err := w.RebootVM(t.Context(), name, driver.Boot{Image: image}); err != nil {
		t.Fatal(err)
	}
}

// A disk belongs to the machine that it was enrolled with (J2), and its header is treated as an attacker's (B5).
func TestAStateDiskInOtherHandsStaysShut(t *testing.T) {
	w := bringUp(t)
	first := w.join(t, w.worker("node7"), node7)
	w.reachable(t, "node7", node7, "worker")
	if err := w.KillVM(t.Context(), "node7"); err != nil {
		t.Fatal(err)
	}
	disk := w.StateDisk("node7")

	for _, tt := range []struct{ name, as, reason string }{
		{"moved to a machine with a name of its own", "node8", "NOT_ENROLLED"},
		{"moved to a machine that says that it is the first one", "node7", "NAME_TAKEN"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			began := time.Now()
			thief := w.worker("node8")
			thief.MetadataName = tt.as
			moved := w.StateDisk(thief.Name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(moved), 0o700), copySparse(moved, disk)); err != nil {
				t.Fatal(err)
			}
			if _, err := w.AddVM(t.Context(), thief); err != nil {
				t.Fatal(err)
			}
			w.says(t, thief.Name, tt.reason, bootTime)
			t.Logf("audit record: %s", w.refusal(t, began, tt.reason, "rejoin refused"))
			if tt.as == thief.Name {
				w.reachable(t, thief.Name, node8, "worker that waits for its disk's key")
			}
			if err := w.RemoveVM(t.Context(), thief.Name); err != nil {
				t.Fatal(err)
			}
		})
	}

	t.Run("a header that names a null cipher is refused before anything is opened", func(t *testing.T) {
		good := filepath.Join(t.TempDir(), "good.raw")
		if err := copySparse(good, disk); err != nil {
			t.Fatal(err)
		}
		if err := checkHeader(disk); err != nil {
			t.Fatal(err)
		}
		if err := rewriteHeader(disk, "aes-xts-plain64", "cipher_null-ecb"); err != nil {
			t.Fatal(err)
		}
		// Only the cipher is wrong.
		if err := checkHeader(disk); err == nil || !strings.Contains(err.Error(), "cipher_null-ecb") {
			t.Fatalf("the header is judged: %v", err)
		}
		w.boot(t, "node7", w.image)
		w.says(t, "node7", "STATE_DISK", bootTime)
		if err := errors.Join(w.KillVM(t.Context(), "node7"), os.Remove(disk), copySparse(disk, good)); err != nil {
			t.Fatal(err)
		}
	})

	w.boot(t, "node7", w.image) // the disk as it was, in its own machine
	second := w.ready(t, "node7", first)
	t.Run("another disk, which is blank, becomes its machine's by the owner's command", func(t *testing.T) {
		if err := errors.Join(w.KillVM(t.Context(), "node7"), os.Truncate(disk, 0), os.Truncate(disk, stateMiB<<20)); err != nil {
			t.Fatal(err)
		}
		w.boot(t, "node7", w.image)
		line := strings.Fields(driver.CleanLine(w.says(t, "node7", "the state disk has the UUID", joinTime)))
		w.says(t, "node7", "DISK_MISMATCH", joinTime)
		w.Block(t, driver.Owner, "disk-replace", "NODE=node7", "DISK="+line[len(line)-1]) // of docs/runbooks.md
		w.ready(t, "node7", second)
	})
}

// checkHeader reads a disk's header as `bootstrapper unlock` does.
func checkHeader(disk string) error {
	f, err := os.Open(disk)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, luks2.Size)
	if _, err := f.ReadAt(b, 0); err != nil {
		return err
	}
	_, err = luks2.Parse(b, luks2.HMACSHA256)
	return err
}

// copySparse copies a file that consists mostly of zeros.
func copySparse(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	b, zeros := make([]byte, 1<<20), make([]byte, 1<<20)
	for at := int64(0); ; {
		n, err := io.ReadFull(in, b)
		if n > 0 && !bytes.Equal(b[:n], zeros[:n]) {
			if _, err := out.WriteAt(b[:n], at); err != nil {
				return errors.Join(err, out.Close())
			}
		}
		at += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return errors.Join(out.Truncate(at), out.Close())
		}
		if err != nil {
			return errors.Join(err, out.Close())
		}
	}
}

// rewriteHeader replaces a text in both copies of a LUKS2 header and makes their checksums right (LUKS2 On-Disk
// Format Specification 1.1.3, section 2.1: 64 bytes at 448, over binary header and JSON area with that field zero).
func rewriteHeader(disk, from, to string) error {
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	const size, checksum = 16384, 448 // cryptsetup's default size of each copy
	for _, at := range []int64{0, size} {
		b := make([]byte, size)
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		if !bytes.Contains(b[:6], []byte("LUKS")) && !bytes.Contains(b[:6], []byte("SKUL")) {
			return fmt.Errorf("no LUKS2 header at %d", at)
		}
		if !bytes.Contains(b, []byte(from)) || len(from) != len(to) {
			return fmt.Errorf("the header at %d has no %q", at, from)
		}
		b = bytes.ReplaceAll(b, []byte(from), []byte(to))
		clear(b[checksum : checksum+64])
		sum := sha256.Sum256(b)
		copy(b[checksum:], sum[:])
		if _, err := f.WriteAt(b, at); err != nil {
			return err
		}
	}
	return f.Sync()
}

// The runbook for a new image: both are accepted, the machine restarts with the new one, and the old one is dropped. Who still boots that is refused.
func TestANewImageIsRolledOutAndTheOldOneIsDropped(t *testing.T) {
	w := bringUp(t)
	second, predicted, err := w.buildImage(t, "-cmdline", "muster.e2e=2")
	if err != nil {
		t.Fatal(err)
	}
	for _, pcr := range pcrs {
		if predicted[pcr] == w.predicted[pcr] {
			t.Fatalf("both images lead to the same PCR %s", pcr)
		}
	}
	boot := w.join(t, w.worker("node7"), node7)
	w.policy(t, 10, "new.yaml", second)
	w.Block(t, driver.Owner, "image-accept", "MEASUREMENTS="+filepath.Join(filepath.Dir(second), measurementsFile))
	old := w.runs(t, "node7")

	if out, err := w.At(t.Context(), driver.Owner, "", "muster", "policy", "apply", "new.yaml"); err == nil || !strings.Contains(err.Error(), "1 running nodes do not match the policy: node7") {
		t.Errorf("the old image is dropped while node7 runs it: %v\n%s", err, out)
	}
	boot = w.goesDown(t, boot, second, func(ctx context.Context) error {
		out, progress, err := w.RunBlock(ctx, labtest.Runbooks(t, w.Root)["image-roll"], driver.Owner, "IMAGE="+old)
		t.Logf("block image-roll: %v\n%s%s", err, progress, out)
		return err
	})
	until(t, bootTime, func(context.Context) error {
		if now := w.runs(t, "node7"); now == old || now == "" {
			return fmt.Errorf("node7 runs %q", now)
		}
		return nil
	})
	w.Block(t, driver.Owner, "image-drop", "IMAGE="+old)

	since := time.Now()
	w.boot(t, "node7", w.image)
	w.says(t, "node7", "POLICY_REFUSED", bootTime)
	t.Logf("audit record: %s", w.refusal(t, since, "POLICY_REFUSED", "PCR 4 is"))
	w.reachable(t, "node7", node7, "worker that waits for its disk's key")
	w.boot(t, "node7", second)
	w.ready(t, "node7", boot)
}

// runs returns the name of the image that a node runs, as its owner sees it.
func (w *fixture) runs(t *testing.T, name string) string {
	t.Helper()
	out := w.Must(t, driver.Owner, "", "muster", "rollout", "status", "--output", "json")
	var r rollout.Rollout
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, n := range r.Nodes {
		if n.Node == name {
			return n.Image
		}
	}
	return ""
}

// A virtual machine is the only control plane, and reaches no registry: it runs the container images of its root (B9).
// When it comes back no joinservice runs, and its owner opens its disk.
func TestALoneControlPlaneIsRecovered(t *testing.T) {
	t.Parallel() // it mostly waits
	w := loneControlPlane(t)
	marker := w.mark(t, "node5")
	until(t, joinTime, func(ctx context.Context) error { // its disk has the state of the cluster
		known, err := w.epoch(ctx)
		if err == nil && (known == "" || known == "0") {
			err = fmt.Errorf("the machine knows epoch %q", known)
		}
		return err
	})
	if err := w.KillVM(t.Context(), "node5"); err != nil {
		t.Fatal(err)
	}
	earlier := filepath.Join(t.TempDir(), "earlier.raw")
	if err := copySparse(earlier, w.StateDisk("node5")); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	w.boot(t, "node5", w.image)
	w.says(t, "node5", "waiting for the key of the state disk", bootTime)
	w.reachable(t, "node5", node5, "control plane that waits for its disk's key")
	w.Block(t, driver.Owner, "restart-recover", "ADDRESS="+node5) // of docs/runbooks.md
	until(t, 40*time.Minute, func(ctx context.Context) error {
		_, err := w.Kubectl(ctx, "get", "--raw", "/readyz")
		return err
	})
	t.Logf("the API server answers %.0f s after the power came back", time.Since(start).Seconds())
	if got := w.pod(t, "node5", "read", "cat", markerFile); got != marker {
		t.Errorf("the marker is %q after recovery, want %q", got, marker)
	}
	for _, name := range []string{"muster-joinservice", "muster-kms"} {
		until(t, 40*time.Minute, func(ctx context.Context) error {
			out, err := w.Kubectl(ctx, "-n", "muster-system", "get", "daemonset", name, "-o", "jsonpath={.status.numberReady}")
			if err == nil && out != "1" {
				err = fmt.Errorf("%s ready: %q", name, out)
			}
			return err
		})
	}
	t.Logf("joinservice and kms are ready %.0f s after the power came back", time.Since(start).Seconds())
	w.reachable(t, "node5", node5, "control plane")
	w.revived(t, earlier)
}

// loneControlPlane makes node5, of the product's image, the first machine of a cluster.
func loneControlPlane(t *testing.T) *fixture {
	t.Helper()
	w := prepare(t)
	w.image = w.closedImage(t, append(versions.ImageNames(), "podnet", "joinservice", "kms", "echo")...)
	w.policy(t, 1, "policy.yaml", w.image)
	v := driver.VM{Name: "node5", Role: "control-plane", Image: w.image, StateMiB: 3072, MemoryMiB: 4096, InitSecretHash: w.hash, JoinEndpoints: []string{node5 + ":30090"}}
	if _, err := w.AddVM(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	w.says(t, "node5", "can make it the first of a new one", 2*joinTime)
	w.reachable(t, "node5", node5, "waiting for init")
	w.addClass(t, "vm", node5, "--policy", "policy.yaml")
	w.initialize(t, node5, "--timeout", "40m")
	return w
}

// epoch is the number of the newest epoch of the cluster that node5's TPM knows.
func (w *fixture) epoch(ctx context.Context) (string, error) {
	known, err := w.Kubectl(ctx, "get", "node", "node5", "-o", "jsonpath={.metadata.annotations.muster\\.dev/epoch}")
	number, _, _ := strings.Cut(known, ":")
	return number, err
}

// revived has the owner change the policy, restores the previous disk, and checks that the control plane starts
// nothing of it until the owner has accepted what it would revive (B7).
func (w *fixture) revived(t *testing.T, earlier string) {
	t.Helper()
	w.policy(t, 9, "policy2.yaml", w.image)
	w.Muster(t, "policy", "apply", "policy2.yaml")
	// The machine's TPM follows the cluster at most once in ten minutes.
	until(t, 12*time.Minute, func(ctx context.Context) error {
		epoch, err := w.Kubectl(ctx, "-n", clusterinfo.Namespace, "get", "configmap", clusterinfo.EpochMap, "-o", "jsonpath={.data.epoch}")
		if err != nil {
			return err
		}
		known, err := w.epoch(ctx)
		if err == nil && known != epoch {
			err = fmt.Errorf("the cluster's epoch is %s, its machine knows %q", epoch, known)
		}
		return err
	})
	w.Muster(t, "status")
	disk := w.StateDisk("node5")
	if err := errors.Join(w.KillVM(t.Context(), "node5"), os.Remove(disk), copySparse(disk, earlier)); err != nil {
		t.Fatal(err)
	}
	w.boot(t, "node5", w.image)
	w.says(t, "node5", "waiting for the key of the state disk", bootTime)
	w.Muster(t, "recover", node5)
	w.says(t, "node5", "CLUSTER_ROLLED_BACK", joinTime)
	_, said, err := w.Run(t.Context(), driver.Owner, "", "muster", "recover", node5)
	// The old disk may have recorded the epoch before the first policy.
	if err == nil || !strings.Contains(said+err.Error(), "It holds epoch ") || !strings.Contains(said+err.Error(), "The folder's newest policy has serial 9") {
		t.Fatalf("muster recover revives an earlier epoch without a word: %v\n%s", err, said)
	}
	t.Logf("muster recover: %v\n%s", err, said)
	if out, err := w.Kubectl(t.Context(), "get", "--raw", "/readyz", "--request-timeout=5s"); err == nil {
		t.Fatalf("the API server of before answers: %s", out)
	}
	_, epoch, _ := strings.Cut(said+err.Error(), "--accept-epoch ")
	epoch, _, _ = strings.Cut(epoch, ";")
	w.Muster(t, "recover", node5, "--accept-epoch", epoch)
	until(t, 15*time.Minute, func(ctx context.Context) error {
		_, err := w.Kubectl(ctx, "get", "--raw", "/readyz")
		return err
	})
	until(t, joinTime, func(ctx context.Context) error {
		_, said, err := w.Run(ctx, driver.Owner, "", "muster", "status")
		if err == nil || !strings.Contains(said+err.Error(), "serial") {
			return fmt.Errorf("muster status finds the cluster as the folder knows it: %w\n%s", err, said)
		}
		t.Logf("muster status: %v\n%s", err, said)
		return nil
	})
}

// join adds a virtual machine, whose firmware becomes a class of the policy in force, and waits until it is a node.
func (w *fixture) join(t *testing.T, v driver.VM, address string) (boot string) {
	t.Helper()
	if _, err := w.AddVM(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	w.acceptFirmware(t, address)
	return w.ready(t, v.Name, "")
}
