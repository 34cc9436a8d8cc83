package endorsement

import (
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"unicode"
)

// TCG EK Credential Profile for TPM 2.0, version 2.5, section 3.2.9.
var (
	oidSubjectAltName  = asn1.ObjectIdentifier{2, 5, 29, 17}
	oidTPMManufacturer = asn1.ObjectIdentifier{2, 23, 133, 2, 1}
	oidTPMModel        = asn1.ObjectIdentifier{2, 23, 133, 2, 2}
	oidTPMVersion      = asn1.ObjectIdentifier{2, 23, 133, 2, 3}
)

// HandleSAN parses the subject alternative name if it is critical and crypto/x509 does not know it,
// and then removes exactly that extension from the list of unhandled ones.
func HandleSAN(c *x509.Certificate) error {
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
