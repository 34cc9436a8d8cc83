package attest

import "github.com/muster-k8s/muster/trust/internal/endorsement"

// EKKind is a kind of endorsement key. A TPM has one key of each kind that it supports, and the
// machine ID is that of one of them, so a policy lists the kind for each root (A8).
type EKKind = endorsement.KeyKind

// Two of the kinds that evidence may have.
const (
	EKP256    = endorsement.P256
	EKRSA2048 = endorsement.RSA2048
)

// AKKind is the kind of an attestation key.
type AKKind string

// The kinds of the two templates.
const (
	AKECC AKKind = "ecc-p256"
	AKRSA AKKind = "rsa-2048"
)
