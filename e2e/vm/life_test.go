package vm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/lab/driver"
)

// pcrs are those that distinguish images.
var pcrs = []string{"4", "9", "11"}

// Invariant B6.
func TestAMachineBootsJoinsIsTamperedWithAndRejoins(t *testing.T) {
	w := bringUp(t)
	if _, err := w.AddVM(t.Context(), driver.VM{Name: "node7", Image: w.image, StateMiB: stateMiB, JoinEndpoints: []string{joinservice1}}); err != nil {
		t.Fatal(err)
	}
	w.measures(t, "node7")
	w.acceptFirmware(t, node7)
	first := w.ready(t, "node7", "")
	marker := w.mark(t, "node7")
	w.guarded(t, "node7")
	if err := w.KillVM(t.Context(), "node7"); err != nil {
		t.Fatal(err)
	}
	// The test reads it after the last boot.
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
		if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Image: changed}); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node7", "dm-verity device corrupted", bootTime) // the kernel panics
	})

	t.Run("a changed command line, and the joinservice refuses", func(t *testing.T) {
		changed := w.changed(t, func(disk *os.File) error { return replace(disk, "panic=30", "panic=31") })
		if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Image: changed}); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node7", "POLICY_REFUSED", bootTime)
		record := w.refusal(t, time.Time{}, "POLICY_REFUSED", "PCR 4 is")
		t.Logf("audit record: %s", record)
		console := w.console(t, "node7")
		for _, pcr := range pcrs {
			seen := strings.Fields(w.says(t, "node7", "PCR "+pcr+" is ", bootTime))
			if now := seen[len(seen)-1]; now == w.predicted[pcr] || !strings.Contains(record, "PCR "+pcr+" is "+now) || !strings.Contains(record, w.predicted[pcr]) {
				t.Errorf("PCR %s: the machine has %s, the policy %s, and the audit record says %s", pcr, now, w.predicted[pcr], record)
			}
			if strings.Contains(console, w.predicted[pcr]) {
				t.Errorf("the refused machine was told what PCR %s should be", pcr)
			}
		}
	})

	// The power comes back, with the original image; no person acts.
	if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Image: w.image}); err != nil {
		t.Fatal(err)
	}
	w.measures(t, "node7")
	w.ready(t, "node7", first)
	const confined = "cri-containerd.apparmor.d (enforce)\n" // containerd's default profile
	if got := w.pod(t, "node7", "read", "cat", markerFile, "/proc/self/attr/current"); got != marker+confined {
		t.Errorf("after the reboot a container reads %q, want the marker %q and that it is confined: %q", got, marker, confined)
	}
}

// guarded tries as root of a node to load other code into its kernel.
func (w *fixture) guarded(t *testing.T, node string) {
	t.Helper()
	said := w.shell(t, node, "kernel", `
echo lockdown: $(cat /sys/kernel/security/lockdown)
echo hibernation: $(cat /sys/power/disk)
module=$(find /usr/lib/modules -name dummy.ko)
insmod $module && rmmod dummy && echo signed: loaded
head -c -1 $module > /tmp/unsigned.ko # the signature ends in the file's last byte
insmod /tmp/unsigned.ko && echo unsigned: loaded
echo 0 > /proc/sys/kernel/kexec_load_disabled
echo kexec disabled: $(cat /proc/sys/kernel/kexec_load_disabled)
bootstrapper doctor | grep lockdown:
true`)
	for _, want := range []string{"lockdown: none integrity [confidentiality]\n", "hibernation: [disabled]\n", "signed: loaded\n", "kexec disabled: 1\n", "lockdown: confidentiality; modules are signed, no kexec, AppArmor is on\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("a node's root does not see %q", want)
		}
	}
	if strings.Contains(said, "unsigned: loaded") {
		t.Error("the kernel loads a module without a signature")
	}
	t.Logf("root on %s:\n%s", node, said)
}

// measures compares the machine's measurements, at its first program's start and again when all of the system runs,
// with those that the image's build predicted.
func (w *fixture) measures(t *testing.T, name string) {
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

// mark writes a text into a file on a machine's state disk, and returns the text.
func (w *fixture) mark(t *testing.T, node string) string {
	t.Helper()
	marker := rand.Text() + rand.Text()
	w.pod(t, node, "write", "put", markerFile, marker)
	return marker
}

// pod runs the lab's program echo on a node to its end, with a folder of the node's state disk at /keep, and returns
// its output.
func (w *fixture) pod(t *testing.T, node, name string, args ...string) string {
	t.Helper()
	return w.completed(t, node, name, corev1.Container{Args: args, VolumeMounts: []corev1.VolumeMount{{Name: "keep", MountPath: "/keep"}}},
		corev1.HostPathVolumeSource{Path: "/var/lib/keep", Type: new(corev1.HostPathDirectoryOrCreate)})
}

// shell runs a script as root of a node, with the node's own programs and files, and returns its output.
func (w *fixture) shell(t *testing.T, node, name, script string) string {
	t.Helper()
	const lib = "/keep/usr/lib/x86_64-linux-gnu"
	return w.completed(t, node, name, corev1.Container{
		Command:         []string{lib + "/ld-linux-x86-64.so.2", "--library-path", lib, "/keep/usr/sbin/chroot", "/keep", "/bin/sh", "-c", "exec 2>&1; PATH=/usr/sbin:/usr/bin; " + script},
		SecurityContext: &corev1.SecurityContext{Privileged: new(true)},
		VolumeMounts:    []corev1.VolumeMount{{Name: "keep", MountPath: "/keep"}},
	}, corev1.HostPathVolumeSource{Path: "/"})
}

// completed runs a pod of the lab's program echo, or of the container's command, to its end.
func (w *fixture) completed(t *testing.T, node, name string, c corev1.Container, keep corev1.HostPathVolumeSource) string {
	t.Helper()
	c.Name, c.Image = "echo", "lab.muster.dev/echo:v1"
	manifest, err := json.Marshal(corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, RestartPolicy: corev1.RestartPolicyNever, AutomountServiceAccountToken: new(false), Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{c}, Volumes: []corev1.Volume{{Name: "keep", VolumeSource: corev1.VolumeSource{HostPath: &keep}}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	until(t, joinTime, func(ctx context.Context) error { // a kubelet restarts the API server of a slow machine
		out, err := w.kubectl(ctx, string(manifest), "apply", "-f", "-")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	until(t, joinTime, func(ctx context.Context) error {
		phase, err := w.Kubectl(ctx, "-n", "kube-system", "get", "pod", name, "-o", "jsonpath={.status.phase}")
		if err == nil && phase != "Succeeded" {
			err = fmt.Errorf("pod %s is %s", name, phase)
		}
		return err
	})
	var out string
	until(t, joinTime, func(ctx context.Context) (err error) {
		out, err = w.Kubectl(ctx, "-n", "kube-system", "logs", name)
		return err
	})
	return out
}

// find returns the position of a text in a file, or -1.
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
func (w *fixture) changed(t *testing.T, change func(*os.File) error) string {
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

// partition returns the offset of a partition, in bytes (GUID partition table: UEFI 2.10, section 5.3).
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
