package policyfile_test

import (
	"crypto/x509/pkix"
	"slices"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestARootOfATPMVendorIsNoOperators(t *testing.T) {
	org := func(org, name string) pkix.Name { return pkix.Name{Organization: []string{org}, CommonName: name} }
	ours := org("Example", "Example machines")
	for name, tt := range map[string]struct {
		subject, issuer pkix.Name
		vendor          bool
	}{
		"Infineon":                      {subject: org("Infineon Technologies AG", "Infineon OPTIGA(TM) ECC Root CA 2"), vendor: true},
		"STMicroelectronics":            {subject: org("STMicroelectronics NV", "STM TPM ECC Root CA 01"), vendor: true},
		"STMicroelectronics by name":    {subject: pkix.Name{CommonName: "STM TPM EK Root CA"}, vendor: true},
		"Nuvoton":                       {subject: org("Nuvoton Technology Corporation", "Nuvoton TPM Root CA 2111"), vendor: true},
		"Intel":                         {subject: org("Intel Corporation", "www.intel.com"), vendor: true},
		"Intel by name":                 {subject: pkix.Name{CommonName: "www.intel.com"}, vendor: true},
		"AMD":                           {subject: org("Advanced Micro Devices", "AMDTPM"), vendor: true},
		"Google":                        {subject: org("Google LLC", "EK/AK CA Root"), vendor: true},
		"Microsoft":                     {subject: org("Microsoft Corporation", "Microsoft TPM Root Certificate Authority 2014"), vendor: true},
		"IBM":                           {subject: org("IBM", "EK CA"), vendor: true},
		"Nationz":                       {subject: org("Nationz Technologies Inc", "Nationz TPM Root CA"), vendor: true},
		"NSING":                         {subject: org("NSING Technologies Pte Ltd", "NSING TPM Root CA 001"), vendor: true},
		"Atmel":                         {subject: org("Atmel", "Atmel TPM Root Signing Module"), vendor: true},
		"Samsung":                       {subject: org("Samsung Electronics", "TPM CA"), vendor: true},
		"an issuer that is a vendor":    {subject: org("Example", "Sub CA"), issuer: org("Infineon Technologies AG", "Root"), vendor: true},
		"an owner's own":                {subject: ours},
		"an owner's own, of two levels": {subject: ours, issuer: org("Example", "Root")},
		"swtpm's local authority":       {subject: pkix.Name{CommonName: "swtpm-localca"}, issuer: pkix.Name{CommonName: "swtpm-localca-rootca"}},
		"a name with a vendor's in it":  {subject: org("Intelligent Machines", "Licensing Amdahl CA")},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.issuer.String() == "" {
				tt.issuer = tt.subject
			}
			other := authority(t, tt.subject, tt.issuer, time.Now().Add(-time.Hour), time.Now().AddDate(10, 0, 0))
			for _, operator := range []bool{true, false} {
				p := template(t)
				p.MachineIDs = []attest.MachineID{{1}}
				p.Roots = []policyfile.Root{{PEM: string(read(t, "ek-root.pem")), Operator: true, Key: attest.EKP256}, {PEM: other, Operator: operator, Key: attest.EKP256}}
				text, err := policyfile.Build(p)
				if err != nil {
					t.Fatal(err)
				}
				_, found, err := policyfile.Check(text, time.Now())
				if err != nil {
					t.Fatal(err)
				}
				warned := slices.ContainsFunc(found, func(f policyfile.Finding) bool { return f.Field == "tpm2.ekRoots[1].operator" })
				if want := tt.vendor && operator; warned != want {
					t.Errorf("operator %t: warned %t, want %t: %v", operator, warned, want, found)
				}
			}
		})
	}
}
