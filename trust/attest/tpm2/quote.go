package tpm2

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"fmt"
	"math"
	"math/big"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
	"github.com/muster-k8s/muster/trust/internal/wire"
	"github.com/muster-k8s/muster/trust/tpm"
)

// maxStructure is the limit of attest.proto for TPMT_PUBLIC, TPMS_ATTEST and TPMT_SIGNATURE, in bytes.
const maxStructure = 1 << 10

// refuse shortens the calls, so that they read as a list of checks.
func refuse(r attestv1.Reason, format string, args ...any) error {
	return attest.Refuse(r, format, args...)
}

const (
	malformed  = attestv1.Reason_REASON_EVIDENCE_MALFORMED
	badSig     = attestv1.Reason_REASON_SIGNATURE_INVALID
	badAK      = attestv1.Reason_REASON_AK_TEMPLATE
	badBinding = attestv1.Reason_REASON_BINDING_MISMATCH
	badEK      = attestv1.Reason_REASON_EK_UNTRUSTED
)

// checkSizes enforces the limits before anything is parsed. Those of the endorsement are its own.
func checkSizes(e *attestv1.Tpm2Evidence) error {
	for name, b := range map[string][]byte{"ak_public": e.GetAkPublic(), "attest": e.GetAttest(), "signature": e.GetSignature()} {
		if len(b) > maxStructure {
			return refuse(malformed, "%s has %d bytes, more than %d", name, len(b), maxStructure)
		}
	}
	if e.GetBank() > math.MaxUint16 || tpm.Bank(e.GetBank()).Size() == 0 {
		return refuse(malformed, "unknown bank 0x%04x", e.GetBank())
	}
	if n := len(e.GetPcrs()); n != tpm.PCRCount {
		return refuse(malformed, "%d PCR values, want %d", n, tpm.PCRCount)
	}
	for i, v := range e.GetPcrs() {
		if len(v) != tpm.Bank(e.GetBank()).Size() {
			return refuse(malformed, "PCR %d has %d bytes in %s", i, len(v), tpm.Bank(e.GetBank()))
		}
	}
	if e.GetLeafIndex() >= maxLeaves || len(e.GetPath()) > maxPath {
		return refuse(malformed, "leaf %d with a path of %d hashes: no such tree", e.GetLeafIndex(), len(e.GetPath()))
	}
	for _, h := range e.GetPath() {
		if len(h) != sha256.Size {
			return refuse(malformed, "a hash of %d bytes in the path", len(h))
		}
	}
	_, err := hwreport.KindOf(e.GetHardware())
	return err
}

// akPrefix is the marshaled template up to its unique part, by kind of key.
var (
	akPrefixECC = templatePrefix(tpm.AKTemplate(false), 4) // two empty TPM2Bs
	akPrefixRSA = templatePrefix(tpm.AKTemplate(true), 2)  // one
)

func templatePrefix(t gotpm.TPMTPublic, unique int) []byte {
	b := gotpm.Marshal(t)
	return b[:len(b)-unique]
}

// AttestationKey is a public key whose public area equals the template except for the key itself.
type AttestationKey struct {
	// Key is an *ecdsa.PublicKey on P-256 or an *rsa.PublicKey of 2048 bits.
	Key crypto.PublicKey
	// Name is the TPM's name of the key, computed here: nameAlg || H(public area)
	// (Part 1, section 16).
	Name []byte
}

func (ak AttestationKey) kind() attest.AKKind {
	if _, ok := ak.Key.(*ecdsa.PublicKey); ok {
		return attest.AKECC
	}
	return attest.AKRSA
}

// ParseAttestationKey reads a TPMT_PUBLIC and compares everything except the key itself with the
// template. The refusal is AK_TEMPLATE, or EVIDENCE_MALFORMED if it is not a public area.
func ParseAttestationKey(public []byte) (AttestationKey, error) {
	sum := sha256.Sum256(public)
	ak := AttestationKey{Name: append([]byte{0x00, 0x0B}, sum[:]...)}
	if rest, ok := bytes.CutPrefix(public, akPrefixECC); ok {
		r := wire.NewReader(rest)
		x, y := r.Sized(), r.Sized()
		if !r.Done() || len(x) > 32 || len(y) > 32 {
			return AttestationKey{}, refuse(malformed, "the AK's point is malformed")
		}
		point := make([]byte, 65)
		point[0] = 4
		copy(point[33-len(x):33], x)
		copy(point[65-len(y):], y)
		key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point)
		if err != nil {
			return AttestationKey{}, refuse(malformed, "the AK: %w", err)
		}
		ak.Key = key
		return ak, nil
	}
	if rest, ok := bytes.CutPrefix(public, akPrefixRSA); ok {
		r := wire.NewReader(rest)
		n := new(big.Int).SetBytes(r.Sized())
		if !r.Done() || n.BitLen() != 2048 || n.Bit(0) == 0 {
			return AttestationKey{}, refuse(malformed, "the AK's modulus is malformed")
		}
		ak.Key = &rsa.PublicKey{N: n, E: 65537} // the template's exponent 0 means 65537
		return ak, nil
	}
	t, err := gotpm.Unmarshal[gotpm.TPMTPublic](public)
	if err != nil || !bytes.Equal(gotpm.Marshal(t), public) {
		return AttestationKey{}, refuse(malformed, "ak_public is no TPMT_PUBLIC")
	}
	return AttestationKey{}, refuse(badAK, "the AK's public area differs from the template: %s", describe(t))
}

// describe names the first difference from the template, for our own log.
func describe(t *gotpm.TPMTPublic) string {
	want := tpm.AKTemplate(t.Type == gotpm.TPMAlgRSA)
	switch {
	case t.Type != want.Type || t.NameAlg != want.NameAlg:
		return fmt.Sprintf("type 0x%04x with name algorithm 0x%04x", uint16(t.Type), uint16(t.NameAlg))
	case t.ObjectAttributes != want.ObjectAttributes:
		return fmt.Sprintf("attributes %+v", t.ObjectAttributes)
	case !bytes.Equal(t.AuthPolicy.Buffer, want.AuthPolicy.Buffer):
		return fmt.Sprintf("authPolicy %x: is it another agent's key?", t.AuthPolicy.Buffer)
	}
	return "algorithm parameters"
}

// Quoted is the content of a quote whose signature was checked.
type Quoted struct {
	// Clock, ResetCount, RestartCount and Safe are TPMS_CLOCK_INFO.
	Clock                    time.Duration
	ResetCount, RestartCount uint32
	Safe                     bool
	// FirmwareVersion is the firmware version of the TPM.
	FirmwareVersion uint64
	// PCRs are PCR 0 to 15. The signed digest is the digest of these values.
	PCRs [tpm.PCRCount][]byte
}

const (
	stAttestQuote = 0x8018 // TPM_ST_ATTEST_QUOTE, Part 2, 6.9
	rhEndorsement = "\x40\x00\x00\x0B"
	pcr0to15      = "\xFF\xFF\x00" // PCR 0 to 15 of 24
)

// VerifyQuote checks a quote by a primary key of the endorsement hierarchy: its signature, that it is
// a quote of exactly PCR 0 to 15 of the bank, extraData, and that the signed digest is that of the PCR
// values. It does not check that the key belongs to a TPM: [Verifier] does, and a quote alone proves
// nothing.
func VerifyQuote(ak AttestationKey, e *attestv1.Tpm2Evidence, extraData [32]byte) (*Quoted, error) {
	if err := wire.VerifySignature(ak.Key, e.GetAttest(), e.GetSignature()); err != nil {
		return nil, err
	}
	r := wire.NewReader(e.GetAttest())
	if magic, typ := r.U32(), r.U16(); magic != wire.Generated || typ != stAttestQuote {
		return nil, refuse(malformed, "magic 0x%08x, type 0x%04x: not a quote", magic, typ)
	}
	signer, extra := r.Sized(), r.Sized()
	q := &Quoted{}
	clock := r.U64()
	q.ResetCount, q.RestartCount = r.U32(), r.U32()
	safe := r.U8()
	q.FirmwareVersion = r.U64()
	selections := r.U32()
	hash, size := r.U16(), int(r.U8())
	selected := r.Take(size)
	pcrDigest := r.Sized()
	if !r.Done() || safe > 1 {
		return nil, refuse(malformed, "TPMS_ATTEST is malformed")
	}
	q.Safe = safe == 1
	q.Clock = time.Duration(min(clock, uint64(math.MaxInt64/time.Millisecond))) * time.Millisecond

	// The hierarchy is only in the qualified name. In another hierarchy than endorsement the TPM
	// would obfuscate the counters.
	qualified := sha256.Sum256(append([]byte(rhEndorsement), ak.Name...))
	if !bytes.Equal(signer, append([]byte{0x00, 0x0B}, qualified[:]...)) {
		return nil, refuse(badAK, "the signing key is no primary key of the endorsement hierarchy")
	}
	if !bytes.Equal(extra, extraData[:]) {
		return nil, refuse(badBinding, "the quote is over %x, want %x", extra, extraData)
	}
	if selections != 1 || uint32(hash) != e.GetBank() || string(selected) != pcr0to15 {
		return nil, refuse(malformed, "the quote selects %d banks, 0x%04x: %x; want PCR 0 to 15 of bank 0x%04x", selections, hash, selected, e.GetBank())
	}
	// Part 3, 18.4: the digest's hash is that of the signing scheme, SHA-256 for both templates,
	// for every bank.
	if sum := sha256.Sum256(bytes.Join(e.GetPcrs(), nil)); !bytes.Equal(sum[:], pcrDigest) {
		return nil, refuse(badSig, "the PCR values sent are not those that were signed")
	}
	for i, v := range e.GetPcrs() {
		q.PCRs[i] = bytes.Clone(v) // A2: no other PCR values leave this function
	}
	return q, nil
}
