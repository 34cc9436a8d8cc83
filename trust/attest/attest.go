// Package attest defines the types and interfaces of attestation, in the terms of RFC 9334 (RATS).
//
// Attestation has two separate steps. A [Verifier] decides whether evidence is genuine: it checks
// signatures and returns [Claims], which no other code can make (A2). An [Appraiser], usually a
// [Policy], decides whether claims are acceptable: it compares them with values that the owner
// signed. The context of a connection that passed both steps carries a [Peer]. A request body never
// identifies the caller (J1).
//
// This package accepts nothing by default (A3): a policy without rules accepts no machine, an
// expectation without a lock state accepts no machine, and no constructor treats nil as "do not
// check".
package attest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// Purpose is the purpose of a quote (A5). The process that owns the TPM sets it according to the
// socket that a request came from, never according to the request's content.
type Purpose string

// The purposes of muster-atls/1.
const (
	// PurposeMachine is for the machine itself: init, join and re-attestation.
	PurposeMachine Purpose = "machine"
	// PurposeJoinservice is for the joinservice that runs on the machine.
	PurposeJoinservice Purpose = "joinservice"
	// PurposeKMS is for the key service that runs on the machine.
	PurposeKMS Purpose = "kms"
	// PurposePublic is for GetEvidence; no session accepts it.
	PurposePublic Purpose = "public"
	// PurposeOrder is for the answer to an order of the owner; no session accepts it.
	PurposeOrder Purpose = "order"
)

// Binding ties evidence to one end of one TLS session; see docs/attested-tls.md. For the purpose
// public it is the caller's nonce, for the purpose order a hash of the order.
type Binding [32]byte

// Statement is the value that a quote signs: a binding with its purpose.
type Statement [32]byte

// NewStatement returns SHA-256("muster-atls/1 statement" || 0x00 || uint8(len(purpose))
// || purpose || binding).
func NewStatement(p Purpose, b Binding) Statement {
	h := sha256.New()
	h.Write([]byte("muster-atls/1 statement\x00"))
	h.Write([]byte{uint8(len(p))})
	h.Write([]byte(p))
	h.Write(b[:])
	return Statement(h.Sum(nil))
}

// MachineID identifies a machine: SHA-256 of its endorsement key's SubjectPublicKeyInfo in DER (RFC
// 5280, section 4.1.2.7).
type MachineID [sha256.Size]byte

// MachineIDOf returns the ID of the machine with that endorsement key.
func MachineIDOf(ekSPKI []byte) MachineID { return sha256.Sum256(ekSPKI) }

// String returns 64 lower-case hexadecimal digits.
func (m MachineID) String() string { return hex.EncodeToString(m[:]) }

// ParseMachineID reads 64 lower-case hexadecimal digits.
func ParseMachineID(s string) (MachineID, error) {
	b, err := parseHex(s, sha256.Size)
	if err != nil {
		return MachineID{}, fmt.Errorf("machine ID %q: %w", s, err)
	}
	return MachineID(b), nil
}

// MarshalText is [MachineID.String].
func (m MachineID) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText is [ParseMachineID].
func (m *MachineID) UnmarshalText(b []byte) (err error) {
	*m, err = ParseMachineID(string(b))
	return err
}

// parseHex reads exactly n bytes in lower-case hexadecimal digits, so one value has one spelling.
func parseHex(s string, n int) ([]byte, error) {
	return endorsement.ParseHex(s, n)
}

// Attester makes evidence of one purpose. Implementations are safe for concurrent use.
type Attester interface {
	// Formats lists the formats that it can make, best first; empty if it does not attest.
	Formats() []attestv1.Format
	// Attest makes evidence over the statement of its own purpose and b. The event log is included
	// if the machine has one.
	Attest(ctx context.Context, f attestv1.Format, b Binding) (*attestv1.Evidence, error)
	// Respond answers a challenge with the MAC of [attestv1.Response]. It never returns the secret,
	// so the answer is useless for another binding.
	Respond(ctx context.Context, c *attestv1.Challenge, b Binding) ([]byte, error)
}

// Verifier decides whether evidence is genuine. Implementations are safe for concurrent use. Every
// error is a [Refusal].
type Verifier interface {
	// Formats lists the formats that it can verify, best first.
	Formats() []attestv1.Format
	// Verify checks evidence over s. b is the session's binding, from which the answer to a
	// challenge is computed.
	Verify(ctx context.Context, ev *attestv1.Evidence, s Statement, b Binding) (Pending, error)
}

// Pending is evidence whose quote is valid, but which may still have to prove that its AK and its
// EK are in one TPM.
type Pending interface {
	// Challenge returns the challenge, or nil if nothing is left to prove.
	Challenge() *attestv1.Challenge
	// Complete takes the response, nil if there was no challenge, and returns the claims.
	Complete(r *attestv1.Response) (Claims, error)
}

// Appraiser decides whether claims are acceptable. Every error is a [Refusal]. Implementations are
// safe for concurrent use.
type Appraiser interface {
	Appraise(ctx context.Context, c Claims) (Appraisal, error)
}

// Appraisal describes the rules that accepted a peer.
type Appraisal struct {
	// PolicySerial is the owner's serial of the policy that accepted it; 0 if no policy did.
	PolicySerial uint64
	// Generation is the Kubernetes generation of the AttestationPolicy; 0 outside a cluster.
	Generation int64
	// Image and Class are the policy's names of the booted image and of the firmware; empty if no
	// policy accepted the peer, or if the policy accepts any firmware.
	Image, Class string
	// Hardware describes the hardware report that was accepted; empty if there was none, or if the
	// policy has no rules for its kind.
	Hardware string
}

// ErrNoPeer means that a context comes from no attested connection.
var ErrNoPeer = errors.New("the caller is not attested")
