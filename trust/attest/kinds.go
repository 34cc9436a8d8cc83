package attest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
)

// EKKind is a kind of endorsement key. A TPM has one key of each kind that it supports, and the
// machine ID is that of one of them, so a policy lists the kind for each root (A8).
type EKKind string

// The kinds that evidence may have.
const (
	EKP256    EKKind = "ecc-p256"
	EKP384    EKKind = "ecc-p384"
	EKRSA2048 EKKind = "rsa-2048"
)

// anyEK is for roots that are not from a policy: see [NewSameBoot].
const anyEK EKKind = "any"

// EKKinds lists the kinds, as policies write them.
var EKKinds = []EKKind{EKP256, EKP384, EKRSA2048}

// EKKindOf returns the kind of an endorsement key; empty if its kind is unknown.
func EKKindOf(key crypto.PublicKey) EKKind {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return EKP256
		case elliptic.P384():
			return EKP384
		}
	case *rsa.PublicKey:
		if k.N.BitLen() == 2048 {
			return EKRSA2048
		}
	}
	return ""
}

// AKKind is the kind of an attestation key.
type AKKind string

// The kinds of the two templates.
const (
	AKECC AKKind = "ecc-p256"
	AKRSA AKKind = "rsa-2048"
)
