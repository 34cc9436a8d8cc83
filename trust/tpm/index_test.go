package tpm_test

import (
	"errors"
	"testing"

	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// Root on a machine can define an index that comes before the one with the certificate of the TPM's maker, and lasts. The machine
// does not attest then, and its administrator must see why.
func TestTheIndexThatDecidesIsNamed(t *testing.T) {
	if _, err := tpmtest.SWTPM(t, tpmtest.Bare()).Open().CertificateIndex(t.Context()); !errors.Is(err, tpm.ErrNoCertificate) {
		t.Errorf("of a TPM without a certificate: %v", err)
	}
	e := tpmtest.SWTPM(t)
	made, err := e.Open().CertificateIndex(t.Context())
	if err != nil || !made.PlatformCreated {
		t.Fatalf("as its maker left it: %+v, %v", made, err)
	}
	for _, index := range []uint32{tpm.PlatformSlots[1].Certificate, tpm.PlatformSlots[0].Certificate} {
		tpmtest.WriteNV(t, raw(t, e), index, []byte("junk"))
		dev := e.Open()
		if got, err := dev.CertificateIndex(t.Context()); err != nil || got != (tpm.CertificateIndex{Index: index}) {
			t.Errorf("%+v, %v, want 0x%08x of the owner", got, err, index)
		}
		if _, err := dev.PlatformCertificates(t.Context()); err == nil || errors.Is(err, tpm.ErrNoPlatformKey) {
			t.Errorf("the index does not decide: %v", err)
		}
	}
}
