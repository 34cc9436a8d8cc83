// Package attesttest makes genuine TPM 2.0 evidence without a TPM, from a certificate authority and
// machines whose endorsement and attestation keys are in software. It bypasses no part of the
// verification: a [Machine] passes tpmtest.Contract like any TPM, the real attester makes its
// evidence, the real verifier checks it, and the verifier refuses the change of a [Tamper] for
// exactly that reason.
//
//	ca := attesttest.NewCA(t)
//	m := attesttest.NewMachine(t, ca, attesttest.Options{})
//	attester := m.Attester(attest.PurposeMachine)
//	verifier := attesttest.Verifier(t, ca)
//	policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m})
package attesttest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"sync/atomic"
	"testing"
	"time"
)

// CA issues endorsement key certificates, as a TPM vendor or the operator of a fleet does.
type CA struct {
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	parent *CA // nil: this is the root
}

var serial atomic.Int64

// NewCA makes a root.
func NewCA(t testing.TB) *CA { return newCA(t, "attesttest root", nil, nil) }

// NewCAValid makes a root with this validity period. Other roots are valid from an hour ago, for a
// day.
func NewCAValid(t testing.TB, from, to time.Time) *CA {
	return newCA(t, "attesttest root", nil, func(c *x509.Certificate) { c.NotBefore, c.NotAfter = from, to })
}

// Intermediate makes an authority under ca. Machines send its certificate in their chain. change
// may be nil.
func (ca *CA) Intermediate(t testing.TB, change func(*x509.Certificate)) *CA {
	return newCA(t, "attesttest intermediate", ca, change)
}

// Renewed returns the root with another certificate for the same name and key.
func (ca *CA) Renewed(t testing.TB) *CA {
	t.Helper()
	template := *ca.cert
	template.SerialNumber, template.NotAfter = big.NewInt(serial.Add(1)), ca.cert.NotAfter.Add(time.Hour)
	cert, err := x509.ParseCertificate(create(t, &template, &template, ca.key.Public(), ca.key))
	if err != nil {
		t.Fatal(err)
	}
	return &CA{cert: cert, key: ca.key}
}

func newCA(t testing.TB, name string, parent *CA, change func(*x509.Certificate)) *CA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	n := serial.Add(1)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(n),
		Subject:               pkix.Name{CommonName: name, SerialNumber: big.NewInt(n).String()},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	if change != nil {
		change(template)
	}
	ca := &CA{key: key, parent: parent}
	issuer, signer := template, key
	if parent != nil {
		issuer, signer = parent.cert, parent.key
	}
	if ca.cert, err = x509.ParseCertificate(create(t, template, issuer, key.Public(), signer)); err != nil {
		t.Fatal(err)
	}
	return ca
}

func create(t testing.TB, template, issuer *x509.Certificate, public any, signer *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, public, signer)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// Root returns the root of ca's chain.
func (ca *CA) Root() *x509.Certificate {
	for ca.parent != nil {
		ca = ca.parent
	}
	return ca.cert
}

// Roots returns the root as a list, for verifiers and policies.
func (ca *CA) Roots() []*x509.Certificate { return []*x509.Certificate{ca.Root()} }

// PEM returns the root in PEM.
func (ca *CA) PEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Root().Raw}))
}

// Issue returns the certificate chain of an endorsement key, its own first and without the
// root. change may be nil.
func (ca *CA) Issue(t testing.TB, public any, change func(*x509.Certificate)) [][]byte {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(serial.Add(1)),
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageKeyAgreement,
		UnknownExtKeyUsage:    []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}}, // tcg-kp-EKCertificate
		// Critical, since the subject is empty: the same as in certificates of TPM vendors and
		// swtpm.
		ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: true, Value: TPMName("id:4D555354", "attesttest", "id:00010000")}},
	}
	if change != nil {
		change(template)
	}
	chain := [][]byte{create(t, template, ca.cert, public, ca.key)}
	for ; ca.parent != nil; ca = ca.parent {
		chain = append(chain, ca.cert.Raw)
	}
	return chain
}

// TPMName returns the value of a subject alternative name extension with the three TCG
// attributes of a TPM.
func TPMName(manufacturer, model, version string) []byte {
	type attribute struct {
		Type  asn1.ObjectIdentifier
		Value string `asn1:"utf8"`
	}
	set := func(n int, v string) asn1.RawValue {
		return asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: marshal(attribute{asn1.ObjectIdentifier{2, 23, 133, 2, n}, v})}
	}
	name := marshal([]asn1.RawValue{set(1, manufacturer), set(2, model), set(3, version)})
	return marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 4, IsCompound: true, Bytes: name}})
}

func marshal(v any) []byte {
	b, err := asn1.Marshal(v)
	if err != nil {
		panic(err) // of the constant values above
	}
	return b
}
