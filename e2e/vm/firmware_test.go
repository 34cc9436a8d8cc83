//go:build vm

package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/driver"
)

// A provider adds something below an unchanged image (A9): each time the joinservice refuses the machine, with the
// register and the event in its audit record, and the original machine is accepted again.
func TestADriverOrOtherFirmwareBelowTheImageIsRefused(t *testing.T) {
	w := bringUp(t)
	boot := w.join(t, w.worker("node7"), node7)
	dir, efi := t.TempDir(), efiDriver()
	write := func(name string, b []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	disk := fat(t, map[string]string{"driver.efi": write("driver.efi", efi)})

	// refused boots the machine with other hardware and waits for the refusal's record.
	refused := func(t *testing.T, hw driver.Hardware, console string, record ...string) {
		t.Helper()
		since := time.Now()
		if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Image: w.image, Hardware: &hw}); err != nil {
			t.Fatal(err)
		}
		if console != "" {
			w.says(t, "node7", console, bootTime)
		}
		w.says(t, "node7", "POLICY_REFUSED", bootTime)
		t.Logf("audit record: %s", w.refusal(t, since, "POLICY_REFUSED", record...))
	}

	t.Run("Driver0000 on another disk", func(t *testing.T) {
		// The firmware's own shell starts this when the boot disk has no boot loader.
		script := fat(t, map[string]string{"startup.nsh": write("startup.nsh", []byte(strings.ReplaceAll(`@echo -off
echo booted
connect -r
map -r
for %a run (0 9)
  if exist fs%a:\driver.efi then
    bcfg driver add 0 fs%a:\driver.efi "provider"
  endif
endfor
echo done
`, "\n", "\r\n")))})
		if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Image: script, Hardware: &driver.Hardware{Disk: disk}}); err != nil {
			t.Fatal(err)
		}
		w.says(t, "node7", "Add Driver0000", bootTime)
		w.says(t, "node7", "done", bootTime)
		refused(t, driver.Hardware{Disk: disk}, driverText, "PCR 2 is", "driver.efi")
		if err := w.KillVM(t.Context(), "node7"); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(w.FirmwareVariables("node7")); err != nil { // they are created again
			t.Fatal(err)
		}
	})
	t.Run("a driver in an option ROM", func(t *testing.T) {
		refused(t, driver.Hardware{OptionROM: write("option.rom", optionROM(efi))}, driverText, "PCR 2 is", "EV_EFI_BOOT_SERVICES_DRIVER")
	})
	updated := driver.Hardware{Firmware: driver.SecureBootFirmware}
	t.Run("other firmware", func(t *testing.T) {
		refused(t, updated, "", "PCR 0 is", "EV_EFI_PLATFORM_FIRMWARE_BLOB")
	})

	// A firmware update: the machine that has the new firmware becomes the second class, and both are accepted.
	rules := w.rulesOnly(t, node7)
	w.addClass(t, "updated", node7)
	w.Muster(t, "policy", "apply")
	boot = w.ready(t, "node7", boot)
	if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Hardware: new(driver.Hardware)}); err != nil {
		t.Fatal(err)
	}
	boot = w.ready(t, "node7", boot)

	// Rules over the event log in place of class vm, taken from the machine with the other firmware: a driver is refused by its digest, and the firmware's
	// own code is open.
	w.Muster(t, "policy", "apply", rules)
	t.Run("a driver that the rules do not list", func(t *testing.T) {
		refused(t, driver.Hardware{OptionROM: write("rules.rom", optionROM(efi))}, driverText, "class rules, differs", "PCR 2: EV_EFI_BOOT_SERVICES_DRIVER", "is not listed")
	})
	if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Hardware: new(driver.Hardware)}); err != nil {
		t.Fatal(err)
	}
	w.ready(t, "node7", boot)
}

// rulesOnly makes a later policy, by which a virtual machine is accepted if its event log follows rules: no driver but those that the machine at
// the address has now. It returns the file's name in the owner's folder.
func (w *fixture) rulesOnly(t *testing.T, address string) string {
	t.Helper()
	const file = "rules.yaml"
	text, err := os.ReadFile(filepath.Join(w.OwnerDir(), "muster-vm", "policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var policy map[string]any
	if err := yaml.Unmarshal(text, &policy); err != nil {
		t.Fatal(err)
	}
	classes, _, err := unstructured.NestedSlice(policy, "tpm2", "classes")
	kept := slices.DeleteFunc(classes, func(c any) bool { return c.(map[string]any)["name"] == "vm" })
	if err := errors.Join(err, unstructured.SetNestedSlice(policy, kept, "tpm2", "classes")); err != nil {
		t.Fatal(err)
	}
	policy["serial"] = policy["serial"].(float64) + 10 // add-class adds 1
	if text, err = yaml.Marshal(policy); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.OwnerDir(), file), text, 0o600); err != nil {
		t.Fatal(err)
	}
	w.addClass(t, "rules", address, "--event-log", "--policy", file)
	return file
}

// A policy demands Secure Boot with these keys (A9). With the same firmware, and Secure Boot off, the same machine is refused.
func TestAMachineWithSecureBootOffIsRefusedWhereItIsRequired(t *testing.T) {
	w := bringUp(t)
	key := filepath.Join(t.TempDir(), "db.key")
	decryptSecureBootKey(t, key)
	image, _, err := w.buildImage(t, "-secure-boot-key", key, "-secure-boot-cert", driver.SecureBootCertificate)
	if err != nil {
		t.Fatal(err)
	}
	// One image has two sets of values: with Secure Boot on and off. The owner's program computes them from the disk image, and finds those of the build.
	w.Muster(t, "policy", "from-image", image, "--secure-boot", "both", "--measurements", filepath.Join(filepath.Dir(image), measurementsFile), "--measurements", filepath.Join(filepath.Dir(image), "measurements-secureboot.json"),
		"--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator", "--node-cidr", driver.NodeSubnet, "--allow-plain-state", "--serial", "9", "-o", "both.yaml")
	w.Muster(t, "policy", "add-image", w.MeasurementsPath(), "--policy", "both.yaml") // of the lab's own machines
	w.Muster(t, "policy", "apply", "both.yaml")
	v := w.worker("node7")
	v.Image, v.SecureBoot = image, true
	if _, err := w.AddVM(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	w.addClass(t, "secure", node7, "--event-log")
	w.Muster(t, "policy", "apply")
	boot := w.ready(t, "node7", "")

	if err := w.KillVM(t.Context(), "node7"); err != nil {
		t.Fatal(err)
	}
	on, err := os.ReadFile(w.FirmwareVariables("node7"))
	if err != nil {
		t.Fatal(err)
	}
	off, err := os.ReadFile(driver.NoSecureBootVariables)
	if err := errors.Join(err, os.WriteFile(w.FirmwareVariables("node7"), off, 0o600)); err != nil {
		t.Fatal(err)
	}
	since := time.Now()
	w.boot(t, "node7", image)
	w.says(t, "node7", "POLICY_REFUSED", bootTime)
	t.Logf("audit record: %s", w.refusal(t, since, "POLICY_REFUSED", "Secure Boot", "PCR 7"))

	if err := errors.Join(w.KillVM(t.Context(), "node7"), os.WriteFile(w.FirmwareVariables("node7"), on, 0o600)); err != nil {
		t.Fatal(err)
	}
	w.boot(t, "node7", image)
	w.ready(t, "node7", boot)
}

// decryptSecureBootKey writes the private key that the firmware of [driver.VM.SecureBoot] trusts.
func decryptSecureBootKey(t *testing.T, to string) {
	t.Helper()
	decrypt := exec.CommandContext(t.Context(), "openssl", "pkey", "-in", driver.SecureBootKey, "-passin", "pass:"+driver.SecureBootPassphrase, "-out", to)
	if out, err := decrypt.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// fat makes a raw image of a FAT file system without partitions that holds files.
func fat(t *testing.T, files map[string]string) (image string) {
	t.Helper()
	image = filepath.Join(t.TempDir(), "fat.img")
	run := func(ctx context.Context, name string, args ...string) error {
		if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, out)
		}
		return nil
	}
	err := run(t.Context(), "/usr/sbin/mkfs.vfat", "-C", image, "1024")
	for name, path := range files {
		err = errors.Join(err, run(t.Context(), "mcopy", "-i", image, path, "::"+name))
	}
	if err != nil {
		t.Fatal(err)
	}
	return image
}
