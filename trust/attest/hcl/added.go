package hcl

import (
	"crypto/x509"
	"maps"
	"time"

	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// CheckAdded checks what Azure's metadata service adds to a report: the certificate of the processor's key, or
// the quote. It must be genuine and belong to this report, as far as the machine can see that without the
// collateral that vendors publish. Only a verifier checks revocations and the TCB. Refusals are those of
// [snp.Verify] and [tdx.CheckSigned].
func CheckAdded(kind Kind, report, runtime, added []byte, amd snp.Authorities, intel []*x509.Certificate, now time.Time) error {
	if kind == TDX {
		return tdx.CheckSigned(added, reportData(runtime), intel, now)
	}
	amd = maps.Clone(amd)
	for p, a := range amd {
		a.InsecureNoRevocationLists = true
		amd[p] = a
	}
	_, err := VerifySNP(snp.Evidence{Report: report, Certificate: added}, runtime, amd, now)
	return err
}
