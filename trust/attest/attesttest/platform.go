package attesttest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/big"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	"github.com/muster-k8s/muster/trust/tpm"
)

// Platform describes the platform key of a virtual machine: an attestation key that its cloud has
// certified.
type Platform struct {
	// CA issues its certificate; nil stands for the machine's.
	CA *CA
	// Azure makes the certificate one of Azure, with an RSA key; otherwise it is one of Google, with an
	// ECC key.
	Azure bool
	// Project and Zone are in certificates of Google.
	Project, Zone string
	// Certificate changes the certificate before it is signed.
	Certificate func(*x509.Certificate)
	// Attest changes what the platform key signs before it is signed.
	Attest func(*gotpm.TPMSAttest)
	// Message changes the marshaled structure before it is signed.
	Message func([]byte) []byte
	// Signature changes its signature.
	Signature func([]byte) []byte
}

// platformKey is the platform key of a machine.
type platformKey struct {
	Platform
	key   crypto.Signer
	chain [][]byte
}

// OIDGCEInstance is Google's extension with the identity of a virtual machine.
var OIDGCEInstance = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 1, 21}

// GCEInstance returns the value of that extension.
func GCEInstance(zone, project string, id int64, production bool) []byte {
	type security struct {
		Version    int  `asn1:"explicit,tag:0"`
		Production bool `asn1:"explicit,tag:1"`
		Other      bool `asn1:"explicit,tag:2"`
	}
	return marshal(struct {
		Zone          string `asn1:"utf8"`
		ProjectNumber int64
		Project       string `asn1:"utf8"`
		ID            int64
		Name          string   `asn1:"utf8"`
		Security      security `asn1:"explicit,tag:0"`
	}{zone, 4711, project, id, "instance", security{0, production, true}})
}

func newPlatformKey(t testing.TB, ca *CA, p *Platform) *platformKey {
	t.Helper()
	if p == nil {
		return nil
	}
	k := &platformKey{Platform: *p, key: newKey(t)}
	if p.CA != nil {
		ca = p.CA
	}
	if p.Azure {
		var err error
		if k.key, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
			t.Fatal(err)
		}
	}
	k.chain = ca.IssuePlatform(t, k.key.Public(), *p)
	return k
}

// IssuePlatform returns the certificate chain of a platform key, its own first and without the root.
func (ca *CA) IssuePlatform(t testing.TB, public crypto.PublicKey, p Platform) [][]byte {
	t.Helper()
	return ca.Issue(t, public, func(c *x509.Certificate) {
		c.KeyUsage, c.UnknownExtKeyUsage = x509.KeyUsageDigitalSignature, nil
		if p.Azure {
			c.Subject = pkix.Name{CommonName: "0123456789ab.TrustedVM.Azure.windows.net"}
			c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{1, 3, 6, 1, 4, 1, 311, 10, 3, 12}, {2, 23, 133, 8, 3}}
			c.ExtraExtensions = nil
		} else {
			c.Subject = pkix.Name{CommonName: c.SerialNumber.String(), Organization: []string{"Google Compute Engine"}}
			c.ExtraExtensions = []pkix.Extension{{Id: OIDGCEInstance, Value: GCEInstance(p.Zone, p.Project, c.SerialNumber.Int64(), true)}}
		}
		if p.Certificate != nil {
			p.Certificate(c)
		}
	})
}

// PlatformCertificates implements [tpm.Device].
func (m *Machine) PlatformCertificates(ctx context.Context) ([][]byte, error) {
	if m.platform == nil {
		return nil, tpm.ErrNoPlatformKey
	}
	return cloneAll(m.platform.chain), ctx.Err()
}

// CertificateIndex returns the index of a TPM's maker or of Google's ECC key, as [tpm.TPM.CertificateIndex] does.
func (m *Machine) CertificateIndex(ctx context.Context) (tpm.CertificateIndex, error) {
	switch {
	case m.platform != nil:
		return tpm.CertificateIndex{Index: 0x01C10002, PlatformCreated: true}, ctx.Err()
	case len(m.chain) == 0:
		return tpm.CertificateIndex{}, tpm.ErrNoCertificate
	}
	return tpm.CertificateIndex{Index: 0x01C0000A, PlatformCreated: true}, ctx.Err()
}

// Certify implements [tpm.Device].
func (m *Machine) Certify(ctx context.Context, extraData [32]byte) (tpm.Certified, error) {
	if m.platform == nil {
		return tpm.Certified{}, tpm.ErrNoPlatformKey
	}
	if err := ctx.Err(); err != nil {
		return tpm.Certified{}, err
	}
	qualified := sha256.Sum256(append([]byte{0x40, 0x00, 0x00, 0x0B}, m.akName()...))
	a := gotpm.TPMSAttest{
		Magic:           gotpm.TPMGeneratedValue,
		Type:            gotpm.TPMSTAttestCertify,
		QualifiedSigner: gotpm.TPM2BName{Buffer: make([]byte, 34)},
		ExtraData:       gotpm.TPM2BData{Buffer: extraData[:]},
		Attested: gotpm.NewTPMUAttest(gotpm.TPMSTAttestCertify, &gotpm.TPMSCertifyInfo{
			Name:          gotpm.TPM2BName{Buffer: m.akName()},
			QualifiedName: gotpm.TPM2BName{Buffer: append([]byte{0x00, 0x0B}, qualified[:]...)},
		}),
	}
	if m.platform.Attest != nil {
		m.platform.Attest(&a)
	}
	message := gotpm.Marshal(a)
	if m.platform.Message != nil {
		message = m.platform.Message(message)
	}
	signature, err := SignWith(m.platform.key, message)
	if err == nil && m.platform.Signature != nil {
		signature = m.platform.Signature(signature)
	}
	return tpm.Certified{Attest: message, Signature: signature}, err
}

// SignWith is [Sign] with an ECC key, and the same by RSASSA with an RSA key.
func SignWith(key crypto.Signer, message []byte) ([]byte, error) {
	if k, ok := key.(*ecdsa.PrivateKey); ok {
		return Sign(k, message)
	}
	sum := sha256.Sum256(message)
	sig, err := key.Sign(rand.Reader, sum[:], crypto.SHA256)
	if err != nil {
		return nil, err
	}
	return gotpm.Marshal(gotpm.TPMTSignature{
		SigAlg: gotpm.TPMAlgRSASSA,
		Signature: gotpm.NewTPMUSignature(gotpm.TPMAlgRSASSA, &gotpm.TPMSSignatureRSA{
			Hash: gotpm.TPMAlgSHA256, Sig: gotpm.TPM2BPublicKeyRSA{Buffer: new(big.Int).SetBytes(sig).FillBytes(make([]byte, 256))},
		}),
	}), nil
}
