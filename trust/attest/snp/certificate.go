package snp

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Extensions of VCEK and VLEK certificates (AMD, Versioned Chip Endorsement Key Certificate and KDS
// Interface Specification, section 3.1). They are compared as a whole: others begin with the same
// numbers.
var (
	oidVersion    = amdOID(1)
	oidProduct    = amdOID(2)
	oidBootLoader = amdOID(3, 1)
	oidTEE        = amdOID(3, 2)
	oidSNP        = amdOID(3, 3)
	oidMicrocode  = amdOID(3, 8)
	oidFMC        = amdOID(3, 9)
	oidHWID       = amdOID(4)
	oidCSP        = amdOID(5)
)

func amdOID(n ...int) asn1.ObjectIdentifier {
	return append(asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 3704, 1}, n...)
}

// endorsed is what a VCEK or VLEK certificate states of its key.
type endorsed struct {
	key      Key
	product  Product
	tcb      TCB
	hwid     []byte // nil: VLEK
	provider string // empty: VCEK
}

// readExtensions parses the extensions, not yet the chain.
func readExtensions(c *x509.Certificate) (endorsed, error) {
	var e endorsed
	value := func(oid asn1.ObjectIdentifier) []byte {
		for _, x := range c.Extensions { // crypto/x509 refuses one that is there twice
			if x.Id.Equal(oid) {
				return x.Value
			}
		}
		return nil
	}
	name, err := ia5String(value(oidProduct))
	if err != nil {
		return e, fmt.Errorf("product name: %w", err)
	}
	line, _, _ := strings.Cut(name, "-") // "Milan-B0": product and stepping
	if e.product = Product(line); !slices.Contains(Products, e.product) {
		return e, fmt.Errorf("product name %q: known are %q", name, Products)
	}
	numbers := []struct {
		oid asn1.ObjectIdentifier
		to  *uint8
	}{{oidVersion, new(uint8)}, {oidBootLoader, &e.tcb.BootLoader}, {oidTEE, &e.tcb.TEE}, {oidSNP, &e.tcb.SNP}, {oidMicrocode, &e.tcb.Microcode}}
	if e.product == Turin {
		numbers = append(numbers, struct {
			oid asn1.ObjectIdentifier
			to  *uint8
		}{oidFMC, &e.tcb.FMC})
	}
	for _, n := range numbers {
		if *n.to, err = number(value(n.oid)); err != nil {
			return e, fmt.Errorf("extension %s: %w", n.oid, err)
		}
	}
	hwid, csp := value(oidHWID), value(oidCSP)
	switch {
	case hwid != nil && csp != nil:
		return e, errors.New("has both a HWID and a CSP_ID")
	case hwid != nil:
		e.key, e.hwid = VCEK, rawHWID(hwid, e.product)
	case csp != nil:
		e.key = VLEK
		if e.provider, err = ia5String(csp); err != nil {
			return e, fmt.Errorf("CSP_ID: %w", err)
		}
	default:
		return e, errors.New("has neither a HWID nor a CSP_ID")
	}
	return e, nil
}

// rawHWID returns the chip's ID. AMD puts the bytes into the extension as they are; some
// certificates have them in an OCTET STRING.
func rawHWID(value []byte, p Product) []byte {
	n := 64
	if p == Turin {
		n = 8
	}
	if len(value) == n+2 && bytes.HasPrefix(value, []byte{asn1.TagOctetString, byte(n)}) {
		return value[2:]
	}
	return value
}

// number reads an INTEGER of one byte.
func number(der []byte) (uint8, error) {
	var n int
	if rest, err := asn1.Unmarshal(der, &n); err != nil || len(rest) > 0 || n < 0 || n > 255 {
		return 0, fmt.Errorf("%x is no number from 0 to 255", der)
	}
	return uint8(n), nil
}

// ia5String reads an IA5String of 1 to 256 printable characters.
func ia5String(der []byte) (string, error) {
	var v asn1.RawValue
	rest, err := asn1.Unmarshal(der, &v)
	if err != nil || len(rest) > 0 || v.Class != asn1.ClassUniversal || v.Tag != asn1.TagIA5String || v.IsCompound || len(v.Bytes) == 0 || len(v.Bytes) > 256 {
		return "", errors.New("is missing or no IA5String of 1 to 256 characters")
	}
	for _, c := range v.Bytes {
		if c < ' ' || c > '~' {
			return "", errors.New("has characters that cannot be printed")
		}
	}
	return string(v.Bytes), nil
}
