// Package hardwaretest makes hardware reports without the hardware: processors and quoting enclaves
// whose keys are certified by vendors of its own. It bypasses no part of the verification. Tests
// use it for what captured reports do not have; these cannot be altered, since they are signed.
//
//	v := hardwaretest.NewAMD(t)
//	e := v.Report(t, hardwaretest.Chip{Product: snp.Milan, TCB: tcb}, data)
//	r, err := snp.Verify(e, data, v.Authorities(), hardwaretest.Now)
package hardwaretest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha512"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
)

// Now is when all certificates and lists of this package are valid: from a day before to a day
// after.
var Now = time.Date(2026, 3, 20, 12, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

// Authority is a key with its certificate.
type Authority struct {
	Cert *x509.Certificate
	key  crypto.Signer
}

// issue makes a certificate below a, or a root if a is nil.
func (a *Authority) issue(t testing.TB, c *x509.Certificate, key crypto.Signer) *Authority {
	t.Helper()
	if c.SerialNumber == nil {
		c.SerialNumber, _ = rand.Int(rand.Reader, big.NewInt(1<<62))
	}
	if c.NotBefore.IsZero() {
		c.NotBefore, c.NotAfter = Now.Add(-day), Now.Add(day)
	}
	if a == nil {
		a = &Authority{Cert: c, key: key}
	}
	if _, pss := a.key.(*rsa.PrivateKey); pss {
		c.SignatureAlgorithm = x509.SHA384WithRSAPSS
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.Cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	out := &Authority{key: key}
	if out.Cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return out
}

// ca returns the template of an authority's certificate.
func ca(name string) *x509.Certificate {
	return &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign}
}

// CRL returns a's list of revoked certificates in DER. change may be nil.
func (a *Authority) CRL(t testing.TB, change func(*x509.RevocationList), revoked ...*x509.Certificate) []byte {
	t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: Now.Add(-day), NextUpdate: Now.Add(day)}
	for _, c := range revoked {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: Now.Add(-day)})
	}
	if change != nil {
		change(l)
	}
	if _, pss := a.key.(*rsa.PrivateKey); pss {
		l.SignatureAlgorithm = x509.SHA384WithRSAPSS
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, a.Cert, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// NewRSA makes a key as AMD's authorities have, but of 2048 bits.
func NewRSA(t testing.TB) *rsa.PrivateKey {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// NewECDSA makes a key on a curve.
func NewECDSA(t testing.TB, c elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// AMD is a vendor of SEV-SNP processors of all products.
type AMD struct {
	Root, VCEK, VLEK *Authority
	// List is the root's list of revoked issuers.
	List []byte
}

// NewAMD makes a vendor.
func NewAMD(t testing.TB) *AMD {
	t.Helper()
	root := (*Authority)(nil).issue(t, ca("ARK test"), NewRSA(t))
	return &AMD{Root: root, VCEK: root.issue(t, ca("SEV test"), NewRSA(t)), VLEK: root.issue(t, ca("SEV-VLEK test"), NewRSA(t)), List: root.CRL(t, nil)}
}

// Issuer makes another issuer of VCEKs below the root. change may be nil.
func (v *AMD) Issuer(t testing.TB, change func(*x509.Certificate)) *Authority {
	c := ca("SEV test")
	if change != nil {
		change(c)
	}
	return v.Root.issue(t, c, NewRSA(t))
}

// NewRoot makes another certificate for the root's key and name.
func (v *AMD) NewRoot(t testing.TB, change func(*x509.Certificate)) *x509.Certificate {
	c := ca("ARK test")
	change(c)
	return (*Authority)(nil).issue(t, c, v.Root.key).Cert
}

// Renamed makes an issuer of VCEKs with the key of v.VCEK and another name.
func (v *AMD) Renamed(t testing.TB) *Authority {
	return v.Root.issue(t, ca("SEV renamed"), v.VCEK.key)
}

// Authorities returns its certificates, the same for each product.
func (v *AMD) Authorities() snp.Authorities {
	out := snp.Authorities{}
	for _, p := range snp.Products {
		out[p] = snp.Authority{Root: v.Root.Cert, VCEK: v.VCEK.Cert, VLEK: v.VLEK.Cert, RevocationLists: [][]byte{v.List}}
	}
	return out
}

// Chip is a processor with a guest. Without changes, its report verifies.
type Chip struct {
	Product snp.Product
	// Key is that of the chip by default.
	Key snp.Key
	TCB snp.TCB
	// Certificate changes the certificate of the key, Report the report before it is signed.
	Certificate func(*x509.Certificate)
	Report      func([]byte)
	// Signer, if not nil, is the key, on P-384 by default.
	Signer crypto.Signer
}

var cpuid = map[snp.Product][3]byte{snp.Milan: {0x19, 0x01, 0x01}, snp.Genoa: {0x19, 0x11, 0x01}, snp.Turin: {0x1A, 0x02, 0x01}}

// Extension returns AMD's extension with the last numbers n.
func Extension(value []byte, n ...int) pkix.Extension {
	return pkix.Extension{Id: append(asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 3704, 1}, n...), Value: value}
}

// IA5 returns an IA5String in DER.
func IA5(s string) []byte { return append([]byte{asn1.TagIA5String, byte(len(s))}, s...) }

func integer(n uint8) []byte {
	b, _ := asn1.Marshal(int(n))
	return b
}

// Report makes a report of version 5 over data, at VMPL 0, with guest policy 0x20000 and a
// measurement of bytes 0x4D.
func (v *AMD) Report(t testing.TB, c Chip, data hardware.ReportData) snp.Evidence {
	t.Helper()
	id := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	tcb := []byte{c.TCB.BootLoader, c.TCB.TEE, 0, 0, 0, 0, c.TCB.SNP, c.TCB.Microcode}
	if c.Product == snp.Turin {
		tcb = []byte{c.TCB.FMC, c.TCB.BootLoader, c.TCB.TEE, c.TCB.SNP, 0, 0, 0, c.TCB.Microcode}
	} else {
		id = append(id, make([]byte, 56)...)
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "SEV-VCEK"}, SerialNumber: new(big.Int), ExtraExtensions: []pkix.Extension{
		Extension(integer(1), 1), Extension(IA5(string(c.Product)), 2),
		Extension(integer(c.TCB.BootLoader), 3, 1), Extension(integer(c.TCB.TEE), 3, 2), Extension(integer(c.TCB.SNP), 3, 3), Extension(integer(c.TCB.Microcode), 3, 8),
	}}
	if c.Product == snp.Turin {
		template.ExtraExtensions = append(template.ExtraExtensions, Extension(integer(c.TCB.FMC), 3, 9))
	}
	b := make([]byte, snp.ReportSize)
	issuer := v.VCEK
	if c.Key == snp.VLEK {
		template.ExtraExtensions = append(template.ExtraExtensions, Extension(IA5("CN=cc.test"), 5))
		issuer, b[0x48] = v.VLEK, 1<<2
	} else {
		template.ExtraExtensions = append(template.ExtraExtensions, Extension(id, 4))
		copy(b[0x1A0:], id)
	}
	if c.Certificate != nil {
		c.Certificate(template)
	}
	if c.Signer == nil {
		c.Signer = NewECDSA(t, elliptic.P384())
	}
	cert := issuer.issue(t, template, c.Signer)
	b[0], b[0x34] = 5, 1
	binary.LittleEndian.PutUint64(b[0x08:], 0x20000)
	copy(b[0x50:], data[:])
	for i := range 48 {
		b[0x90+i] = 0x4D
	}
	for _, at := range []int{0x038, 0x180, 0x1E0, 0x1F0} {
		copy(b[at:], tcb)
	}
	cpu := cpuid[c.Product]
	copy(b[0x188:], cpu[:])
	if c.Report != nil {
		c.Report(b)
	}
	SignReport(t, b, c.Signer)
	return snp.Evidence{Report: b, Certificate: cert.Cert.Raw}
}

// SignReport signs a report again; it does nothing if the key is not an ECDSA key on P-384.
func SignReport(t testing.TB, b []byte, key crypto.Signer) {
	t.Helper()
	k, ok := key.(*ecdsa.PrivateKey)
	if !ok || k.Curve != elliptic.P384() || len(b) < snp.ReportSize {
		return
	}
	digest := sha512.Sum384(b[:0x2A0])
	r, s, err := ecdsa.Sign(rand.Reader, k, digest[:])
	if err != nil {
		t.Fatal(err)
	}
	for at, n := range map[int]*big.Int{0x2A0: r, 0x2E8: s} {
		half := n.FillBytes(make([]byte, 48))
		slices.Reverse(half)
		copy(b[at:], half)
	}
}
