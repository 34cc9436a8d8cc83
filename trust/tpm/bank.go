package tpm

import (
	"crypto"
	_ "crypto/sha256" // links a bank's hash
	_ "crypto/sha512"
	"fmt"

	gotpm "github.com/google/go-tpm/tpm2"
)

// Bank is a TPM_ALG_ID: the hash algorithm of a bank of PCRs. Only SHA-256 and stronger algorithms
// exist here; a SHA-1 bank is never accepted.
type Bank uint16

// The banks (TCG Algorithm Registry, section 6.2).
const (
	SHA256 = Bank(gotpm.TPMAlgSHA256) // 0x000B
	SHA384 = Bank(gotpm.TPMAlgSHA384) // 0x000C
	SHA512 = Bank(gotpm.TPMAlgSHA512) // 0x000D
)

// ParseBank reads "sha256", "sha384" or "sha512".
func ParseBank(name string) (Bank, error) {
	for _, b := range []Bank{SHA256, SHA384, SHA512} {
		if b.String() == name {
			return b, nil
		}
	}
	return 0, fmt.Errorf("unknown bank %q: use sha256, sha384 or sha512", name)
}

// String returns the name that [ParseBank] reads.
func (b Bank) String() string {
	switch b {
	case SHA256:
		return "sha256"
	case SHA384:
		return "sha384"
	case SHA512:
		return "sha512"
	}
	return fmt.Sprintf("bank 0x%04x", uint16(b))
}

// Hash returns the bank's hash function, or false if b is not a known bank.
func (b Bank) Hash() (crypto.Hash, bool) {
	switch b {
	case SHA256:
		return crypto.SHA256, true
	case SHA384:
		return crypto.SHA384, true
	case SHA512:
		return crypto.SHA512, true
	}
	return 0, false
}

// Size returns the length of a PCR in bytes, 0 if b is not a known bank.
func (b Bank) Size() int {
	if h, ok := b.Hash(); ok {
		return h.Size()
	}
	return 0
}

// Extended returns the new value of a PCR of bank b, whose current value is value, after an
// extension by digest: H(value || digest) (Part 1, 17.2).
func (b Bank) Extended(value, digest []byte) []byte {
	h, ok := b.Hash()
	if !ok {
		panic("tpm: Extended: " + b.String()) // a Bank is checked where it is parsed
	}
	d := h.New()
	d.Write(value)
	d.Write(digest)
	return d.Sum(nil)
}
