package endorsement

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/muster-k8s/muster/trust/internal/checked"
)

// Limits of certificates in evidence.
const (
	MaxCertificates = 4       // certificates: the longest chain in a TPM, that of Intel's on-die authorities
	MaxCertificate  = 8 << 10 // bytes
)

// Limits of RSA keys in certificates. The time to check a signature grows with the square of the
// modulus, and unauthenticated peers choose these keys.
const (
	minRSABits     = 2048
	maxRSABits     = 4096
	maxRSAExponent = 1<<16 + 1
)

var oidNameConstraints = asn1.ObjectIdentifier{2, 5, 29, 30}

// Chain checks certificate chains of one kind.
type Chain struct {
	// What names the certificates in texts, such as "EK certificate".
	What string
	// Purpose names in texts the certificates that an authority must be allowed to issue.
	Purpose string
	// Usages are the extended key usages of which an issuer must have one, if it has any: they apply
	// to the certificates below it.
	Usages []asn1.ObjectIdentifier
	// Signed reports whether issuer's key signed c and may sign certificates; nil stands for
	// [x509.Certificate.CheckSignatureFrom]. Tests count the calls.
	Signed func(c, issuer *x509.Certificate) error
}

// CheckSizes refuses another number of certificates than 1 to [MaxCertificates], and larger ones
// than [MaxCertificate], with EVIDENCE_MALFORMED.
func (h Chain) CheckSizes(ders [][]byte) error {
	if n := len(ders); n < 1 || n > MaxCertificates {
		return Refuse(Malformed, "%d certificates, want 1 to %d: %s", n, MaxCertificates, h.What)
	}
	for i, c := range ders {
		if len(c) > MaxCertificate {
			return Refuse(Malformed, "%s %d has %d bytes, more than %d", h.What, i, len(c), MaxCertificate)
		}
	}
	return nil
}

// Parse reads the certificates, and checks the sizes of their keys. It refuses with
// EVIDENCE_MALFORMED or EK_UNTRUSTED.
func (h Chain) Parse(ders [][]byte) ([]*x509.Certificate, error) {
	certs := make([]*x509.Certificate, len(ders))
	for i, der := range ders {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, Refuse(Malformed, "%s %d: %w", h.What, i, err)
		}
		if err := checkKey(c.PublicKey); err != nil {
			return nil, Refuse(Untrusted, "%s %d: %w", h.What, i, err)
		}
		certs[i] = c
	}
	return certs, nil
}

// Path returns the certificates from the first one to one of the roots, after it has checked them.
// It refuses with EK_UNTRUSTED. What the first one may be used for is up to the caller.
//
// crypto/x509 would try every issuer with a matching name, in every order, up to 100 signatures.
// This function takes the certificates in the order sent, makes all cheap checks first, and checks
// signatures from the root downwards. So a peer without a certificate of a root costs one check for
// each root of that name, and the first failed check is the last one.
func (h Chain) Path(certs, roots []*x509.Certificate, now time.Time) ([]*x509.Certificate, error) {
	signed := h.Signed
	if signed == nil {
		signed = (*x509.Certificate).CheckSignatureFrom
	}
	leaf := certs[0]
	// Certificates after the first one that names a root are not needed: a policy may list an
	// issuer that is not self-signed, and machines send all certificates that their TPM stores.
	last := slices.IndexFunc(certs, func(c *x509.Certificate) bool {
		return slices.ContainsFunc(roots, func(r *x509.Certificate) bool { return named(r, c) })
	})
	if last < 0 {
		return nil, Refuse(Untrusted, "none of the %d certificates names a root of the policy as its issuer; the %s was issued by %q, %s", len(certs), h.What, leaf.Issuer, issuerAt(leaf))
	}
	certs = certs[:last+1]
	for i, c := range certs {
		if err := checkUse(c, now); err != nil {
			return nil, Refuse(Untrusted, "%s %d, %q: %w", h.What, i, c.Subject, err)
		}
		if i == 0 {
			continue
		}
		if err := checkIssuer(c, i-1); err != nil {
			return nil, Refuse(Untrusted, "%s %d, %q: %w", h.What, i, c.Subject, err)
		}
		if !h.mayIssue(c) {
			return nil, Refuse(Untrusted, "%q may not issue %s", c.Subject, h.Purpose)
		}
		if !named(c, certs[i-1]) {
			return nil, Refuse(Untrusted, "%s %d, %q, is not the issuer of the one before it, %q", h.What, i, c.Subject, certs[i-1].Issuer)
		}
	}
	root, err := rootOf(certs[last], roots, func(r *x509.Certificate) error {
		if err := errors.Join(checkUse(r, now), checkIssuer(r, last)); err != nil {
			return err
		}
		return signed(certs[last], r)
	})
	if err != nil {
		return nil, Refuse(Untrusted, "%s, issued by %q, %s: %w", h.What, leaf.Issuer, issuerAt(leaf), err)
	}
	for i := last - 1; i >= 0; i-- {
		if err := signed(certs[i], certs[i+1]); err != nil {
			return nil, Refuse(Untrusted, "%s %d, issued by %q: %w", h.What, i, certs[i].Issuer, err)
		}
	}
	return slices.Concat(certs, []*x509.Certificate{root}), nil
}

// issuerAt returns a text with the unverified address of the issuer's certificate that c contains (RFC 5280, section 4.2.2.1).
func issuerAt(c *x509.Certificate) string {
	if len(c.IssuingCertificateURL) == 0 {
		return "and names no address of that authority's certificate"
	}
	return fmt.Sprintf("whose certificate, by its own statement, is at %.200q", c.IssuingCertificateURL[0])
}

// mayIssue checks an issuer's extended key usages, if it has any.
func (h Chain) mayIssue(c *x509.Certificate) bool {
	return len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0 ||
		slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) ||
		slices.ContainsFunc(h.Usages, func(u asn1.ObjectIdentifier) bool { return slices.ContainsFunc(c.UnknownExtKeyUsage, u.Equal) })
}

// Canonical reports whether the certificate's key has the one usual encoding. A machine ID is a hash
// of it, so one key must have one encoding (A8).
func Canonical(c *x509.Certificate) bool {
	spki, err := x509.MarshalPKIXPublicKey(c.PublicKey)
	return err == nil && bytes.Equal(spki, c.RawSubjectPublicKeyInfo)
}

// Shown returns a path in the form of claims.
func Shown(path []*x509.Certificate) (out []checked.Certificate) {
	for _, c := range path {
		out = append(out, checked.Certificate{Subject: c.Subject.String(), Key: sha256.Sum256(c.RawSubjectPublicKeyInfo), Serial: c.SerialNumber.Text(16)})
	}
	return out
}

// RootName describes a root for texts.
func RootName(c *x509.Certificate) string {
	if c == nil {
		return "no root"
	}
	return fmt.Sprintf("%q", c.Subject.String())
}

// ParseAuthority reads exactly one certificate of a certificate authority. field is its name, for
// the error, which is POLICY_INVALID.
func ParseAuthority(field, text string) (*x509.Certificate, error) {
	block, rest := pem.Decode([]byte(text))
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, Invalid("%s: want exactly one PEM certificate", field)
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, Invalid("%s: %w", field, err)
	}
	if !c.IsCA {
		return nil, Invalid("%s: %q is not a certificate authority", field, c.Subject)
	}
	return c, nil
}

// rootOf returns the first root that c names as its issuer and that check accepts. Some vendors
// have several roots of one name.
func rootOf(c *x509.Certificate, roots []*x509.Certificate, check func(*x509.Certificate) error) (*x509.Certificate, error) {
	var errs []error
	for _, r := range roots {
		if !named(r, c) {
			continue
		}
		err := check(r)
		if err == nil {
			return r, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// named reports whether c names issuer as its issuer (RFC 5280, 6.1.3 (a)(4)).
func named(issuer, c *x509.Certificate) bool { return bytes.Equal(issuer.RawSubject, c.RawIssuer) }

// SameAuthority reports whether two certificates are of one authority: of one name and key. A renewed
// certificate of an authority stands beside the old one in a policy, and a chain leads to both.
func SameAuthority(a, b *x509.Certificate) bool {
	return a != nil && b != nil && bytes.Equal(a.RawSubject, b.RawSubject) && bytes.Equal(a.RawSubjectPublicKeyInfo, b.RawSubjectPublicKeyInfo)
}

// checkKey accepts RSA keys of 2048 to 4096 bits, P-256 and P-384. The owner chooses the roots, so
// their keys are not restricted: some vendors have roots on P-521.
func checkKey(key any) error {
	switch k := key.(type) {
	case *rsa.PublicKey:
		if bits := k.N.BitLen(); bits < minRSABits || bits > maxRSABits || k.E > maxRSAExponent {
			return fmt.Errorf("an RSA key of %d bits with exponent %d; accepted are %d to %d bits, exponents to %d", bits, k.E, minRSABits, maxRSABits, maxRSAExponent)
		}
		return nil
	case *ecdsa.PublicKey:
		if k.Curve == elliptic.P256() || k.Curve == elliptic.P384() {
			return nil
		}
		return fmt.Errorf("a key on %s; accepted are P-256 and P-384", k.Curve.Params().Name)
	}
	return errors.New("its key is neither RSA nor ECDSA")
}

// checkUse makes the checks for every certificate of a path: RFC 5280, 6.1.3 (a)(2) and 6.1.4 (o).
func checkUse(c *x509.Certificate, now time.Time) error {
	switch {
	case now.Before(c.NotBefore) || now.After(c.NotAfter):
		return fmt.Errorf("valid from %s to %s, now it is %s", c.NotBefore.UTC(), c.NotAfter.UTC(), now.UTC())
	case len(c.UnhandledCriticalExtensions) > 0:
		return fmt.Errorf("has critical extensions that are not understood: %v", c.UnhandledCriticalExtensions)
	}
	return nil
}

// checkIssuer makes the checks for an issuer with `below` other issuers between it and the first
// certificate: RFC 5280, 6.1.4 (k), (l) and (m). Its key usage (n) is checked with its signature.
func checkIssuer(c *x509.Certificate, below int) error {
	switch {
	case !c.BasicConstraintsValid || !c.IsCA:
		return errors.New("is no certificate authority")
	case c.MaxPathLen >= 0 && below > c.MaxPathLen:
		return fmt.Errorf("allows %d issuers below it, there are %d", c.MaxPathLen, below)
	case slices.ContainsFunc(c.Extensions, func(e pkix.Extension) bool { return e.Id.Equal(oidNameConstraints) }):
		return errors.New("has name constraints, which no vendor of TPMs uses and this program does not apply")
	}
	return nil
}
