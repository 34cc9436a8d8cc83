package attest

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"slices"
)

// MaxOwnerKeys bounds the owner's keys of an image or a service: a signature is compared with each.
const MaxOwnerKeys = 4

// OwnerKeys are the Ed25519 public keys (RFC 8032) of one owner. A signature of any of them is the owner's, so that one key can replace another without a
// moment in which machines accept none. Serials and times of what they sign form one sequence: a key can't bring back what another one has replaced (B7,
// B11). The zero value verifies nothing (A3).
type OwnerKeys []ed25519.PublicKey

// ParseOwnerKeys reads 1 to [MaxOwnerKeys] different keys, each of 32 bytes in base64.
func ParseOwnerKeys(list []string) (OwnerKeys, error) {
	if len(list) == 0 || len(list) > MaxOwnerKeys {
		return nil, fmt.Errorf("want 1 to %d keys, not %d", MaxOwnerKeys, len(list))
	}
	var out OwnerKeys
	for i, s := range list {
		key, err := base64.StdEncoding.Strict().DecodeString(s)
		switch {
		case err != nil || len(key) != ed25519.PublicKeySize:
			return nil, fmt.Errorf("key %d: want the base64 form of an Ed25519 public key of %d bytes", i+1, ed25519.PublicKeySize)
		case out.Has(key):
			return nil, fmt.Errorf("key %d: %s is listed twice", i+1, s)
		}
		out = append(out, key)
	}
	return out, nil
}

// Has reports whether key is one of the keys.
func (k OwnerKeys) Has(key []byte) bool {
	return slices.ContainsFunc(k, func(own ed25519.PublicKey) bool { return bytes.Equal(own, key) })
}

// Signer returns the key whose signature of message it is; nil if it is of none of the keys.
func (k OwnerKeys) Signer(message, signature []byte) ed25519.PublicKey {
	for _, key := range k {
		if len(key) == ed25519.PublicKeySize && ed25519.Verify(key, message, signature) {
			return key
		}
	}
	return nil
}

// Verify reports whether the signature of message is the owner's.
func (k OwnerKeys) Verify(message, signature []byte) bool { return k.Signer(message, signature) != nil }

// Strings returns the keys in base64, as [ParseOwnerKeys] reads them.
func (k OwnerKeys) Strings() []string {
	out := make([]string, len(k))
	for i, key := range k {
		out[i] = base64.StdEncoding.EncodeToString(key)
	}
	return out
}
