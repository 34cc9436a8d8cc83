package tpm2

import (
	"bytes"
	"crypto/rsa"
	"crypto/x509"
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
	oidEKCertificate   = asn1.ObjectIdentifier{2, 23, 133, 8, 1} // tcg-kp-EKCertificate
	oidTPMManufacturer = asn1.ObjectIdentifier{2, 23, 133, 2, 1}
	oidTPMModel        = asn1.ObjectIdentifier{2, 23, 133, 2, 2}
	oidTPMVersion      = asn1.ObjectIdentifier{2, 23, 133, 2, 3}
)

// The largest RSA keys of certificates that a peer sends.
const (
	maxRSABits     = 4096
	maxRSAExponent = 1<<16 + 1
)

// endorsement is an endorsement key that a root vouches for.
type endorsement struct {
	cert *x509.Certificate
	root *x509.Certificate
}

// verifyEK checks the chain from the endorsement key's certificate to one of the roots.
// EVIDENCE_MALFORMED: no certificates; EK_UNTRUSTED: everything else.
func verifyEK(ders [][]byte, roots []*x509.Certificate, now time.Time) (*endorsement, error) {
	certs := make([]*x509.Certificate, len(ders))
	for i, der := range ders {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, refuse(malformed, "EK certificate %d: %w", i, err)
		}
		// Checking a signature takes time with the square of the modulus, and strangers
		// choose these keys.
		if k, ok := c.PublicKey.(*rsa.PublicKey); ok && (k.N.BitLen() > maxRSABits || k.E > maxRSAExponent) {
			return nil, refuse(badEK, "EK certificate %d has an RSA key of %d bits with exponent %d", i, k.N.BitLen(), k.E)
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
	pool, intermediates := x509.NewCertPool(), x509.NewCertPool()
	for _, r := range roots {
		pool.AddCert(r)
	}
	for _, c := range certs[1:] {
		if !mayIssueEKs(c) {
			return nil, refuse(badEK, "%q may not issue endorsement key certificates", c.Subject)
		}
		intermediates.AddCert(c)
	}
	chains, err := leaf.Verify(x509.VerifyOptions{
		Roots: pool, Intermediates: intermediates, CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}, // checked above: crypto/x509 has no name for it
	})
	if err != nil {
		return nil, refuse(badEK, "EK certificate, issued by %q: %w", leaf.Issuer, err)
	}
	chain := chains[0]
	return &endorsement{cert: leaf, root: chain[len(chain)-1]}, nil
}

// mayIssueEKs applies an issuer's extended key usages, if it has any, to those below it.
func mayIssueEKs(c *x509.Certificate) bool {
	return len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0 ||
		slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) ||
		slices.ContainsFunc(c.UnknownExtKeyUsage, oidEKCertificate.Equal)
}

// handleSAN parses the subject alternative name where it is critical and crypto/x509 does
// not know it, and then takes exactly that one off the list of unhandled extensions.
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

// TPMName is what the subject alternative name of an EK certificate says about the TPM
// (TCG EK Credential Profile, 3.2.9).
type TPMName struct {
	// Manufacturer is "id:" and eight hexadecimal digits (TCG TPM Vendor ID Registry).
	Manufacturer string
	// Model is the manufacturer's name of the part.
	Model string
	// Version is "id:" and the firmware version in hexadecimal digits.
	Version string
}

const maxNameAttribute = 64 // characters

// ParseTPMName parses the value of a subject alternative name extension (RFC 5280,
// 4.2.1.6) that has one directoryName with exactly one manufacturer, model and version.
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

// parse reads an RDNSequence. Some vendors put the three into one set, some into three.
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
