package attest

import (
	"crypto"

	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// EKKind is a kind of endorsement key. A TPM has one key of each kind that it supports, and the
// machine ID is that of one of them, so a policy lists the kind for each root (A8).
type EKKind = endorsement.KeyKind

// The kinds that evidence may have.
const (
	EKP256    = endorsement.P256
	EKP384    = endorsement.P384
	EKRSA2048 = endorsement.RSA2048
)

// EKKinds lists the kinds, as policies write them.
var EKKinds = endorsement.KeyKinds

// EKKindOf returns the kind of an endorsement key; empty if its kind is unknown.
func EKKindOf(key crypto.PublicKey) EKKind { return endorsement.KindOf(key) }

// AKKind is the kind of an attestation key.
type AKKind string

// The kinds of the two templates.
const (
	AKECC AKKind = "ecc-p256"
	AKRSA AKKind = "rsa-2048"
)
