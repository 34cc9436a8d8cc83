// Package hardware has what the reports of all processors have in common: the value that a report
// is bound to, and the checks of the vendors' certificates and revocation lists.
//
// A hardware report is evidence beside that of a TPM: an SEV-SNP report (package snp), a TDX quote
// (package tdx), or one of them with the data that Azure's paravisor binds to it (package hcl).
// These packages do no I/O. Their input is bytes, the vendor's certificates and lists, the value
// that the report must be bound to, and the time; each refusal is an attest.Refusal with one
// reason (R1). As in package attest, Verify decides whether a report is genuine, and Rules decide
// whether its content is acceptable. The zero value of Rules accepts nothing (A3).
package hardware

import (
	"bytes"
	"crypto/sha512"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/refusal"
)

// Reasons of the packages snp, tdx and hcl.
const (
	Malformed  = attestv1.Reason_REASON_EVIDENCE_MALFORMED
	Binding    = attestv1.Reason_REASON_BINDING_MISMATCH
	Signature  = attestv1.Reason_REASON_SIGNATURE_INVALID
	Policy     = attestv1.Reason_REASON_POLICY_REFUSED
	Untrusted  = attestv1.Reason_REASON_HARDWARE_UNTRUSTED
	Collateral = attestv1.Reason_REASON_HARDWARE_COLLATERAL
	TCB        = attestv1.Reason_REASON_HARDWARE_TCB
)

// Refuse returns an attest.Refusal; format and args are those of [fmt.Errorf].
func Refuse(reason attestv1.Reason, format string, args ...any) error {
	return refusal.New(reason, format, args...)
}

// ReportData is the value that the guest puts into a report: REPORT_DATA of SEV-SNP, REPORTDATA of
// TDX.
type ReportData [64]byte

// NewReportData returns SHA-512("muster-atls/1 hardware report" || 0x00 || AK name || root). root
// is the root of the Merkle tree that the TPM's quote signs too. So a report is as fresh as the
// quote, and one report serves all sessions that share it.
func NewReportData(akName []byte, root [32]byte) ReportData {
	h := sha512.New()
	h.Write([]byte("muster-atls/1 hardware report\x00"))
	h.Write(akName)
	h.Write(root[:])
	return ReportData(h.Sum(nil))
}

// CheckBinding compares a report's data with the value that it must be bound to (A1). An expected
// value of zeros is refused: it is that of a caller without one, and of guests that bind nothing.
func CheckBinding(got [64]byte, want ReportData) error {
	if want == (ReportData{}) {
		return Refuse(Binding, "there is no value that the hardware report must be bound to")
	}
	if got != want {
		return Refuse(Binding, "the hardware report is bound to %x, not to this session, which is %x", got, want)
	}
	return nil
}

// ParsePEM reads exactly n certificates in PEM. Only white space and NUL bytes, which Intel's
// quotes end with, may follow a block.
func ParsePEM(b []byte, n int) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for b = bytes.Trim(b, "\x00\r\n "); len(b) > 0; b = bytes.Trim(b, "\x00\r\n ") {
		block, rest := pem.Decode(b)
		if block == nil || block.Type != "CERTIFICATE" || !bytes.HasPrefix(b, []byte("-----BEGIN")) {
			return nil, errors.New("is not a list of certificates in PEM")
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(out), err)
		}
		out, b = append(out, c), rest
	}
	if len(out) != n {
		return nil, fmt.Errorf("has %d certificates, want %d", len(out), n)
	}
	return out, nil
}

// CheckIssued checks that issuer, an authority, issued c and that c is valid at now (RFC 5280,
// section 6.1.3). Vendors' chains have a fixed length, so callers check each step by itself; a root
// is checked as its own issuer.
func CheckIssued(c, issuer *x509.Certificate, now time.Time) error {
	switch {
	case c == nil || issuer == nil:
		return errors.New("it leads to no trusted certificate of the vendor")
	case !bytes.Equal(c.RawIssuer, issuer.RawSubject):
		return fmt.Errorf("%q was issued by %q, not by %q", c.Subject, c.Issuer, issuer.Subject)
	case now.Before(c.NotBefore) || now.After(c.NotAfter):
		return fmt.Errorf("%q is valid from %s to %s, now it is %s", c.Subject, c.NotBefore.UTC(), c.NotAfter.UTC(), now.UTC())
	case len(c.UnhandledCriticalExtensions) > 0:
		return fmt.Errorf("%q has critical extensions that are not understood: %v", c.Subject, c.UnhandledCriticalExtensions)
	case !issuer.BasicConstraintsValid || !issuer.IsCA:
		return fmt.Errorf("%q is no certificate authority", issuer.Subject)
	}
	if err := c.CheckSignatureFrom(issuer); err != nil {
		return fmt.Errorf("%q is not signed by %q: %w", c.Subject, issuer.Subject, err)
	}
	return nil
}

// ListsOf returns those revocation lists in DER that have the issuer's name.
func ListsOf(issuer *x509.Certificate, lists [][]byte) (out [][]byte) {
	for _, der := range lists {
		if l, err := x509.ParseRevocationList(der); err == nil && bytes.Equal(l.RawIssuer, issuer.RawSubject) {
			out = append(out, der)
		}
	}
	return out
}

// CheckRevoked checks that there are revocation lists, in DER, and that each is issuer's and valid at
// now (RFC 5280, section 6.3.3), with the reason HARDWARE_COLLATERAL; and that none of them has one of
// certs, which issuer issued, with HARDWARE_UNTRUSTED. A vendor may publish several lists by one key:
// AMD's root has one for the issuers of VCEKs and one for those of VLEKs.
func CheckRevoked(lists [][]byte, issuer *x509.Certificate, now time.Time, certs ...*x509.Certificate) error {
	if len(lists) == 0 { // A3
		return Refuse(Collateral, "the revocation list of %q is missing", issuer.Subject)
	}
	for _, der := range lists {
		if err := checkRevoked(der, issuer, now, certs); err != nil {
			return err
		}
	}
	return nil
}

func checkRevoked(der []byte, issuer *x509.Certificate, now time.Time, certs []*x509.Certificate) error {
	l, err := x509.ParseRevocationList(der)
	if err != nil {
		return Refuse(Collateral, "the revocation list of %q is malformed: %w", issuer.Subject, err)
	}
	if !bytes.Equal(l.RawIssuer, issuer.RawSubject) {
		return Refuse(Collateral, "the revocation list is one of %q, not of %q", l.Issuer, issuer.Subject)
	}
	for _, e := range l.Extensions {
		if e.Critical { // a delta list, or one for some certificates only
			return Refuse(Collateral, "the revocation list of %q has the critical extension %s, which is not understood", issuer.Subject, e.Id)
		}
	}
	// A list without a next update has the zero time, and so is never valid.
	if now.Before(l.ThisUpdate) || now.After(l.NextUpdate) {
		return Refuse(Collateral, "the revocation list of %q is valid from %s to %s, now it is %s", issuer.Subject, l.ThisUpdate.UTC(), l.NextUpdate.UTC(), now.UTC())
	}
	if err := l.CheckSignatureFrom(issuer); err != nil {
		return Refuse(Collateral, "the revocation list is not signed by %q: %w", issuer.Subject, err)
	}
	for _, c := range certs {
		if slices.ContainsFunc(l.RevokedCertificateEntries, func(e x509.RevocationListEntry) bool { return e.SerialNumber.Cmp(c.SerialNumber) == 0 }) {
			return Refuse(Untrusted, "%q has revoked %q, serial number %x", issuer.Subject, c.Subject, c.SerialNumber)
		}
	}
	return nil
}

// End is when a part of a vendor's data ends.
type End struct {
	// Name of the part, for texts and metrics: "revocation list of ARK-Milan".
	Name string
	// Time of the end: with a list, that of its next update.
	Time time.Time
	// Issued is when the vendor issued the part.
	Issued time.Time
	// Evaluation is Intel's tcbEvaluationDataNumber; 0 for revocation lists.
	Evaluation uint32
}

// CRLEnds returns when revocation lists in DER end. It checks no signatures. The error names a list
// that cannot be read.
func CRLEnds(lists [][]byte) (out []End, err error) {
	for i, der := range lists {
		l, err := x509.ParseRevocationList(der)
		if err != nil {
			return nil, fmt.Errorf("revocation list %d: %w", i, err)
		}
		out = append(out, End{Name: "revocation list of " + l.Issuer.CommonName, Time: l.NextUpdate, Issued: l.ThisUpdate})
	}
	return out, nil
}
