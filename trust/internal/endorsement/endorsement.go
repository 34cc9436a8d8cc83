// Package endorsement defines what an endorsement is: a reason to believe that Muster's attestation
// key (AK) lives in a genuine TPM, and which machine that TPM is (RFC 9334, section 4.1). Each
// endorsement is a package below this one; package registry lists them, one in a line.
//
// An endorsement has two parts, as all of attestation has. Verify decides whether its part of the
// evidence is genuine. The [Rules] that it reads from a policy decide whether it is acceptable; a
// policy without rules for an endorsement accepts no machine by it (A3). Quote, PCRs and policy
// rules for images and firmware do not depend on the endorsement.
package endorsement

import (
	"crypto"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/refusal"
)

// Reasons that several endorsements use.
const (
	Malformed = attestv1.Reason_REASON_EVIDENCE_MALFORMED
	Untrusted = attestv1.Reason_REASON_EK_UNTRUSTED
)

// Endorsement is one kind of endorsement. Implementations have no state.
type Endorsement interface {
	// Name identifies it in claims, reports and texts.
	Name() string
	// In reports whether the evidence carries this endorsement. Evidence carries exactly one.
	In(e *attestv1.Tpm2Evidence) bool
	// CheckSizes enforces the limits of its fields before anything is parsed. It refuses with
	// EVIDENCE_MALFORMED.
	CheckSizes(e *attestv1.Tpm2Evidence) error
	// Verify decides whether the endorsement is genuine. The quote was verified before.
	Verify(in Input) (Result, error)
	// Parse reads the rules of a policy; nil if it has none. It refuses with POLICY_INVALID.
	Parse(p *attestv1.Policy) (Rules, error)
}

// Input is the input of Verify's decision.
type Input struct {
	// Evidence has passed all checks but those of its endorsement.
	Evidence *attestv1.Tpm2Evidence
	// AKName is the attestation key's name, computed from its public area, which equals the template.
	AKName []byte
	// AK is its key.
	AK crypto.PublicKey
	// Signed is the value that the quote signs: it follows from the statement of this session (A1).
	Signed [32]byte
	// Roots are the certificate authorities of all endorsements of the policy. The rules decide
	// which of them may endorse what.
	Roots []*x509.Certificate
	// Now is the time for certificates' validity.
	Now time.Time
}

// Result is the outcome of Verify.
type Result struct {
	checked.Endorsement
	// Activate is the key by which the TPM must still prove that the AK is in it (activation); nil if
	// nothing is left to prove.
	Activate crypto.PublicKey
	// Open reports that any peer can make such an endorsement, and only the policy decides.
	Open bool
}

// Rules are the rules of a policy for one endorsement. They are immutable.
type Rules interface {
	// Authorities lists the certificates that a verifier needs as roots.
	Authorities() []Authority
	// CheckAuthority decides whether the endorsing authority is acceptable. It refuses with
	// EK_UNTRUSTED.
	CheckAuthority(f *checked.Facts) error
	// CheckMachine decides whether the machine is acceptable. It refuses with POLICY_REFUSED.
	CheckMachine(f *checked.Facts) error
	// MayAccept reports whether a machine with that ID could be accepted, for who knows only its ID.
	MayAccept(machine [32]byte) bool
	// Listed returns the field of the policy that lists that machine ID; empty if none does.
	Listed(machine [32]byte) string
	// Unlisted returns the field of the policy that lists machines of this kind and lacks this one, if
	// the rules would accept the machine with its ID there; otherwise an empty string.
	Unlisted(f *checked.Facts) string
	// OnlyECC reports whether attestation keys must be ECC keys, since the policy names ECC keys
	// (A8).
	OnlyECC() bool
}

// Authority is a certificate authority of a policy.
type Authority struct {
	// Field is its place in the policy, such as "tpm2.ekRoots[0]".
	Field       string
	Certificate *x509.Certificate
}

// Invalid returns a refusal of a policy.
func Invalid(format string, args ...any) error {
	return refusal.New(attestv1.Reason_REASON_POLICY_INVALID, "policy: "+format, args...)
}

// Refuse returns a refusal.
func Refuse(r attestv1.Reason, format string, args ...any) error {
	return refusal.New(r, format, args...)
}

// ParseHex reads exactly n bytes in lower-case hexadecimal digits, so one value has one spelling.
func ParseHex(s string, n int) ([]byte, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != n || hex.EncodeToString(b) != s {
		return nil, fmt.Errorf("want %d lower-case hexadecimal digits", 2*n)
	}
	return b, nil
}

// ParseMachineIDs reads a list of machine IDs. field is its name, for the error. It refuses an ID that
// stands twice: a machine that its owner takes off the list would stay on it.
func ParseMachineIDs(field string, list []string) (map[[32]byte]bool, error) {
	out := make(map[[32]byte]bool, len(list))
	for _, s := range list {
		b, err := ParseHex(s, 32)
		if err != nil {
			return nil, Invalid("%s: machine ID %q: %w", field, s, err)
		}
		if out[[32]byte(b)] {
			return nil, Invalid("%s lists %s twice", field, s)
		}
		out[[32]byte(b)] = true
	}
	return out, nil
}
