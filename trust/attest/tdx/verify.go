// Package tdx verifies quotes of Intel TDX (Intel TDX DCAP Quoting Library API, appendix A), of the
// versions 4 and 5.
//
// A genuine quote shows: a TD on a processor of Intel, with these measurements, under a TDX module and firmware of these TCB
// levels, asked for a quote over this value. It does not show that a TPM beside it belongs to the same TD, unless the value
// came from measured software that guarantees this; see docs/hardware-reports.md.
package tdx

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"slices"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Verify checks that a quote is genuine, with collateral that is valid at now, and bound to want
// (A1). roots are Intel's: see [Intel]. Refusals: EVIDENCE_MALFORMED, HARDWARE_UNTRUSTED,
// HARDWARE_COLLATERAL, HARDWARE_TCB, SIGNATURE_INVALID, BINDING_MISMATCH.
func Verify(quote []byte, want hardware.ReportData, c Collateral, roots []*x509.Certificate, now time.Time) (*Quote, error) {
	q, err := genuine(quote, c, roots, now)
	if err != nil {
		return nil, err
	}
	if err := hardware.CheckBinding(q.Data, want); err != nil {
		return nil, err
	}
	return q, nil
}

// CheckSigned checks what needs no collateral: that a key below one of roots has signed the quote, which is bound to want (A1). It does
// not check revocations and the TCB: only [Verify] returns a quote that rules can accept. Refusals: EVIDENCE_MALFORMED,
// HARDWARE_UNTRUSTED, SIGNATURE_INVALID, BINDING_MISMATCH.
func CheckSigned(quote []byte, want hardware.ReportData, roots []*x509.Certificate, now time.Time) error {
	p, err := parse(quote)
	if err != nil {
		return err
	}
	if err := p.checkIssued(roots, now); err != nil {
		return err
	}
	if err := p.checkSignatures(); err != nil {
		return err
	}
	return hardware.CheckBinding(p.Data, want)
}

// genuine is Verify without the binding.
func genuine(quote []byte, c Collateral, roots []*x509.Certificate, now time.Time) (*Quote, error) {
	p, err := parse(quote)
	if err != nil {
		return nil, err
	}
	if err := p.checkIssued(roots, now); err != nil {
		return nil, err
	}
	if err := p.checkRevoked(c, roots, now); err != nil {
		return nil, err
	}
	if err := p.checkSignatures(); err != nil {
		return nil, err
	}
	q := p.Quote
	info, err := c.tcbInfo(p.platform, roots, now)
	if err != nil {
		return nil, err
	}
	identity, err := c.qeIdentity(roots, now)
	if err != nil {
		return nil, err
	}
	q.FMSPC, q.Evaluation = p.platform.fmspc, min(info.Evaluation, identity.Evaluation)
	enclave, err := identity.check(p.qeReport)
	if err != nil {
		return nil, err
	}
	if q.Levels, err = info.platform("", p.platform, q, q.ModuleSVN); err != nil {
		return nil, err
	}
	q.Levels = append(q.Levels, enclave)
	if q.LoadedSVN != q.ModuleSVN {
		loaded, err := info.platform("loaded ", p.platform, q, q.LoadedSVN)
		if err != nil {
			return nil, err
		}
		q.Levels = append(q.Levels, loaded...)
	}
	return q, nil
}

// checkIssued checks the certificates of the processor's key, PCK, and reads its platform.
func (p *parsed) checkIssued(roots []*x509.Certificate, now time.Time) error {
	pck, authority := p.chain[0], p.chain[1]
	root := rootOf(p.chain[2], roots)
	for _, step := range [][2]*x509.Certificate{{root, root}, {authority, root}, {pck, authority}} {
		if err := hardware.CheckIssued(step[0], step[1], now); err != nil {
			return untrusted("the processor's certificate: %w", err)
		}
	}
	if pck.IsCA {
		return untrusted("the processor's certificate is that of an authority")
	}
	var err error
	if p.platform, err = readPCK(pck); err != nil {
		return untrusted("the processor's certificate: %w", err)
	}
	return nil
}

// checkRevoked checks that none of these certificates is revoked.
func (p *parsed) checkRevoked(c Collateral, roots []*x509.Certificate, now time.Time) error {
	pck, authority, root := p.chain[0], p.chain[1], rootOf(p.chain[2], roots)
	if err := hardware.CheckRevoked(hardware.ListsOf(root, c.CRLs), root, now, authority); err != nil {
		return err
	}
	return hardware.CheckRevoked(hardware.ListsOf(authority, c.CRLs), authority, now, pck)
}

// checkSignatures checks what the PCK has signed: it signs the quoting enclave's report, which has
// the hash of the attestation key, which signs the quote.
func (p *parsed) checkSignatures() error {
	if !verifyP256(p.chain[0].PublicKey, p.qeReport, p.qeSigned) {
		return hardware.Refuse(hardware.Signature, "the quoting enclave's report is not signed by the processor's key")
	}
	certified := sha256.Sum256(slices.Concat(p.key, p.qeAuth))
	if !bytes.Equal(p.qeReport[0x140:0x160], certified[:]) || !zero(p.qeReport[0x160:0x180]) {
		return untrusted("the quoting enclave's report is for another attestation key")
	}
	key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), append([]byte{4}, p.key...))
	if err != nil {
		return untrusted("the attestation key: %w", err)
	}
	if !verifyP256(key, p.signed, p.signature) {
		return hardware.Refuse(hardware.Signature, "the TDX quote is not signed by its attestation key")
	}
	return nil
}

func untrusted(format string, args ...any) error {
	return hardware.Refuse(hardware.Untrusted, format, args...)
}

func zero(b []byte) bool { return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 }) }
