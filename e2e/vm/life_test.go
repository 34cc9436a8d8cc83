package vm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/muster-k8s/muster/lab/driver"
)

// pcrs are those that tell one image from another.
var pcrs = []string{"4", "9", "11"}

func TestAMachineBootsJoinsIsTamperedWithAndRejoins(t *testing.T) {
	w := bringUp(t)
	if _, err := w.AddVM(t.Context(), driver.VM{Name: "node7", Image: w.image, StateMiB: stateMiB, JoinEndpoints: []string{joinservice1}}); err != nil {
		t.Fatal(err)
	}
	w.measures(t, "node7")
	first := w.ready(t, "node7", "")
	marker := w.mark(t, "node7")
	if err := w.KillVM(t.Context(), "node7"); err != nil {
		t.Fatal(err)
	}
	// That it was written there is seen when it is read after the last boot.
	if at := find(t, w.StateDisk("node7"), marker); at >= 0 {
		t.Errorf("the marker stands in the raw state disk, at byte %d", at)
	}

	t.Run("one changed byte of the root, and nothing starts", func(t *testing.T) {
		changed := w.changed(t, func(disk *os.File) error {
			at, err := partition(disk, "muster-root")
			if err != nil {
				return err
			}
			return flip(disk, at+100) // in the root's first block: nothing can be read without it
		})
		if _, err := w.RebootVM(t.Context(), "node7", changed); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node7", "dm-verity device corrupted", bootTime) // the kernel panics
	})

	t.Run("a changed command line, and the joinservice refuses", func(t *testing.T) {
		changed := w.changed(t, func(disk *os.File) error { return replace(disk, "panic=30", "panic=31") })
		if _, err := w.RebootVM(t.Context(), "node7", changed); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node7", "POLICY_REFUSED", bootTime)
		record := w.refusal(t, "POLICY_REFUSED", "PCR 4 is")
		t.Logf("audit record: %s", record)
		path, err := w.Console("node7")
		if err != nil {
			t.Fatal(err)
		}
		console, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, pcr := range pcrs {
			seen := strings.Fields(w.says(t, "node7", "PCR "+pcr+" is ", bootTime))
			if now := seen[len(seen)-1]; now == w.predicted[pcr] || !strings.Contains(record, "PCR "+pcr+" is "+now) || !strings.Contains(record, w.predicted[pcr]) {
				t.Errorf("PCR %s: the machine has %s, the policy %s, and the audit record says %s", pcr, now, w.predicted[pcr], record)
			}
			if bytes.Contains(console, []byte(w.predicted[pcr])) {
				t.Errorf("the refused machine was told what PCR %s should be", pcr)
			}
		}
	})

	// The power comes back, with the image as it was, and no person does anything.
	if _, err := w.RebootVM(t.Context(), "node7", w.image); err != nil {
		t.Fatal(err)
	}
	w.measures(t, "node7")
	w.ready(t, "node7", first)
	if got := w.pod(t, "node7", "read", "cat", markerFile); got != marker {
		t.Errorf("the marker is %q after the reboot, want %q", got, marker)
	}
}

// measures compares what the machine has measured, at its first program's start and again when all of the
// system runs, with what the image's build foretold.
func (w *world) measures(t *testing.T, name string) {
	t.Helper()
	for _, pcr := range pcrs {
		if line := w.says(t, name, "PCR "+pcr+" is ", bootTime); !strings.HasSuffix(line, w.predicted[pcr]) {
			t.Errorf("in the initramfs: %s; foretold was %s", line, w.predicted[pcr])
		}
	}
	for _, pcr := range pcrs {
		if line := w.says(t, name, "/sys/class/tpm/tpm0/pcr-sha256/"+pcr+":", joinTime); !strings.HasSuffix(strings.ToLower(line), w.predicted[pcr]) {
			t.Errorf("in the running system: %s; foretold was %s", line, w.predicted[pcr])
		}
	}
}

const markerFile = "/keep/marker"

// mark writes a text into a file on a machine's state disk, and gives the text.
func (w *world) mark(t *testing.T, node string) string {
	t.Helper()
	marker := rand.Text() + rand.Text()
	w.pod(t, node, "write", "put", markerFile, marker)
	return marker
}

// pod runs the lab's program echo on a node to its end, with a folder of the node's state disk at /keep, and
// gives what it printed.
func (w *world) pod(t *testing.T, node, name string, args ...string) string {
	t.Helper()
	manifest := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "kube-system", "name": %q}, "spec": {"nodeName": %q, "restartPolicy": "Never",
"automountServiceAccountToken": false, "tolerations": [{"operator": "Exists"}],
"containers": [{"name": "echo", "image": "lab.muster.dev/echo:v1", "args": ["%s"], "volumeMounts": [{"name": "keep", "mountPath": "/keep"}]}],
"volumes": [{"name": "keep", "hostPath": {"path": "/var/lib/keep", "type": "DirectoryOrCreate"}}]}}`, name, node, strings.Join(args, `", "`))
	if out, err := w.kubectl(t.Context(), manifest, "apply", "-f", "-"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	until(t, joinTime, func(ctx context.Context) error {
		phase, err := w.Kubectl(ctx, "-n", "kube-system", "get", "pod", name, "-o", "jsonpath={.status.phase}")
		if err == nil && phase != "Succeeded" {
			err = fmt.Errorf("pod %s is %s", name, phase)
		}
		return err
	})
	out, err := w.Kubectl(t.Context(), "-n", "kube-system", "logs", name)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// find gives where a text stands in a file, or -1.
func find(t *testing.T, path, text string) int64 {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const chunk = 8 << 20
	var before int64
	b := make([]byte, 0, chunk+len(text))
	for {
		n, err := io.ReadFull(f, b[len(b):len(b)+chunk])
		b = b[:len(b)+n]
		if at := bytes.Index(b, []byte(text)); at >= 0 {
			return before + int64(at)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return -1
		}
		if err != nil {
			t.Fatal(err)
		}
		keep := min(len(b), len(text)-1) // it may stand across two chunks
		before += int64(len(b) - keep)
		b = append(b[:0], b[len(b)-keep:]...)
	}
}

// changed makes a copy of the image and changes it.
func (w *world) changed(t *testing.T, change func(*os.File) error) string {
	t.Helper()
	b, err := os.ReadFile(w.image)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "changed.raw"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b)
	if err := errors.Join(err, change(f), f.Close()); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

// partition gives the offset of a partition, in bytes (GUID partition table: UEFI 2.10, section 5.3).
func partition(disk *os.File, name string) (int64, error) {
	const sector, entry, entries = 512, 128, 128
	table := make([]byte, entry*entries)
	if _, err := disk.ReadAt(table, 2*sector); err != nil {
		return 0, err
	}
	for e := range slices.Chunk(table, entry) {
		var units []uint16
		for i := 56; i < entry; i += 2 {
			if u := binary.LittleEndian.Uint16(e[i:]); u != 0 {
				units = append(units, u)
			}
		}
		if string(utf16.Decode(units)) == name {
			return int64(binary.LittleEndian.Uint64(e[32:])) * sector, nil
		}
	}
	return 0, fmt.Errorf("the image has no partition %s", name)
}

func flip(disk *os.File, at int64) error {
	b := make([]byte, 1)
	if _, err := disk.ReadAt(b, at); err != nil {
		return err
	}
	b[0] ^= 1
	_, err := disk.WriteAt(b, at)
	return err
}

// replace changes the first occurrence of a text that the image must have.
func replace(disk *os.File, from, to string) error {
	b, err := os.ReadFile(disk.Name())
	if err != nil {
		return err
	}
	at := bytes.Index(b, []byte(from))
	if at < 0 {
		return fmt.Errorf("the image has no %q", from)
	}
	_, err = disk.WriteAt([]byte(to), int64(at))
	return err
}
