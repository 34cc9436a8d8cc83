package tpm2_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// authority is a certificate authority for tests, with a key of any kind.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func curveKey(t testing.TB, c elliptic.Curve) crypto.Signer {
	t.Helper()
	k, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// issue makes a certificate that parent signs; with a nil parent it is self-signed. change may be
// nil.
func issue(t testing.TB, parent *authority, name string, key crypto.Signer, change func(*x509.Certificate)) *authority {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	if change != nil {
		change(template)
	}
	a := &authority{key: key}
	signer := a
	if parent != nil {
		signer = parent
	}
	issuer := template
	if parent != nil {
		issuer = parent.cert
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, key.Public(), signer.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return a
}

// ekOf is the change that makes a certificate an EK certificate.
func ekOf(c *x509.Certificate) {
	c.IsCA, c.KeyUsage = false, x509.KeyUsageKeyAgreement
	c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}}
}

func chainOf(as ...*authority) [][]byte {
	var out [][]byte
	for _, a := range as {
		out = append(out, a.cert.Raw)
	}
	return out
}

// TestSignaturesThatAnUnknownPeerMakesUsCheck counts signature checks, the slow part, for the worst
// chains that a peer can send. crypto/x509 checks up to 100 signatures for one of them.
func TestSignaturesThatAnUnknownPeerMakesUsCheck(t *testing.T) {
	p256, p384, p521 := elliptic.P256(), elliptic.P384(), elliptic.P521()
	root := issue(t, nil, "root", curveKey(t, p384), nil)
	renewed := issue(t, nil, "root", curveKey(t, p384), nil)
	other := issue(t, nil, "other", curveKey(t, p384), nil)
	roots := []*x509.Certificate{root.cert, other.cert}

	// sameName returns issuers of one name, so that by name each issued all others.
	sameName := func(n int, c elliptic.Curve) [][]byte {
		own := issue(t, nil, "root", curveKey(t, c), nil)
		out := chainOf(issue(t, own, "", curveKey(t, p256), ekOf))
		for range n {
			out = append(out, issue(t, own, "root", curveKey(t, c), nil).cert.Raw)
		}
		return out
	}
	long := func(anchor *authority, names ...string) [][]byte {
		a, out := anchor, [][]byte(nil)
		for _, n := range names {
			a = issue(t, a, n, curveKey(t, p384), nil)
			out = append([][]byte{a.cert.Raw}, out...)
		}
		return append(chainOf(issue(t, a, "", curveKey(t, p256), ekOf)), out...)
	}
	ofTheirs := issue(t, nil, "root", curveKey(t, p384), nil) // with the same name as ours
	genuine := long(root, "1", "2", "3")
	captured := slices.Clone(genuine)
	captured[3] = ofTheirs.cert.Raw
	for name, tt := range map[string]struct {
		chain [][]byte
		roots []*x509.Certificate
		most  int
		want  attestv1.Reason
	}{
		"three issuers of one name on P-521":         {sameName(3, p521), roots, 0, badEK},
		"three issuers of one name on P-384":         {sameName(3, p384), roots, 1, badEK},
		"the longest chain to a root of their own":   {long(ofTheirs, "1", "2", "3"), roots, 1, badEK},
		"with two roots of that name in the policy":  {long(ofTheirs, "1", "2", "3"), []*x509.Certificate{root.cert, renewed.cert, other.cert}, 2, badEK},
		"to no root of the policy":                   {long(issue(t, nil, "theirs", curveKey(t, p384), nil), "1", "2", "3"), roots, 0, badEK},
		"a captured chain with another last issuer":  {captured, roots, 0, badEK},
		"a captured chain in another order":          {[][]byte{genuine[0], genuine[2], genuine[1], genuine[3]}, roots, 0, badEK},
		"a captured chain, as long as may be":        {genuine, roots, 4, attestv1.Reason_REASON_ACCEPTED},
		"a captured chain with an issuer sent twice": {[][]byte{genuine[0], genuine[1], genuine[1], genuine[2]}, roots, 0, badEK},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := tpm2.CountSignatureChecks(tt.chain, tt.roots, time.Now())
			if attest.ReasonOf(err) != tt.want {
				t.Errorf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			if n > tt.most {
				t.Errorf("%d signatures were checked, want %d at most", n, tt.most)
			}
		})
	}
}

// TestChainsThatAreAcceptedAreAcceptedByX509 checks that crypto/x509 accepts every chain that is
// accepted here.
func TestChainsThatAreAcceptedAreAcceptedByX509(t *testing.T) {
	p256, p384 := elliptic.P256(), elliptic.P384()
	root := issue(t, nil, "root", curveKey(t, p384), nil)
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	constrained := func(critical bool) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.PermittedDNSDomains, c.PermittedDNSDomainsCritical = []string{"example.com"}, critical
		}
	}
	plain := issue(t, root, "plain", curveKey(t, p384), nil)
	byRSA := issue(t, root, "rsa", rsaKey, nil)
	named := issue(t, root, "named", curveKey(t, p384), constrained(false))
	strict := issue(t, root, "strict", curveKey(t, p384), constrained(true))
	noCA := issue(t, root, "no authority", curveKey(t, p384), func(c *x509.Certificate) { c.IsCA = false })
	noSigner := issue(t, root, "no signer", curveKey(t, p384), func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageDigitalSignature })
	short := issue(t, root, "short", curveKey(t, p384), func(c *x509.Certificate) { c.MaxPathLenZero = true })
	below := issue(t, short, "below", curveKey(t, p384), nil)
	shortRoot := issue(t, nil, "short root", curveKey(t, p384), func(c *x509.Certificate) { c.MaxPathLen = 1 })
	one := issue(t, shortRoot, "one", curveKey(t, p384), nil)
	two := issue(t, one, "two", curveKey(t, p384), nil)
	oldRoot := issue(t, nil, "old root", curveKey(t, p384), func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	oddRoot := issue(t, nil, "odd root", curveKey(t, p384), func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Critical: true, Value: []byte{5, 0}}}
	})
	silentRoot := issue(t, nil, "silent root", curveKey(t, p384), func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign })
	namedRoot := issue(t, nil, "named root", curveKey(t, p384), constrained(false))
	leaf := func(parent *authority) *authority { return issue(t, parent, "", curveKey(t, p256), ekOf) }
	const accepted = attestv1.Reason_REASON_ACCEPTED
	for name, tt := range map[string]struct {
		root  *authority
		chain [][]byte
		want  attestv1.Reason
	}{
		"from the root":                       {root, chainOf(leaf(root)), accepted},
		"with an issuer":                      {root, chainOf(leaf(plain), plain), accepted},
		"with an RSA issuer":                  {root, chainOf(leaf(byRSA), byRSA), accepted},
		"with the root behind it":             {root, chainOf(leaf(plain), plain, root), accepted},
		"with the issuer as the root":         {plain, chainOf(leaf(plain), plain), accepted},
		"an RSA key for an EK":                {root, chainOf(issue(t, root, "", rsaKey, ekOf)), accepted},
		"a root that allows one issuer":       {shortRoot, chainOf(leaf(one), one), accepted},
		"one issuer more than the root has":   {shortRoot, chainOf(leaf(two), two, one), badEK},
		"one issuer more than an issuer has":  {root, chainOf(leaf(below), below, short), badEK},
		"an issuer with name constraints":     {root, chainOf(leaf(named), named), badEK},
		"with critical name constraints":      {root, chainOf(leaf(strict), strict), badEK},
		"a root with name constraints":        {namedRoot, chainOf(leaf(namedRoot)), badEK},
		"an issuer that is no authority":      {root, chainOf(leaf(noCA), noCA), badEK},
		"an issuer that may not sign":         {root, chainOf(leaf(noSigner), noSigner), badEK},
		"a root that may not sign":            {silentRoot, chainOf(leaf(silentRoot)), badEK},
		"a root that has expired":             {oldRoot, chainOf(leaf(oldRoot)), badEK},
		"a root with an unknown extension":    {oddRoot, chainOf(leaf(oddRoot)), badEK},
		"the issuer before the EK's":          {root, chainOf(plain, leaf(plain)), badEK},
		"an issuer of another":                {root, chainOf(leaf(plain), byRSA), badEK},
		"an EK on P-521":                      {root, chainOf(issue(t, root, "", curveKey(t, elliptic.P521()), ekOf)), badEK},
		"an EK on P-224":                      {root, chainOf(issue(t, root, "", curveKey(t, elliptic.P224()), ekOf)), badEK},
		"an RSA EK of 1024 bits":              {root, chainOf(issue(t, root, "", small(1024), ekOf)), badEK},
		"an EK that the issuer did not sign":  {root, [][]byte{forged(leaf(plain)), plain.cert.Raw}, badEK},
		"an issuer that the root didn't sign": {root, [][]byte{leaf(plain).cert.Raw, forged(plain)}, badEK},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tpm2.CountSignatureChecks(tt.chain, []*x509.Certificate{tt.root.cert}, time.Now())
			if attest.ReasonOf(err) != tt.want {
				t.Fatalf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			if err == nil {
				acceptedByX509(t, tt.chain, tt.root.cert, time.Now())
			}
		})
	}
}

// forged returns a's certificate with a signature that does not verify.
func forged(a *authority) []byte {
	b := slices.Clone(a.cert.Raw)
	b[len(b)-1] ^= 1
	return b
}

// smallKey is an RSA public key of a size that crypto/rsa does not generate; it signs nothing.
type smallKey struct{ public *rsa.PublicKey }

func (k smallKey) Public() crypto.PublicKey { return k.public }

func (smallKey) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	return nil, errors.New("it signs nothing")
}

func small(bits int) crypto.Signer {
	return smallKey{&rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), bits-1, 1), E: 65537}}
}

func acceptedByX509(t *testing.T, ders [][]byte, root *x509.Certificate, now time.Time) {
	t.Helper()
	roots, issuers := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(root)
	var leaf *x509.Certificate
	for i, der := range ders {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			leaf = c
			continue
		}
		issuers.AddCert(c)
	}
	leaf.UnhandledCriticalExtensions = nil
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: issuers, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		t.Errorf("crypto/x509 refuses it: %v", err)
	}
}

// TestVendorsChains verifies EK certificates of real TPMs; each file names its source. Each chain
// is tried with every one of its issuers as the policy's root.
func TestVendorsChains(t *testing.T) {
	files, err := filepath.Glob("testdata/ek/*.pem")
	if err != nil || len(files) == 0 {
		t.Fatalf("no chains: %v", err)
	}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			rest, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			var ders [][]byte
			for block, more := pem.Decode(rest); block != nil; block, more = pem.Decode(more) {
				ders = append(ders, block.Bytes)
			}
			for i := 1; i < len(ders); i++ {
				anchor, err := x509.ParseCertificate(ders[i])
				if err != nil {
					t.Fatal(err)
				}
				for _, sent := range [][][]byte{ders[:i], ders} { // with and without the root and the certificates after it
					if len(sent) > 4 {
						t.Fatalf("%d certificates", len(sent))
					}
					if _, err := tpm2.CountSignatureChecks(sent, []*x509.Certificate{anchor}, now); err != nil {
						t.Errorf("with %q as the root: %v", anchor.Subject, err)
					}
					acceptedByX509(t, sent, anchor, now)
				}
				if i > 1 {
					if _, err := tpm2.CountSignatureChecks(ders[:1], []*x509.Certificate{anchor}, now); attest.ReasonOf(err) != badEK {
						t.Errorf("accepted without its issuer: %v", err)
					}
				}
			}
		})
	}
}

// BenchmarkUnknownPeer measures the cost of an unauthenticated peer until it has to answer the
// challenge: one that has captured the longest EK certificate chain, and one that has none.
func BenchmarkUnknownPeer(b *testing.B) {
	root := issue(b, nil, "root", curveKey(b, elliptic.P384()), nil)
	ek := curveKey(b, elliptic.P256())
	chain := func(a *authority) [][]byte {
		var out [][]byte
		for _, n := range []string{"1", "2", "3"} {
			a = issue(b, a, n, curveKey(b, elliptic.P384()), nil)
			out = append([][]byte{a.cert.Raw}, out...)
		}
		return append(chainOf(issue(b, a, "", ek, ekOf)), out...)
	}
	theirs := issue(b, nil, "root", curveKey(b, elliptic.P384()), nil)
	for name, certs := range map[string][][]byte{"captured": chain(root), "own": chain(theirs)} {
		b.Run(name, func(b *testing.B) {
			m := attesttest.NewMachine(b, attesttest.NewCA(b), attesttest.Options{Tamper: attesttest.Tamper{
				Evidence: func(ev *attestv1.Evidence) { ev.GetTpm2().EkCertificates = certs },
			}})
			v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return []*x509.Certificate{root.cert} }, Now: time.Now})
			if err != nil {
				b.Fatal(err)
			}
			binding := attest.Binding{1}
			ev, err := m.Attester(attest.PurposeMachine).Attest(b.Context(), tpmFormat, binding)
			if err != nil {
				b.Fatal(err)
			}
			s := attest.NewStatement(attest.PurposeMachine, binding)
			for b.Loop() {
				p, err := v.Verify(b.Context(), ev, s, binding)
				if captured := name == "captured"; captured != (err == nil) || captured && p.Challenge() == nil {
					b.Fatal(err)
				}
			}
		})
	}
}
