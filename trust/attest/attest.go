// Package attest is the vocabulary of attestation in the terms of RFC 9334 (RATS).
//
// Think of two separate questions. Is the evidence genuine? A [Verifier] answers it:
// it checks signatures and gives [Claims], which nothing else can make (A2). Is what it
// says acceptable? An [Appraiser], mostly a [Policy], answers that: it compares claims
// with what the owner signed. A connection that passed both carries a [Peer] in its
// context; no request body ever says who the caller is (J1).
//
// Nothing here accepts by default (A3): a policy without rules admits nobody, an
// expectation without a lock state admits nobody, and no constructor takes nil for "don't
// check".
package attest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// Purpose says what a quote is for (A5). The process that owns the TPM sets it, from
// the socket that it was asked through, never from the request.
type Purpose string

// The purposes of muster-atls/1.
const (
	// PurposeMachine is a machine's own: init, join and re-attestation.
	PurposeMachine Purpose = "machine"
	// PurposeJoinservice is for the joinservice that runs on the machine.
	PurposeJoinservice Purpose = "joinservice"
	// PurposeKMS is for the key service that runs on the machine.
	PurposeKMS Purpose = "kms"
	// PurposePublic is for GetEvidence; no session accepts it.
	PurposePublic Purpose = "public"
)

// Binding ties evidence to one end of one TLS session; see docs/attested-tls.md. For the
// purpose public it is the caller's nonce.
type Binding [32]byte

// Statement is what a quote is made over: a binding with its purpose.
type Statement [32]byte

// NewStatement gives SHA-256("muster-atls/1 statement" || 0x00 || uint8(len(purpose))
// || purpose || binding).
func NewStatement(p Purpose, b Binding) Statement {
	h := sha256.New()
	h.Write([]byte("muster-atls/1 statement\x00"))
	h.Write([]byte{uint8(len(p))})
	h.Write([]byte(p))
	h.Write(b[:])
	return Statement(h.Sum(nil))
}

// MachineID names a machine: SHA-256 of its endorsement key's SubjectPublicKeyInfo in
// DER (RFC 5280, section 4.1.2.7).
type MachineID [sha256.Size]byte

// MachineIDOf gives the ID of the machine with that endorsement key.
func MachineIDOf(ekSPKI []byte) MachineID { return sha256.Sum256(ekSPKI) }

// String gives 64 lower-case hexadecimal digits.
func (m MachineID) String() string { return hex.EncodeToString(m[:]) }

// ParseMachineID reads 64 lower-case hexadecimal digits.
func ParseMachineID(s string) (MachineID, error) {
	b, err := parseHex(s, sha256.Size)
	if err != nil {
		return MachineID{}, fmt.Errorf("machine ID %q: %w", s, err)
	}
	return MachineID(b), nil
}

// parseHex reads exactly n bytes in lower-case hexadecimal digits, so that one value has
// one spelling.
func parseHex(s string, n int) ([]byte, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != n || hex.EncodeToString(b) != s {
		return nil, fmt.Errorf("want %d lower-case hexadecimal digits", 2*n)
	}
	return b, nil
}

// Attester makes evidence of one purpose. Implementations are safe for concurrent use.
type Attester interface {
	// Formats lists what it can make, best first; empty for one that does not attest.
	Formats() []attestv1.Format
	// Attest makes evidence over the statement of its own purpose and b. The event log
	// is included only if asked for.
	Attest(ctx context.Context, f attestv1.Format, b Binding) (*attestv1.Evidence, error)
	// Respond answers a challenge with the MAC of [attestv1.Response]. It never gives out
	// the secret, so it is worth nothing for another binding.
	Respond(ctx context.Context, c *attestv1.Challenge, b Binding) ([]byte, error)
}

// Verifier answers whether evidence is genuine. Implementations are safe for concurrent
// use; every error is a [Refusal].
type Verifier interface {
	// Formats lists what it can verify, best first.
	Formats() []attestv1.Format
	// Verify checks evidence over s. b is the session's binding, which the answer to a
	// challenge is computed over.
	Verify(ctx context.Context, ev *attestv1.Evidence, s Statement, b Binding) (Pending, error)
}

// Pending is evidence whose quote checked out, but whose AK may still have to be shown
// to belong to its EK.
type Pending interface {
	// Challenge is nil if nothing is left to show.
	Challenge() *attestv1.Challenge
	// Complete takes the response, nil if there was no challenge, and gives the claims.
	Complete(r *attestv1.Response) (Claims, error)
}

// Appraiser answers whether claims are acceptable. Every error is a [Refusal].
// Implementations are safe for concurrent use.
type Appraiser interface {
	Appraise(ctx context.Context, c Claims) (Appraisal, error)
}

// Appraisal says by what a peer was accepted.
type Appraisal struct {
	// PolicySerial is the owner's serial of the policy that accepted it; 0 if it was not
	// a policy.
	PolicySerial uint64
	// Generation is the Kubernetes generation of the AttestationPolicy; 0 outside a
	// cluster.
	Generation int64
	// Image and Class are the names of what it booted and of its firmware, as the policy has them; empty if it was not a policy,
	// or if the policy accepts any firmware.
	Image, Class string
}

// ErrNoPeer says that a context comes from no attested connection.
var ErrNoPeer = errors.New("the caller is not attested")
