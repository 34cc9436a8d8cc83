package policyfile

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"slices"
	"strings"
	"unicode"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// tpmVendors are words in the names of authorities that certify TPMs of many owners: vendors of TPMs, clouds, and the public authorities of earlier
// vendors. They are in lower case, with one space between words. The list need not be complete: it is only for a warning.
var tpmVendors = []string{
	"advanced micro devices", "amd", "amdtpm", "atmel", "broadcom", "globalsign", "google", "ibm", "infineon", "intel", "microsoft", "nationz", "nsing", "nuvoton",
	"qualcomm", "samsung", "sinosun", "stm tpm", "stmicroelectronics", "verisign", "winbond",
}

// ofTPMVendor reports whether subject or issuer of a certificate has the name of a known TPM vendor, as whole words: “Intelligent Machines” is none.
func ofTPMVendor(c *x509.Certificate) bool {
	var names []string
	for _, n := range []pkix.Name{c.Subject, c.Issuer} {
		names = append(append(names, n.CommonName), n.Organization...)
	}
	words := strings.FieldsFunc(strings.ToLower(strings.Join(names, " ")), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	text := " " + strings.Join(words, " ") + " "
	return slices.ContainsFunc(tpmVendors, func(v string) bool { return strings.Contains(text, " "+v+" ") })
}

// operatorRoots returns the fields of the roots that by the policy certify only the owner's machines.
func operatorRoots(m *attestv1.Policy) (fields []string) {
	for i, r := range m.GetTpm2().GetEkRoots() {
		if r.GetOperator() {
			fields = append(fields, fmt.Sprintf("tpm2.ekRoots[%d]", i))
		}
	}
	return fields
}
