package endorsement

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
)

// KeyKind is a kind of endorsement key.
type KeyKind string

// The kinds that evidence may have.
const (
	P256    KeyKind = "ecc-p256"
	P384    KeyKind = "ecc-p384"
	RSA2048 KeyKind = "rsa-2048"
)

// KeyKinds lists the kinds, as policies write them.
var KeyKinds = []KeyKind{P256, P384, RSA2048}

// KindOf returns the kind of a key; empty if its kind is unknown.
func KindOf(key crypto.PublicKey) KeyKind {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return P256
		case elliptic.P384():
			return P384
		}
	case *rsa.PublicKey:
		if k.N.BitLen() == 2048 {
			return RSA2048
		}
	}
	return ""
}
