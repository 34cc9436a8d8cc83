package vtpm

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"
	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/internal/firmware"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestACAIsMadeOnceAndIsARoot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	ca, err := NewCA(dir, "one")
	if err != nil {
		t.Fatal(err)
	}
	first, err := os.ReadFile(ca.CertPath())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewCA(dir, "two"); err != nil {
		t.Fatal(err)
	}
	again, err := os.ReadFile(ca.CertPath())
	if err != nil {
		t.Fatal(err)
	}
	if string(first) != string(again) {
		t.Error("a second call made another CA: the TPMs of the first would be strangers")
	}
	block, _ := pem.Decode(first)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if err := cert.CheckSignatureFrom(cert); err != nil || !cert.IsCA {
		t.Errorf("not a root: %v", err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "key.pem")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("key file: %v, %v", fi, err)
	}
}

// start makes a TPM in a folder, and starts it until the test ends. The caller has locked its thread, since the TPM's
// process ends with the thread that starts it.
func start(t *testing.T, manufacture func(TPM, CA) error) (chip TPM, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "vtpm") // short: it holds a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	ca, err := NewCA(filepath.Join(dir, "ca"), "CA")
	if err != nil {
		t.Fatal(err)
	}
	chip = TPM{Dir: filepath.Join(dir, "tpm")}
	if err := manufacture(chip, ca); err != nil {
		t.Fatal(err)
	}
	cmd := chip.Command()
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait() // killed
	})
	if err := chip.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	return chip, dir
}

func TestATPMServesOneConnectionAfterAnother(t *testing.T) {
	runtime.LockOSThread() // the TPM's process ends with the thread that starts it
	defer runtime.UnlockOSThread()
	chip, dir := start(t, func(chip TPM, ca CA) error { return chip.Manufacture(t.Context(), ca) })
	files := []firmware.File{{Path: "/etc/x", PCR: firmware.PCRConfig, SHA256: "abababababababababababababababababababababababababababababababab"}}
	want, err := firmware.Expected("image", files)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := linuxudstpm.Open(chip.Socket())
	if err != nil {
		t.Fatal(err)
	}
	if err := firmware.Boot(boot, files, filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	if err := boot.Close(); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		c, err := linuxudstpm.Open(chip.Socket())
		if err != nil {
			t.Fatal(err)
		}
		got, err := firmware.ReadPCRs(c, 4, 11, 12)
		if err != nil {
			t.Fatal(err)
		}
		if got[4] != want.PCRs["4"] || got[11] != want.PCRs["11"] || got[12] != want.PCRs["12"] {
			t.Errorf("PCRs are %v, want %v", got, want.PCRs)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTPMsAreBelievedForWhatTheyStore(t *testing.T) {
	for want, manufacture := range map[string]func(TPM, CA) error{
		"ek-certificate": func(chip TPM, ca CA) error { return chip.Manufacture(t.Context(), ca) },
		"bare-ek":        func(chip TPM, ca CA) error { return chip.ManufactureBare(t.Context(), ca) },
		"platform-ak":    func(chip TPM, ca CA) error { return chip.ManufactureCloud(t.Context(), ca, "node7") },
	} {
		t.Run(want, func(t *testing.T) {
			runtime.LockOSThread() // the TPM's process ends with the thread that starts it
			defer runtime.UnlockOSThread()
			chip, dir := start(t, manufacture)
			id, endorsement, err := tpm2.Identity(t.Context(), tpm.Open(chip.Socket(), tpm.WithLock(filepath.Join(dir, "lock"))))
			if err != nil || endorsement != want {
				t.Errorf("machine %s, %q, %v", id, endorsement, err)
			}
		})
	}
}
