package main

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"encoding/base64"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

func place(t *testing.T, dir, name, content string) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestTheDefaultConfigurationIsEncryptedAndComplete(t *testing.T) {
	key := base64.StdEncoding.EncodeToString(make([]byte, ed25519.PublicKeySize))
	b, bank, err := configOptions{ownerKeys: key + "," + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, ed25519.PublicKeySize)), lowestSerial: 7}.make()
	if err != nil {
		t.Fatal(err)
	}
	img, err := metadata.ParseImage(b)
	if err != nil || bank != crypto.SHA256 || img.StateDisk.Mode != metadata.DiskLUKS || img.StateDisk.Path != layout.StateDevice || len(img.OwnerKeys) != 2 || img.LowestPolicySerial != 7 {
		t.Errorf("%+v, %v", img, err)
	}
	if ignored := img.Kubeadm.IgnorePreflightErrors; len(ignored) > 0 { // the root has everything that kubeadm checks
		t.Errorf("kubeadm's checks %v are ignored", ignored)
	}
}

func TestConfigurationsThatAMachineWouldRefuseAreRefusedHere(t *testing.T) {
	dir := t.TempDir()
	const head = "apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\n"
	plain := place(t, dir, "plain.yaml", head+"stateDisk: {mode: plain, path: /var/lib/muster/state}\n")
	owned := place(t, dir, "owned.yaml", head+"stateDisk: {mode: plain, path: /var/lib/muster/state}\nownerKeys: ["+base64.StdEncoding.EncodeToString(make([]byte, ed25519.PublicKeySize))+"]\n")
	unowned := place(t, dir, "unowned.yaml", head+"stateDisk: {mode: luks, path: /dev/disk/by-id/x}\ninsecure: {noOwnerKey: true}\n")
	good := place(t, dir, "good.yaml", head+"stateDisk: {mode: luks, path: /dev/disk/by-id/x}\n")
	for name, tt := range map[string]struct {
		options configOptions
		says    string
	}{
		"state that is not encrypted": {configOptions{file: plain}, "-allow-plain-state"},
		"an unknown field":            {configOptions{file: place(t, dir, "bad.yaml", head+"stateDisk: {mode: luks, path: /d}\ncolour: red\n")}, "colour"},
		"no owner":                    {configOptions{}, "-allow-no-owner-key"},
		"no owner in the file":        {configOptions{file: good}, "-allow-no-owner-key"},
		"no owner on purpose":         {configOptions{file: unowned}, "-allow-no-owner-key"},
		"no owner, allowed here only": {configOptions{file: good, noOwner: true}, "insecure: {noOwnerKey: true}"},
		"no file":                     {configOptions{file: filepath.Join(dir, "none")}, "none"},
		"a key that is none":          {configOptions{ownerKeys: "x"}, "ownerKeys"},
		"roots that are none":         {configOptions{ekRoots: good}, "ekRoots"},
		"a file and a lowest serial":  {configOptions{file: good, lowestSerial: 7}, "-config"},
		"a lowest serial of nobody":   {configOptions{noOwner: true, lowestSerial: 7}, "lowestPolicySerial"},
		"a file and a key":            {configOptions{file: good, ownerKeys: "x"}, "-config"},
	} {
		if _, _, err := tt.options.make(); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	aws := place(t, dir, "aws.yaml", head+"stateDisk: {mode: luks, path: /dev/disk/by-id/x}\ninsecure: {noOwnerKey: true}\ntpm: {bank: sha384}\n")
	for want, o := range map[crypto.Hash][]configOptions{crypto.SHA256: {{file: owned, plain: true}, {file: unowned, noOwner: true}, {noOwner: true}}, crypto.SHA384: {{file: aws, noOwner: true}}} {
		for _, o := range o {
			if _, bank, err := o.make(); err != nil || bank != want {
				t.Errorf("bank %s, %v", bank, err)
			}
		}
	}
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	dir := t.TempDir()
	place(t, dir, "modules.dep", "kernel/a-b.ko: kernel/c.ko kernel/d.ko\nkernel/c.ko: kernel/d.ko\nkernel/d.ko:\nkernel/e.ko:\n")
	place(t, dir, "modules.builtin", "kernel/inside.ko\n")
	for _, f := range []string{"a-b", "c", "d", "e"} {
		place(t, dir, "kernel/"+f+".ko", f)
	}
	got, err := moduleOrder(dir, []string{"a_b", "inside", "c"})
	if err != nil || !slices.Equal(got, []string{"kernel/d.ko", "kernel/c.ko", "kernel/a-b.ko"}) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := moduleOrder(dir, []string{"virtio_pci"}); err == nil || !strings.Contains(err.Error(), "virtio_pci") {
		t.Errorf("a module that is nowhere: %v", err)
	}
}

func TestTheInitialRAMDiskIsTheSameEachTime(t *testing.T) {
	dir := t.TempDir()
	var dep strings.Builder
	for _, m := range modules {
		place(t, dir, m+".ko", strings.Repeat(m, 1000))
		dep.WriteString(m + ".ko:\n")
	}
	place(t, dir, "modules.dep", dep.String())
	place(t, dir, "modules.builtin", "")
	a, err := initrd([]byte("program"), dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := initrd([]byte("program"), dir)
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("it changes: %v", err)
	}
	c, err := initrd([]byte("Program"), dir)
	if err != nil || bytes.Equal(a, c) {
		t.Errorf("another program makes no difference: %v", err)
	}
}

// Invariant B6.
func TestTheCommandLineNamesTheRootOnce(t *testing.T) {
	root := layout.Root{Hash: [32]byte{1}, Blocks: 9}
	line := cmdline(options{cmdline: "a=b  c", lockdown: "integrity"}, root)
	if got, err := layout.RootOf(line); err != nil || got != root || !strings.Contains(line, " a=b c ") {
		t.Errorf("%q: %v, %v", line, got, err)
	}
	for _, word := range []string{"lockdown=integrity", "module.sig_enforce=1", "sysctl.kernel.kexec_load_disabled=1", "nohibernate", "efi=noruntime,disable_early_pci_dma", "intel_iommu=on", "iommu.passthrough=0", "iommu.strict=1"} {
		if !slices.Contains(strings.Fields(line), word) {
			t.Errorf("%q lacks %s", line, word)
		}
	}
	if strings.Contains(line, "roothash=") {
		t.Error("systemd's generators would wait for a partition")
	}
}

func TestFilesOfAptAreNamed(t *testing.T) {
	p, err := debianFile("linux-image-6.1.0-9-cloud-amd64_1%3a6.1.27-1_amd64.deb")
	if err != nil || p.Name != "linux-image-6.1.0-9-cloud-amd64" || p.Version != "1:6.1.27-1" || p.Architecture != "amd64" {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := debianFile("x.deb"); err == nil {
		t.Errorf("%+v", p)
	}
}

func TestArgumentsThatDontGoTogetherAreRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		says string
	}{
		"half a signature": {[]string{"-containerd", "x", "-secure-boot-key", "k"}, "together"},
		"no containerd":    {nil, "-containerd"},
		"more":             {[]string{"x"}, "unexpected"},
		"no such lockdown": {[]string{"-containerd", "x", "-lockdown", "none"}, "confidentiality, integrity"},
	} {
		if err := run(t.Context(), tt.args, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whoever trusts the builder's key learns by it which packages and modules an image has (S2).
func TestTheBuilderSignsLockFileAndBill(t *testing.T) {
	dir, keys := t.TempDir(), t.TempDir()
	files := []string{diskFile, ukiFile, measuredFile, measuredSBFile, billFile, lockFile}
	for _, f := range files {
		place(t, dir, f, "the content of "+f)
	}
	key := filepath.Join(keys, "builder")
	if out, err := exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := report(options{out: dir, builderKey: key}, io.Discard); err != nil {
		t.Fatal(err)
	}
	check := func() error { // the commands of docs/image.md
		return exec.CommandContext(t.Context(), "sh", "-euc", `cd "$1"
			{ printf 'builder '; cat "$2.pub"; } > "$2.signers"
			ssh-keygen -Y verify -f "$2.signers" -I builder -n muster-image -s SHA256SUMS.sig < SHA256SUMS
			sha256sum -c SHA256SUMS`, "sh", dir, key).Run()
	}
	if err := check(); err != nil {
		t.Error(err)
	}
	for _, f := range files {
		place(t, dir, f, "other content")
		if check() == nil {
			t.Errorf("another %s has the builder's signature", f)
		}
		place(t, dir, f, "the content of "+f)
	}
}
