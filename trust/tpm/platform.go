package tpm

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"

	gotpm "github.com/google/go-tpm/tpm2"
)

// ErrNoPlatformKey means that the TPM has no attestation key that a cloud has certified.
var ErrNoPlatformKey = errors.New("the TPM has no certified platform key")

// azureKey is the persistent handle of Azure's attestation key.
const azureKey = gotpm.TPMHandle(0x81000003)

// platformSlots are the NV indices of the platform keys' certificates, in Muster's order of preference:
// ECC first. The order is fixed because one TPM must not be two machines. With template, the key is made
// from the template in that index (Google: go-tpm-tools, client/handles.go); else it is at handle
// (Azure).
var platformSlots = []struct{ certificate, template, handle gotpm.TPMHandle }{
	{certificate: 0x01C10002, template: 0x01C10003}, // Google, ECC
	{certificate: 0x01C10000, template: 0x01C10001}, // Google, RSA
	{certificate: 0x01C101D0, handle: azureKey},
}

const nvPlatform = gotpm.TPMHandle(0x01C10000) // first index to read

// maxTemplate is the largest template, in bytes.
const maxTemplate = 1 << 10

// Certified is what a platform key has signed about the attestation key.
type Certified struct {
	// Attest is the TPMS_ATTEST of TPM2_Certify that was signed.
	Attest []byte
	// Signature is the TPMT_SIGNATURE over Attest.
	Signature []byte
}

// knownPlatform caches the platform key; certificates is nil if there is none.
type knownPlatform struct {
	certificates [][]byte
	id           keyID // of a key that is made from a template
	template     gotpm.TPMTPublic
	handle       gotpm.TPMHandle // of one that is not
}

// PlatformCertificates implements [Device].
func (t *TPM) PlatformCertificates(ctx context.Context) ([][]byte, error) {
	t.mu.Lock()
	known := t.platform
	t.mu.Unlock()
	if known == nil {
		if err := t.sequence(ctx, "platform key", func(c *conn) (err error) {
			known, _, err = c.platformKey()
			return err
		}); err != nil {
			return nil, err
		}
	}
	if known.certificates == nil {
		return nil, ErrNoPlatformKey
	}
	return cloneAll(known.certificates), nil
}

// Certify implements [Device].
func (t *TPM) Certify(ctx context.Context, extraData [32]byte) (Certified, error) {
	var out Certified
	err := t.sequence(ctx, "certify the attestation key", func(c *conn) error {
		known, key, err := c.platformKey()
		if err != nil {
			return err
		}
		if known.certificates == nil {
			return ErrNoPlatformKey
		}
		ak, err := c.attestationKey()
		if err != nil {
			return err
		}
		rsp, err := gotpm.Certify{
			ObjectHandle:   gotpm.AuthHandle{Handle: ak.handle, Name: ak.name, Auth: gotpm.PasswordAuth(nil)},
			SignHandle:     gotpm.AuthHandle{Handle: key.handle, Name: key.name, Auth: gotpm.PasswordAuth(nil)},
			QualifyingData: gotpm.TPM2BData{Buffer: extraData[:]},
			InScheme:       gotpm.TPMTSigScheme{Scheme: gotpm.TPMAlgNull}, // the key's own
		}.Execute(c.tpm)
		if err != nil {
			return err
		}
		out = Certified{Attest: rsp.CertifyInfo.Bytes(), Signature: gotpm.Marshal(rsp.Signature)}
		return nil
	})
	return out, err
}

// platformKey finds the platform key and loads it. The object is nil if there is none.
func (c *conn) platformKey() (*knownPlatform, *object, error) {
	c.owner.mu.Lock()
	known := c.owner.platform
	c.owner.mu.Unlock()
	if known == nil {
		found, err := c.findPlatformKey()
		if err != nil {
			return nil, nil, err
		}
		known = found
	}
	if known.certificates == nil {
		return c.keepPlatform(known), nil, nil
	}
	o, err := c.loadPlatformKey(known)
	if err != nil {
		return nil, nil, err
	}
	certificate, err := x509.ParseCertificate(known.certificates[0])
	if err != nil {
		return nil, nil, err
	}
	want, ok := certificate.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	public, err := gotpm.Pub(o.public)
	if err != nil || !ok || !want.Equal(public) {
		return nil, nil, errors.New("the platform key's certificate is for another key")
	}
	return c.keepPlatform(known), o, nil
}

func (c *conn) keepPlatform(k *knownPlatform) *knownPlatform {
	c.owner.mu.Lock()
	defer c.owner.mu.Unlock()
	c.owner.platform = k
	return k
}

// findPlatformKey reads the first certificate that there is, and the template of its key.
func (c *conn) findPlatformKey() (*knownPlatform, error) {
	indices, err := c.handles(nvPlatform, 64)
	if err != nil {
		return nil, err
	}
	for _, slot := range platformSlots {
		if !slices.Contains(indices, slot.certificate) {
			continue
		}
		data, err := c.readNV(slot.certificate, maxCertificate)
		if err != nil {
			return nil, fmt.Errorf("certificate in NV index 0x%08x: %w", uint32(slot.certificate), err)
		}
		certs, err := splitCertificates(data)
		if err == nil && len(certs) == 0 {
			err = errors.New("there is none")
		}
		if err != nil {
			return nil, fmt.Errorf("certificate in NV index 0x%08x: %w", uint32(slot.certificate), err)
		}
		known := &knownPlatform{handle: slot.handle, id: keyID(fmt.Sprintf("platform key 0x%08x", uint32(slot.certificate)))}
		for _, cert := range certs[:min(len(certs), maxChain)] {
			known.certificates = append(known.certificates, cert.Raw)
		}
		if slot.template == 0 {
			return known, nil
		}
		if data, err = c.readNV(slot.template, maxTemplate); err != nil {
			return nil, fmt.Errorf("template in NV index 0x%08x: %w", uint32(slot.template), err)
		}
		template, err := gotpm.Unmarshal[gotpm.TPMTPublic](data)
		if err != nil {
			return nil, fmt.Errorf("template in NV index 0x%08x: %w", uint32(slot.template), err)
		}
		known.template = *template
		return known, nil
	}
	return &knownPlatform{}, nil
}

func (c *conn) loadPlatformKey(k *knownPlatform) (*object, error) {
	if k.handle == 0 {
		return c.primary(k.id, k.template)
	}
	rsp, err := gotpm.ReadPublic{ObjectHandle: k.handle}.Execute(c.tpm)
	if err != nil {
		return nil, fmt.Errorf("platform key at 0x%08x: %w", uint32(k.handle), err)
	}
	public, err := rsp.OutPublic.Contents()
	if err != nil {
		return nil, fmt.Errorf("platform key at 0x%08x: %w", uint32(k.handle), err)
	}
	return &object{handle: k.handle, name: rsp.Name, public: *public}, nil // persistent: nothing to flush
}
