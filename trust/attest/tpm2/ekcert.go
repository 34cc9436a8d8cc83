package tpm2

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

const badEK = attestv1.Reason_REASON_EK_UNTRUSTED

// TCG EK Credential Profile for TPM 2.0, version 2.5, sections 3.2.9 and 3.2.16.
var (
	oidSubjectAltName  = asn1.ObjectIdentifier{2, 5, 29, 17}
	oidNameConstraints = asn1.ObjectIdentifier{2, 5, 29, 30}
	oidEKCertificate   = asn1.ObjectIdentifier{2, 23, 133, 8, 1} // tcg-kp-EKCertificate
	oidTPMManufacturer = asn1.ObjectIdentifier{2, 23, 133, 2, 1}
	oidTPMModel        = asn1.ObjectIdentifier{2, 23, 133, 2, 2}
	oidTPMVersion      = asn1.ObjectIdentifier{2, 23, 133, 2, 3}
)

// Limits of RSA keys in certificates. The time to check a signature grows with the square of the
// modulus, and unauthenticated peers choose these keys.
const (
	minRSABits     = 2048
	maxRSABits     = 4096
	maxRSAExponent = 1<<16 + 1
)

// endorsement is an endorsement key whose certificate chains to a root.
type endorsement struct {
	cert *x509.Certificate
	// chain has the checked certificates: cert, authorities, root.
	chain []*x509.Certificate
	root  *x509.Certificate
}

// verifyEK checks the chain from the endorsement key's certificate to one of the roots.
// EVIDENCE_MALFORMED: no certificates; EK_UNTRUSTED: everything else.
func verifyEK(ders [][]byte, roots []*x509.Certificate, now time.Time) (*endorsement, error) {
	return verifyEKWith(ders, roots, now, (*x509.Certificate).CheckSignatureFrom)
}

// verifyEKWith is verifyEK with a parameter for the slow function: signed reports whether issuer's
// key signed c and may sign certificates.
//
// crypto/x509 would try every issuer with a matching name, in every order, up to 100 signatures.
// This function takes the certificates in the order sent, makes all cheap checks first, and checks
// signatures from the root downwards. So a peer without a certificate of a root costs one check for
// each root of that name, and the first failed check is the last one.
func verifyEKWith(ders [][]byte, roots []*x509.Certificate, now time.Time, signed func(c, issuer *x509.Certificate) error) (*endorsement, error) {
	certs := make([]*x509.Certificate, len(ders))
	for i, der := range ders {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, refuse(malformed, "EK certificate %d: %w", i, err)
		}
		if err := checkKey(c.PublicKey); err != nil {
			return nil, refuse(badEK, "EK certificate %d: %w", i, err)
		}
		certs[i] = c
	}
	leaf := certs[0]
	// The machine ID is a hash of these bytes, so one key must have one encoding.
	if spki, err := x509.MarshalPKIXPublicKey(leaf.PublicKey); err != nil || !bytes.Equal(spki, leaf.RawSubjectPublicKeyInfo) {
		return nil, refuse(badEK, "the EK certificate's key has an unusual type or encoding")
	}
	if leaf.IsCA {
		return nil, refuse(badEK, "the EK certificate is that of an authority")
	}
	if !slices.ContainsFunc(leaf.UnknownExtKeyUsage, oidEKCertificate.Equal) {
		return nil, refuse(badEK, "the certificate lacks the extended key usage of endorsement keys, %s", oidEKCertificate)
	}
	if err := handleSAN(leaf); err != nil {
		return nil, refuse(badEK, "the EK certificate's subject alternative name: %w", err)
	}
	// Certificates after the first one that names a root are not needed: a policy may list an
	// issuer that is not self-signed, and machines send all certificates that their TPM stores.
	last := slices.IndexFunc(certs, func(c *x509.Certificate) bool {
		return slices.ContainsFunc(roots, func(r *x509.Certificate) bool { return named(r, c) })
	})
	if last < 0 {
		return nil, refuse(badEK, "none of the %d certificates names a root of the policy as its issuer; the EK certificate was issued by %q", len(certs), leaf.Issuer)
	}
	certs = certs[:last+1]
	for i, c := range certs {
		if err := checkUse(c, now); err != nil {
			return nil, refuse(badEK, "EK certificate %d, %q: %w", i, c.Subject, err)
		}
		if i == 0 {
			continue
		}
		if err := checkIssuer(c, i-1); err != nil {
			return nil, refuse(badEK, "EK certificate %d, %q: %w", i, c.Subject, err)
		}
		if !mayIssueEKs(c) {
			return nil, refuse(badEK, "%q may not issue endorsement key certificates", c.Subject)
		}
		if !named(c, certs[i-1]) {
			return nil, refuse(badEK, "EK certificate %d, %q, is not the issuer of the one before it, %q", i, c.Subject, certs[i-1].Issuer)
		}
	}
	root, err := rootOf(certs[last], roots, func(r *x509.Certificate) error {
		if err := errors.Join(checkUse(r, now), checkIssuer(r, last)); err != nil {
			return err
		}
		return signed(certs[last], r)
	})
	if err != nil {
		return nil, refuse(badEK, "EK certificate, issued by %q: %w", leaf.Issuer, err)
	}
	for i := last - 1; i >= 0; i-- {
		if err := signed(certs[i], certs[i+1]); err != nil {
			return nil, refuse(badEK, "EK certificate %d, issued by %q: %w", i, certs[i].Issuer, err)
		}
	}
	return &endorsement{cert: leaf, chain: slices.Concat(certs, []*x509.Certificate{root}), root: root}, nil
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

// checkIssuer makes the checks for an issuer with `below` other issuers between it and the EK
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

// mayIssueEKs checks an issuer's extended key usages, if it has any, which apply to the
// certificates below it.
func mayIssueEKs(c *x509.Certificate) bool {
	return len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0 ||
		slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) ||
		slices.ContainsFunc(c.UnknownExtKeyUsage, oidEKCertificate.Equal)
}

// handleSAN parses the subject alternative name if it is critical and crypto/x509 does not know it,
// and then removes exactly that extension from the list of unhandled ones.
func handleSAN(c *x509.Certificate) error {
	i := slices.IndexFunc(c.UnhandledCriticalExtensions, oidSubjectAltName.Equal)
	if i < 0 {
		return nil
	}
	for _, ext := range c.Extensions {
		if ext.Id.Equal(oidSubjectAltName) {
			if _, err := ParseTPMName(ext.Value); err != nil {
				return err
			}
			c.UnhandledCriticalExtensions = slices.Delete(slices.Clone(c.UnhandledCriticalExtensions), i, i+1)
			return nil
		}
	}
	return errors.New("is not there")
}

// TPMName is the TPM's description in the subject alternative name of an EK certificate (TCG EK
// Credential Profile, 3.2.9).
type TPMName struct {
	// Manufacturer is "id:" and eight hexadecimal digits (TCG TPM Vendor ID Registry).
	Manufacturer string
	// Model is the manufacturer's name of the product.
	Model string
	// Version is "id:" and the firmware version in hexadecimal digits.
	Version string
}

const maxNameAttribute = 64 // characters

// ParseTPMName parses the value of a subject alternative name extension (RFC 5280, 4.2.1.6) that
// has one directoryName with exactly one manufacturer, model and version.
func ParseTPMName(der []byte) (TPMName, error) {
	var names []asn1.RawValue
	if rest, err := asn1.Unmarshal(der, &names); err != nil || len(rest) > 0 {
		return TPMName{}, errors.New("is not GeneralNames in DER")
	}
	var out TPMName
	found := false
	for _, n := range names {
		if n.Class != asn1.ClassContextSpecific || n.Tag != 4 || !n.IsCompound {
			return TPMName{}, fmt.Errorf("has a name of type %d; only directoryName is understood", n.Tag)
		}
		if found {
			return TPMName{}, errors.New("has two directory names")
		}
		found = true
		if err := out.parse(n.Bytes); err != nil {
			return TPMName{}, err
		}
	}
	if out.Manufacturer == "" || out.Model == "" || out.Version == "" {
		return TPMName{}, errors.New("lacks the TPM's manufacturer, model or version")
	}
	return out, nil
}

// parse reads an RDNSequence. Some vendors put the three attributes into one set, others into three
// sets.
func (n *TPMName) parse(der []byte) error {
	var sets []asn1.RawValue
	if rest, err := asn1.Unmarshal(der, &sets); err != nil || len(rest) > 0 {
		return errors.New("has a malformed directory name")
	}
	for _, set := range sets {
		if set.Class != asn1.ClassUniversal || set.Tag != asn1.TagSet || !set.IsCompound {
			return errors.New("has a malformed directory name")
		}
		for rest := set.Bytes; len(rest) > 0; {
			var a struct {
				Type  asn1.ObjectIdentifier
				Value asn1.RawValue
			}
			var err error
			if rest, err = asn1.Unmarshal(rest, &a); err != nil {
				return errors.New("has a malformed attribute")
			}
			if err := n.set(a.Type, a.Value); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *TPMName) set(oid asn1.ObjectIdentifier, v asn1.RawValue) error {
	var to *string
	switch {
	case oid.Equal(oidTPMManufacturer):
		to = &n.Manufacturer
	case oid.Equal(oidTPMModel):
		to = &n.Model
	case oid.Equal(oidTPMVersion):
		to = &n.Version
	default:
		return fmt.Errorf("has the attribute %s, which is not understood", oid)
	}
	if *to != "" {
		return fmt.Errorf("has the attribute %s twice", oid)
	}
	if v.Class != asn1.ClassUniversal || v.IsCompound || (v.Tag != asn1.TagUTF8String && v.Tag != asn1.TagPrintableString) {
		return fmt.Errorf("attribute %s is no string", oid)
	}
	s := string(v.Bytes)
	if s == "" || len(s) > maxNameAttribute {
		return fmt.Errorf("attribute %s has %d bytes, want 1 to %d", oid, len(s), maxNameAttribute)
	}
	for _, c := range s {
		if c == unicode.ReplacementChar || !unicode.IsPrint(c) {
			return fmt.Errorf("attribute %s has characters that cannot be printed", oid)
		}
	}
	*to = s
	return nil
}
