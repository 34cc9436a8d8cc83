//go:build vm

package vm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/lab/driver"
)

// With Secure Boot on, the loader starts the kernel itself, and PCR 4 differs: the build predicts that value too. The
// firmware's key is one that Debian publishes for tests.
func TestWithSecureBootTheSignedImageMeasuresWhatWasForetoldAndNoOtherStarts(t *testing.T) {
	w := prepare(t)
	key := filepath.Join(t.TempDir(), "db.key")
	decryptSecureBootKey(t, key)
	signed, off, err := w.buildImage(t, "-secure-boot-key", key, "-secure-boot-cert", driver.SecureBootCertificate)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(signed), "measurements-secureboot.json"))
	if err != nil {
		t.Fatal(err)
	}
	on, err := policyfile.ParseMeasurements(b)
	if err != nil {
		t.Fatal(err)
	}
	if on.PCRs["4"] == off["4"] || on.PCRs["9"] != off["9"] || on.PCRs["11"] != off["11"] {
		t.Errorf("foretold with Secure Boot %v, without %v: want PCR 4 alone to differ", on.PCRs, off)
	}
	if _, err := w.AddVM(t.Context(), driver.VM{Name: "node7", Image: signed, StateMiB: 64, SecureBoot: true}); err != nil {
		t.Fatal(err)
	}
	for _, pcr := range pcrs {
		if line := w.says(t, "node7", "PCR "+pcr+" is ", bootTime); !strings.HasSuffix(line, on.PCRs[pcr]) {
			t.Errorf("%s; foretold was %s", line, on.PCRs[pcr])
		}
	}
	w.says(t, "node7", "the root is verified as it is read", bootTime)

	// The same image without a signature does not even start.
	if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Image: w.image}); err == nil || !strings.Contains(err.Error(), "nothing that it may start") {
		t.Errorf("the image that nobody signed: %v", err)
	}
	path, err := w.Console("node7")
	if err != nil {
		t.Fatal(err)
	}
	if console, err := os.ReadFile(path); err != nil || !strings.Contains(string(console), "Access Denied") || strings.Contains(string(console), "muster:") {
		t.Errorf("%v, and the console says %s", err, driver.CleanLine(string(console)))
	}
}
