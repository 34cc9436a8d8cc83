package nitrotpm

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/muster-k8s/muster/trust/tpm"
)

// Limits of documents.
const (
	maxTime      = 1 << 48 // milliseconds since 1970: the year 10889
	signatureLen = 96      // bytes: r and s of ES384
)

// The headers of a document. NitroTPM sends exactly these bytes, so no other algorithm and no header
// can be selected (RFC 9053, section 2.1).
var (
	protectedHeader   = []byte{0xA1, 0x01, 0x38, 0x22} // {alg: ES384}
	unprotectedHeader = []byte{0xA0}                   // {}
)

// decoder returns the decoder of one layer. Definite lengths are what NitroTPM sends for the outer
// one; its payload is a map of indefinite length. Both are in memory, and at most [maxDocument] bytes
// long, before they are parsed.
func decoder(lengths cbor.IndefLengthMode) cbor.DecMode {
	mode, err := cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       lengths,
		TagsMd:            cbor.TagsForbidden,
		MaxNestedLevels:   4,
		MaxArrayElements:  16,
		MaxMapPairs:       64,
		FieldNameMatching: cbor.FieldNameMatchingCaseSensitive,
	}.DecMode()
	if err != nil {
		panic(err) // of the constant options above
	}
	return mode
}

var outerLayer, innerLayer = decoder(cbor.IndefLengthForbidden), decoder(cbor.IndefLengthAllowed)

// signed is COSE_Sign1 (RFC 9052, section 4.2). A [cbor.ByteString] accepts no array of numbers.
type signed struct {
	_           struct{} `cbor:",toarray"`
	Protected   cbor.ByteString
	Unprotected cbor.RawMessage
	Payload     cbor.ByteString
	Signature   cbor.ByteString
}

// document is the content that AWS has signed ("Validate a NitroTPM Attestation Document" in AWS's
// EC2 user guide). Fields that AWS may add are ignored. Optional fields that are null are empty.
type document struct {
	Module      string                     `cbor:"module_id"`
	Digest      string                     `cbor:"digest"`
	Timestamp   uint64                     `cbor:"timestamp"` // milliseconds since 1970
	PCRs        map[uint64]cbor.ByteString `cbor:"nitrotpm_pcrs"`
	EnclavePCRs cbor.RawMessage            `cbor:"pcrs"` // only of a Nitro Enclave
	Certificate cbor.ByteString            `cbor:"certificate"`
	Bundle      []cbor.ByteString          `cbor:"cabundle"` // from the root to the issuer
	PublicKey   cbor.ByteString            `cbor:"public_key"`
	UserData    cbor.ByteString            `cbor:"user_data"`
	Nonce       cbor.ByteString            `cbor:"nonce"`
}

// parse reads a document and checks its headers. Nothing of it is authentic before verifySignature.
func parse(raw []byte) (*signed, *document, error) {
	s, d := &signed{}, &document{}
	if err := outerLayer.Unmarshal(raw, s); err != nil {
		return nil, nil, fmt.Errorf("it is no COSE_Sign1 structure: %w", err)
	}
	if string(s.Protected) != string(protectedHeader) || !bytes.Equal(s.Unprotected, unprotectedHeader) {
		return nil, nil, fmt.Errorf("its headers are %x and %x, want ES384 alone: %x and %x", string(s.Protected), []byte(s.Unprotected), protectedHeader, unprotectedHeader)
	}
	if len(s.Signature) != signatureLen {
		return nil, nil, fmt.Errorf("its signature has %d bytes, want %d", len(s.Signature), signatureLen)
	}
	if err := innerLayer.Unmarshal([]byte(s.Payload), d); err != nil {
		return nil, nil, fmt.Errorf("its payload is malformed: %w", err)
	}
	if d.Timestamp > maxTime {
		return nil, nil, fmt.Errorf("its time, %d ms since 1970, is out of range", d.Timestamp)
	}
	return s, d, nil
}

func (d *document) at() time.Time { return time.UnixMilli(int64(d.Timestamp)) }

// certificates returns the document's certificate and its issuers, without the root: AWS sends that,
// too, as the first of the bundle, and the verifier has its own.
func (d *document) certificates() [][]byte {
	out := [][]byte{[]byte(d.Certificate)}
	for i := len(d.Bundle) - 1; i > 0; i-- {
		out = append(out, []byte(d.Bundle[i]))
	}
	return out
}

// verifySignature checks the signature by a key on P-384 (RFC 9052, section 4.4, Sig_structure).
func (s *signed) verifySignature(key *ecdsa.PublicKey) bool {
	message, err := cbor.Marshal([]any{"Signature1", []byte(s.Protected), []byte{}, []byte(s.Payload)})
	if err != nil {
		return false
	}
	sum := sha512.Sum384(message)
	r, t := new(big.Int).SetBytes([]byte(s.Signature[:signatureLen/2])), new(big.Int).SetBytes([]byte(s.Signature[signatureLen/2:]))
	return ecdsa.Verify(key, sum[:], r, t)
}

// samePCRs compares the values of PCR 0 to 15, of the bank SHA-384. Others are not appraised.
func (d *document) samePCRs(quoted [][]byte) error {
	for i := range tpm.PCRCount {
		v, ok := d.PCRs[uint64(i)]
		if !ok || i >= len(quoted) || string(v) != string(quoted[i]) {
			return fmt.Errorf("PCR %d is %x in the document", i, string(v))
		}
	}
	return nil
}

// moduleID is that of a NitroTPM: the instance's ID, and the number of its TPM. Enclaves have "enc".
var moduleID = regexp.MustCompile(`^(i-[0-9a-f]{8,32})-tpm[0-9a-f]{16}$`)

// instanceOf returns the ID of the instance in a module ID.
func instanceOf(module string) (string, error) {
	m := moduleID.FindStringSubmatch(module)
	if m == nil {
		return "", fmt.Errorf("its module %q is no NitroTPM", module)
	}
	return m[1], nil
}

// Module returns the module ID in a document, unverified: for a machine that asks its own TPM.
func Module(raw []byte) (string, error) {
	if len(raw) > maxDocument {
		return "", errors.New("the document is too long")
	}
	_, d, err := parse(raw)
	if err != nil {
		return "", err
	}
	_, err = instanceOf(d.Module)
	return d.Module, err
}

// MachineID returns SHA-256("muster nitro tpm" || 0x00 || module ID). The attestation key is no part of
// it: software on the instance chooses which key a document names, and would be another machine with
// each (A8).
func MachineID(module string) [32]byte {
	return sha256.Sum256([]byte("muster nitro tpm\x00" + module))
}
