package attesttest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha512"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/muster-k8s/muster/trust/tpm"
)

// NitroModule is the module ID of a NitroTPM.
const NitroModule = "i-0123456789abcdef0-tpm0000000000000000"

// Nitro describes an AWS NitroTPM.
type Nitro struct {
	// CA issues the certificates of its documents; nil stands for the machine's.
	CA *CA
	// Module is its module ID; empty stands for [NitroModule].
	Module string
	// Curve is that of its key; nil stands for P-384.
	Curve elliptic.Curve
	// Certificate changes the document's certificate before it is signed.
	Certificate func(*x509.Certificate)
	// Payload changes a document's fields before they are encoded.
	Payload func(map[string]any)
	// Encoded changes the encoded fields before they are signed.
	Encoded func([]byte) []byte
	// Sign1 changes the elements of the signed structure: protected header, unprotected header,
	// payload, signature.
	Sign1 func([]any) []any
	// Document changes the finished document.
	Document func([]byte) []byte
}

// nitroTPM is the NitroTPM of a machine.
type nitroTPM struct {
	Nitro
	key   *ecdsa.PrivateKey
	chain [][]byte // certificate, issuers, root
}

func newNitroTPM(t testing.TB, ca *CA, n *Nitro) *nitroTPM {
	t.Helper()
	if n == nil {
		return nil
	}
	out := &nitroTPM{Nitro: *n}
	if out.CA == nil {
		out.CA = ca
	}
	if out.Module == "" {
		out.Module = NitroModule
	}
	if out.Curve == nil {
		out.Curve = elliptic.P384()
	}
	var err error
	if out.key, err = ecdsa.GenerateKey(out.Curve, rand.Reader); err != nil {
		t.Fatal(err)
	}
	out.chain = append(out.CA.IssueNitro(t, out.key.Public(), out.Module, out.Certificate), out.CA.Root().Raw)
	return out
}

// IssueNitro returns the certificate chain of a NitroTPM's documents, its own first and without the
// root. change may be nil.
func (ca *CA) IssueNitro(t testing.TB, public crypto.PublicKey, module string, change func(*x509.Certificate)) [][]byte {
	t.Helper()
	return ca.Issue(t, public, func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: module + ".region.aws", Organization: []string{"Amazon"}}
		c.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageContentCommitment
		c.UnknownExtKeyUsage, c.ExtraExtensions = nil, nil
		c.NotBefore, c.NotAfter = time.Now().Add(-3*time.Second), time.Now().Add(3*time.Hour)
		if change != nil {
			change(c)
		}
	})
}

// NitroDocument implements [tpm.Device].
func (m *Machine) NitroDocument(ctx context.Context, nonce [32]byte) ([]byte, error) {
	if m.nitro == nil {
		return nil, tpm.ErrNoNitroTPM
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	spki, err := x509.MarshalPKIXPublicKey(m.ak.Public())
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	pcrs := cloneAll(m.pcrs[tpm.SHA384])
	m.mu.Unlock()
	return m.nitro.document(pcrs, []byte(tpm.NitroUserData), nonce[:], spki)
}

// NitroDocument returns a document as a NitroTPM makes it for a request, of PCR values that are all zero.
func NitroDocument(t testing.TB, ca *CA, n Nitro, userData, nonce, publicKey []byte) []byte {
	t.Helper()
	b, err := newNitroTPM(t, ca, &n).document(make([][]byte, tpm.PCRCount), userData, nonce, publicKey)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (n *nitroTPM) document(pcrs [][]byte, userData, nonce, publicKey []byte) ([]byte, error) {
	values := map[uint64][]byte{}
	for i := range uint64(24) {
		values[i] = make([]byte, tpm.SHA384.Size())
		if i < uint64(len(pcrs)) && pcrs[i] != nil {
			values[i] = pcrs[i]
		}
	}
	bundle := slices.Clone(n.chain[1:])
	slices.Reverse(bundle)
	fields := map[string]any{
		"module_id": n.Module, "digest": "SHA384", "timestamp": uint64(time.Now().UnixMilli()), "nitrotpm_pcrs": values,
		"certificate": n.chain[0], "cabundle": bundle, "public_key": publicKey, "user_data": userData, "nonce": nonce,
	}
	if n.Payload != nil {
		n.Payload(fields)
	}
	payload, err := cbor.Marshal(fields)
	if err != nil {
		return nil, err
	}
	if n.Encoded != nil {
		payload = n.Encoded(payload)
	}
	protected := []byte{0xA1, 0x01, 0x38, 0x22} // {alg: ES384}
	message, err := cbor.Marshal([]any{"Signature1", protected, []byte{}, payload})
	if err != nil {
		return nil, err
	}
	sum := sha512.Sum384(message)
	r, s, err := ecdsa.Sign(rand.Reader, n.key, sum[:])
	if err != nil {
		return nil, err
	}
	size := (n.Curve.Params().BitSize + 7) / 8
	sign1 := []any{protected, map[int]any{}, payload, append(fill(r, size), fill(s, size)...)}
	if n.Sign1 != nil {
		sign1 = n.Sign1(sign1)
	}
	document, err := cbor.Marshal(sign1)
	if err != nil {
		return nil, fmt.Errorf("attesttest: %w", err)
	}
	if n.Document != nil {
		document = n.Document(document)
	}
	return document, nil
}

func fill(n *big.Int, size int) []byte { return n.FillBytes(make([]byte, size)) }
