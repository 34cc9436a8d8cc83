// Package snp verifies attestation reports of AMD SEV-SNP (AMD publication 56860, SEV-SNP Firmware
// ABI), for processors of the lines Milan, Genoa and Turin.
//
// A genuine report shows: a guest on a processor of AMD, launched with this measurement and policy,
// under firmware of at least the reported TCB, asked for a report over this value. It does not show
// that a TPM beside it belongs to the same guest, unless the value came from measured software that
// guarantees this; see docs/hardware-reports.md.
package snp

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha512"
	"crypto/x509"
	"math/big"
	"slices"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Evidence is what a machine sends.
type Evidence struct {
	// Report is ATTESTATION_REPORT: exactly [ReportSize] bytes.
	Report []byte
	// Certificate is that of the VCEK or VLEK in DER, at most [MaxCertificate] bytes.
	Certificate []byte
}

// MaxCertificate is the limit of a key's certificate, in bytes. AMD's have less than 1,400.
const MaxCertificate = 4096

// Offsets of the signature's halves: each 48 bytes, little-endian, in a field of 72.
const (
	sigR = 0x2A0
	sigS = 0x2E8
)

// Verify checks that a report is genuine, valid at now and bound to want (A1). Refusals:
// EVIDENCE_MALFORMED, HARDWARE_UNTRUSTED, HARDWARE_COLLATERAL, SIGNATURE_INVALID, BINDING_MISMATCH.
func Verify(e Evidence, want hardware.ReportData, authorities Authorities, now time.Time) (*Report, error) {
	r, err := genuine(e, authorities, now)
	if err != nil {
		return nil, err
	}
	if err := hardware.CheckBinding(r.Data, want); err != nil {
		return nil, err
	}
	return r, nil
}

// genuine is Verify without the binding.
func genuine(e Evidence, authorities Authorities, now time.Time) (*Report, error) {
	r, err := parse(e.Report)
	if err != nil {
		return nil, err
	}
	if len(e.Certificate) > MaxCertificate {
		return nil, hardware.Refuse(hardware.Malformed, "the certificate of the %s has %d bytes, more than %d", r.Key, len(e.Certificate), MaxCertificate)
	}
	c, err := x509.ParseCertificate(e.Certificate)
	if err != nil {
		return nil, hardware.Refuse(hardware.Malformed, "the certificate of the %s: %w", r.Key, err)
	}
	k, err := readExtensions(c)
	if err != nil {
		return nil, hardware.Refuse(hardware.Untrusted, "the certificate of the %s: %w", r.Key, err)
	}
	if k.key != r.Key {
		return nil, hardware.Refuse(hardware.Untrusted, "the report is signed by a %s, and the certificate is that of a %s", r.Key, k.key)
	}
	if err := r.setProduct(k.product); err != nil {
		return nil, err
	}
	if err := authorities[k.product].check(c, k.key, now); err != nil {
		return nil, err
	}
	if r.Provider = k.provider; k.key == VCEK {
		if r.ChipID, err = r.chipID(); err != nil {
			return nil, err
		}
		if !bytes.Equal(r.ChipID, k.hwid) {
			return nil, hardware.Refuse(hardware.Untrusted, "the report is from chip %x, and the certificate for chip %x", r.ChipID, k.hwid)
		}
	}
	if r.Reported != k.tcb {
		return nil, hardware.Refuse(hardware.Untrusted, "the report has the TCB %s, and the certificate is for %s", r.Reported, k.tcb)
	}
	return r, checkSignature(e.Report, c)
}

func checkSignature(report []byte, c *x509.Certificate) error {
	key, ok := c.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P384() {
		return hardware.Refuse(hardware.Untrusted, "the key that signs reports is not on P-384")
	}
	half := func(at int) *big.Int {
		b := bytes.Clone(report[at : at+48])
		slices.Reverse(b)
		return new(big.Int).SetBytes(b)
	}
	digest := sha512.Sum384(report[:signedSize])
	if !ecdsa.Verify(key, digest[:], half(sigR), half(sigS)) {
		return hardware.Refuse(hardware.Signature, "the SEV-SNP report is not signed by the key of its certificate")
	}
	return nil
}
