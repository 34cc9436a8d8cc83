package tpm

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"slices"

	gotpm "github.com/google/go-tpm/tpm2"
)

const (
	maxCertificate  = 8 << 10 // bytes of one certificate
	maxChain        = 4       // certificates that are sent, the endorsement key's included: verifiers accept no more
	maxStored       = 8       // certificates that are read from the TPM
	nvBuffer        = 512     // bytes per TPM2_NV_Read: every PC Client TPM permits as much
	nvChainFirst    = gotpm.TPMHandle(0x01C00100)
	nvChainLast     = gotpm.TPMHandle(0x01C001FF)
	nvEndorsement   = gotpm.TPMHandle(0x01C00000)
	nvEndorsementTo = gotpm.TPMHandle(0x01C07FFF)
)

// ekSlots are the NV indices where the TCG EK Credential Profile stores certificates (2.2.1.4,
// 2.2.1.5), in Muster's order of preference: ECC first. The order is fixed because one TPM must not
// be two machines; a verifier learns the kind from the certificate alone.
var ekSlots = []struct {
	index, nonce gotpm.TPMHandle
	kind         ekKind
	high         bool
}{
	{0x01C0000A, 0x01C0000B, kindP256, false},    // L-2
	{0x01C00014, 0, kindP256, true},              // H-2
	{0x01C00016, 0, kindP384, true},              // H-3
	{0x01C00002, 0x01C00003, kindRSA2048, false}, // L-1
	{0x01C00012, 0, kindRSA2048, true},           // H-1
}

// knownEK caches the endorsement key, since certificates and seeds do not change during the life of
// a process, and reading NV takes tens of commands.
type knownEK struct {
	EK
	id       keyID
	template gotpm.TPMTPublic
	high     bool
}

// EndorsementKey implements [Device]. Errors wrap [ErrNoCertificate] or
// [ErrCertificateMismatch] where they apply.
func (t *TPM) EndorsementKey(ctx context.Context) (EK, error) {
	if err := ctx.Err(); err != nil {
		return EK{}, fmt.Errorf("tpm: endorsement key: %w", err)
	}
	t.mu.Lock()
	known := t.ek
	t.mu.Unlock()
	if known == nil {
		err := t.sequence(ctx, "endorsement key", func(c *conn) (err error) {
			known, _, err = c.endorsementKey()
			return err
		})
		if err != nil {
			return EK{}, err
		}
	}
	return EK{Certificates: cloneAll(known.Certificates), Public: bytes.Clone(known.Public)}, nil
}

// endorsementKey finds the endorsement key and loads it.
func (c *conn) endorsementKey() (*knownEK, *object, error) {
	c.owner.mu.Lock()
	known := c.owner.ek
	c.owner.mu.Unlock()
	if known != nil {
		o, err := c.primary(known.id, known.template)
		if err != nil {
			return nil, nil, err
		}
		// The saved context or the seed may be another one by now; the certificate decides.
		if !bytes.Equal(gotpm.Marshal(o.public), known.Public) {
			return nil, nil, ErrCertificateMismatch
		}
		return known, o, nil
	}
	indices, err := c.handles(nvEndorsement, 64)
	if err != nil {
		return nil, nil, err
	}
	for _, slot := range ekSlots {
		if !slices.Contains(indices, slot.index) {
			continue
		}
		known, o, err := c.tryEK(slot.index, slot.nonce, slot.kind, slot.high, indices)
		if err != nil {
			return nil, nil, fmt.Errorf("certificate in NV index 0x%08x: %w", uint32(slot.index), err)
		}
		c.owner.mu.Lock()
		c.owner.ek = known
		c.owner.mu.Unlock()
		return known, o, nil
	}
	return c.bareEK()
}

// bareEK makes the endorsement key of a TPM that stores no certificate of one. It has a single
// template, so that one TPM is one machine (A8).
func (c *conn) bareEK() (*knownEK, *object, error) {
	curves, err := c.curves()
	if err != nil {
		return nil, nil, err
	}
	if !slices.Contains(curves, gotpm.TPMECCNistP256) {
		return nil, nil, fmt.Errorf("%w, and has no keys on P-256", ErrNoCertificate)
	}
	known := &knownEK{id: "EK without a certificate", template: kindP256.template(false, kindP256.unique(false))}
	o, err := c.primary(known.id, known.template)
	if err != nil {
		return nil, nil, err
	}
	known.Public = gotpm.Marshal(o.public)
	c.owner.mu.Lock()
	c.owner.ek = known
	c.owner.mu.Unlock()
	return known, o, nil
}

// tryEK reads a certificate and makes its key.
func (c *conn) tryEK(index, nonce gotpm.TPMHandle, kind ekKind, high bool, indices []gotpm.TPMHandle) (*knownEK, *object, error) {
	data, err := c.readNV(index, maxCertificate)
	if err != nil {
		return nil, nil, err
	}
	certs, err := splitCertificates(data)
	if err != nil {
		return nil, nil, err
	}
	if len(certs) == 0 {
		return nil, nil, fmt.Errorf("no certificate: %w", ErrNoCertificate)
	}
	leaf := certs[0]
	want, ok := leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	if !ok {
		return nil, nil, fmt.Errorf("%w: %s", ErrEKKind, leaf.PublicKeyAlgorithm)
	}
	uniques := []gotpm.TPMUPublicID{kind.unique(high), kind.unique(!high)}
	if nonce != 0 && slices.Contains(indices, nonce) {
		data, err := c.readNV(nonce, 512)
		if err != nil {
			return nil, nil, err
		}
		uniques = slices.Insert(uniques, 0, kind.uniqueFromNonce(data))
	}
	for i, unique := range uniques {
		known := &knownEK{
			id:       keyID(fmt.Sprintf("EK 0x%08x/%d", uint32(index), i)),
			template: kind.template(high, unique),
			high:     high,
		}
		o, err := c.primary(known.id, known.template)
		if err != nil {
			return nil, nil, err
		}
		public, err := gotpm.Pub(o.public)
		if err == nil && want.Equal(public) {
			known.Public = gotpm.Marshal(o.public)
			known.Certificates, err = c.chain(leaf, indices)
			return known, o, err
		}
		if err := c.flush(); err != nil { // make room for the next template
			return nil, nil, err
		}
	}
	return nil, nil, ErrCertificateMismatch
}

// uniqueFromNonce puts the TPM vendor's EK nonce into the template's unique part, as the profile
// requires if a nonce index exists (B.2).
func (k ekKind) uniqueFromNonce(nonce []byte) gotpm.TPMUPublicID {
	if k.rsaBits != 0 {
		b := make([]byte, k.rsaBits/8)
		copy(b, nonce)
		return gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{Buffer: b})
	}
	x := make([]byte, 32)
	copy(x, nonce)
	return gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, &gotpm.TPMSECCPoint{
		X: gotpm.TPM2BECCParameter{Buffer: x},
		Y: gotpm.TPM2BECCParameter{Buffer: make([]byte, 32)},
	})
}

// chain returns leaf and the issuers that the TPM stores from 0x01C00100 on (EK Credential Profile,
// 2.2.1.5.2: certificates in DER, one after the other, across indices).
func (c *conn) chain(leaf *x509.Certificate, indices []gotpm.TPMHandle) ([][]byte, error) {
	var data []byte
	for _, index := range indices {
		if index < nvChainFirst || index > nvChainLast {
			continue
		}
		part, err := c.readNV(index, maxCertificate*maxStored-len(data))
		if err != nil {
			return nil, err
		}
		data = append(data, part...)
	}
	// Unparseable issuers do not prevent attestation: the verifier may have the issuers itself.
	issuers, _ := splitCertificates(data)
	out := [][]byte{leaf.Raw}
	for cert := leaf; len(out) < maxChain; {
		i := slices.IndexFunc(issuers, func(issuer *x509.Certificate) bool {
			return bytes.Equal(cert.RawIssuer, issuer.RawSubject) &&
				!bytes.Equal(issuer.RawIssuer, issuer.RawSubject) && cert.CheckSignatureFrom(issuer) == nil
		})
		if i < 0 {
			break
		}
		cert = issuers[i]
		issuers = slices.Delete(issuers, i, i+1)
		out = append(out, cert.Raw)
	}
	return out, nil
}

// splitCertificates parses concatenated certificates. NV indices are often larger than their
// content: the rest is padding, of 0x00 or 0xFF in an empty index, and of any byte but that with
// which a certificate begins behind one (0x11 was seen).
func splitCertificates(data []byte) ([]*x509.Certificate, error) {
	const sequence = 0x30
	var out []*x509.Certificate
	for len(data) > 0 && data[0] != 0x00 && data[0] != 0xFF && len(out) < maxStored {
		if len(out) > 0 && data[0] != sequence {
			break
		}
		var raw asn1.RawValue
		rest, err := asn1.Unmarshal(data, &raw)
		if err != nil {
			return out, fmt.Errorf("certificate is not DER: %w", err)
		}
		cert, err := x509.ParseCertificate(raw.FullBytes)
		if err != nil {
			return out, fmt.Errorf("certificate: %w", err)
		}
		out, data = append(out, cert), rest
	}
	return out, nil
}

// readNV reads an NV index of at most limit bytes, authorized by the index's own empty auth value,
// or else by the owner's.
func (c *conn) readNV(index gotpm.TPMHandle, limit int) ([]byte, error) {
	public, err := gotpm.NVReadPublic{NVIndex: index}.Execute(c.tpm)
	if err != nil {
		return nil, fmt.Errorf("read public area: %w", err)
	}
	info, err := public.NVPublic.Contents()
	if err != nil {
		return nil, fmt.Errorf("decode public area: %w", err)
	}
	size := int(info.DataSize)
	if size > limit {
		return nil, fmt.Errorf("holds %d bytes, more than %d", size, limit)
	}
	auth := gotpm.AuthHandle{Handle: index, Name: public.NVName, Auth: gotpm.PasswordAuth(nil)}
	if !info.Attributes.AuthRead && info.Attributes.OwnerRead {
		auth = gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)}
	}
	out := make([]byte, 0, size)
	for len(out) < size {
		rsp, err := gotpm.NVRead{
			AuthHandle: auth,
			NVIndex:    gotpm.NamedHandle{Handle: index, Name: public.NVName},
			Size:       uint16(min(nvBuffer, size-len(out))),
			Offset:     uint16(len(out)),
		}.Execute(c.tpm)
		if err != nil {
			return nil, fmt.Errorf("read: %w", err)
		}
		if len(rsp.Data.Buffer) == 0 {
			return nil, fmt.Errorf("read: no data at offset %d of %d", len(out), size)
		}
		out = append(out, rsp.Data.Buffer...)
	}
	return out, nil
}

func cloneAll(in [][]byte) [][]byte {
	out := make([][]byte, len(in))
	for i, b := range in {
		out[i] = bytes.Clone(b)
	}
	return out
}
