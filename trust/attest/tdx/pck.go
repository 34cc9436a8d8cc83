package tdx

import (
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
)

// oidSGX is the extension of PCK certificates (Intel SGX PCK Certificate and CRL Profile
// Specification, section 1.3.5).
var oidSGX = asn1.ObjectIdentifier{1, 2, 840, 113741, 1, 13, 1}

func sgxOID(n ...int) asn1.ObjectIdentifier {
	return append(append(asn1.ObjectIdentifier{}, oidSGX...), n...)
}

// pckExtension is what a PCK's certificate states of its platform.
type pckExtension struct {
	components   [16]uint8 // SGX TCB components
	pceSVN       uint16
	fmspc, pceID string // lower-case hexadecimal digits
}

// attribute is one entry of the extension. Its value has various types.
type attribute struct {
	ID    asn1.ObjectIdentifier
	Value asn1.RawValue
}

// readPCK parses the extension. Entries are compared by their whole identifier.
func readPCK(c *x509.Certificate) (out pckExtension, err error) {
	for _, x := range c.Extensions {
		if !x.Id.Equal(oidSGX) {
			continue
		}
		all, err := attributes(x.Value)
		if err != nil {
			return out, err
		}
		tcb, err := attributes(fullBytes(all, sgxOID(2)))
		if err != nil {
			return out, fmt.Errorf("TCB: %w", err)
		}
		for i := range out.components {
			n, err := integer(tcb, sgxOID(2, i+1), 0xFF)
			if err != nil {
				return out, err
			}
			out.components[i] = uint8(n)
		}
		n, err := integer(tcb, sgxOID(2, 17), 0xFFFF)
		if err != nil {
			return out, err
		}
		out.pceSVN = uint16(n)
		if out.pceID, err = octets(all, sgxOID(3), 2); err != nil {
			return out, err
		}
		out.fmspc, err = octets(all, sgxOID(4), 6)
		return out, err
	}
	return out, errors.New("lacks the extension of PCK certificates")
}

func attributes(der []byte) (out []attribute, err error) {
	if rest, err := asn1.Unmarshal(der, &out); err != nil || len(rest) > 0 {
		return nil, errors.New("the extension of PCK certificates is malformed")
	}
	for i, a := range out {
		for _, b := range out[:i] {
			if a.ID.Equal(b.ID) {
				return nil, fmt.Errorf("the extension of PCK certificates has %s twice", a.ID)
			}
		}
	}
	return out, nil
}

func find(all []attribute, id asn1.ObjectIdentifier) asn1.RawValue {
	for _, a := range all {
		if a.ID.Equal(id) {
			return a.Value
		}
	}
	return asn1.RawValue{}
}

func fullBytes(all []attribute, id asn1.ObjectIdentifier) []byte { return find(all, id).FullBytes }

func integer(all []attribute, id asn1.ObjectIdentifier, most int) (int, error) {
	var n int
	if rest, err := asn1.Unmarshal(fullBytes(all, id), &n); err != nil || len(rest) > 0 || n < 0 || n > most {
		return 0, fmt.Errorf("%s is no number from 0 to %d", id, most)
	}
	return n, nil
}

func octets(all []attribute, id asn1.ObjectIdentifier, size int) (string, error) {
	var b []byte
	if rest, err := asn1.Unmarshal(fullBytes(all, id), &b); err != nil || len(rest) > 0 || len(b) != size {
		return "", fmt.Errorf("%s has not %d bytes", id, size)
	}
	return hex.EncodeToString(b), nil
}
