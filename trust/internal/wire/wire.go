// Package wire parses what a TPM has marshaled and signed (TPM 2.0 Library, Part 2), without
// trusting it: it has the reader of structures, and the check of signatures.
package wire

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math/big"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/refusal"
)

// Generated is TPM_GENERATED_VALUE, with which every structure begins that the TPM itself made and
// signed (Part 2, 6.2).
const Generated = 0xFF544347

// Algorithms of signatures (Part 2, 6.3).
const (
	algSHA256 = 0x000B
	algRSASSA = 0x0014
	algECDSA  = 0x0018
)

// Reader parses marshaled TPM structures: big-endian integers, and buffers with a length of two
// bytes before them. After the first read past the end every read returns zero, and Done returns
// false.
type Reader struct {
	b      []byte
	failed bool
}

// NewReader returns a Reader of b.
func NewReader(b []byte) *Reader { return &Reader{b: b} }

// Take reads n bytes.
func (r *Reader) Take(n int) []byte {
	if r.failed || n > len(r.b) {
		r.failed = true
		return make([]byte, min(n, 8))
	}
	out := r.b[:n:n]
	r.b = r.b[n:]
	return out
}

// U8 reads a byte.
func (r *Reader) U8() uint8 { return r.Take(1)[0] }

// U16 reads a UINT16.
func (r *Reader) U16() uint16 { return binary.BigEndian.Uint16(r.Take(2)) }

// U32 reads a UINT32.
func (r *Reader) U32() uint32 { return binary.BigEndian.Uint32(r.Take(4)) }

// U64 reads a UINT64.
func (r *Reader) U64() uint64 { return binary.BigEndian.Uint64(r.Take(8)) }

// Sized reads a TPM2B.
func (r *Reader) Sized() []byte {
	n := int(r.U16())
	if r.failed || n > len(r.b) {
		r.failed = true
		return nil
	}
	return r.Take(n)
}

// Failed reports whether a read went past the end.
func (r *Reader) Failed() bool { return r.failed }

// Done reports whether all bytes were read and no read went past the end.
func (r *Reader) Done() bool { return !r.failed && len(r.b) == 0 }

// VerifySignature checks a TPMT_SIGNATURE with SHA-256: ECDSA or RSASSA, as the key is. It refuses
// with SIGNATURE_INVALID, or EVIDENCE_MALFORMED if it is no such structure.
func VerifySignature(key crypto.PublicKey, message, signature []byte) error {
	const malformed, bad = attestv1.Reason_REASON_EVIDENCE_MALFORMED, attestv1.Reason_REASON_SIGNATURE_INVALID
	r := NewReader(signature)
	scheme, hash := r.U16(), r.U16()
	sum := sha256.Sum256(message)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if !r.failed && (scheme != algECDSA || hash != algSHA256) {
			return refusal.New(bad, "signature scheme 0x%04x with hash 0x%04x, want ECDSA with SHA-256", scheme, hash)
		}
		rr, ss := r.Sized(), r.Sized()
		if !r.Done() {
			return refusal.New(malformed, "TPMT_SIGNATURE is malformed")
		}
		size := (k.Curve.Params().BitSize + 7) / 8
		if len(rr) > size || len(ss) > size || !ecdsa.Verify(k, sum[:], new(big.Int).SetBytes(rr), new(big.Int).SetBytes(ss)) {
			return refusal.New(bad, "the signature does not verify")
		}
		return nil
	case *rsa.PublicKey:
		if !r.failed && (scheme != algRSASSA || hash != algSHA256) {
			return refusal.New(bad, "signature scheme 0x%04x with hash 0x%04x, want RSASSA with SHA-256", scheme, hash)
		}
		sig := r.Sized()
		if !r.Done() {
			return refusal.New(malformed, "TPMT_SIGNATURE is malformed")
		}
		if err := rsa.VerifyPKCS1v15(k, crypto.SHA256, sum[:], sig); err != nil {
			return refusal.New(bad, "the signature does not verify")
		}
		return nil
	}
	return refusal.New(bad, "%w", errors.New("no key to check the signature with"))
}
