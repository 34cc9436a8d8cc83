package platformak

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// captured returns the certificates of a file in testdata.
func captured(t testing.TB, name string) (out []*x509.Certificate) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".pem"))
	if err != nil {
		t.Fatal(err)
	}
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			return out
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		out, text = append(out, c), rest
	}
}

func TestCapturedCertificates(t *testing.T) {
	early, y2026, late := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC), time.Date(2027, 8, 1, 0, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		file    string
		now     time.Time
		refused string // part of the error; empty: genuine
		want    checked.Instance
	}{
		"GCP, SEV-SNP":                      {"gcp-snp", early, "", checked.Instance{Provider: GCP, Project: "lockboot", ProjectNumber: 0x363B54378C, Zone: "us-central1-f", ID: 0x2F61D1C7B72DF40C, Name: "instance-20260202-065609"}},
		"GCP, TDX":                          {"gcp-tdx", early, "", checked.Instance{Provider: GCP, Project: "lockboot", ProjectNumber: 0x363B54378C, Zone: "us-central1-a", ID: 0x1DB71A9FB72CE19F, Name: "instance-20260203-023447"}},
		"GCP of 2022":                       {"gcp-2022-ecc-sign", early, "", checked.Instance{Provider: GCP, Project: "google.com:wuale-gcp-testing", ProjectNumber: 0x1B5A475C69, Zone: "us-central1-a", ID: 0x030878C5BDD3D99D, Name: "cs-debug-pca"}},
		"GCP of 2022, RSA":                  {"gcp-2022-rsa-sign", early, "", checked.Instance{Provider: GCP, Project: "google.com:wuale-gcp-testing", ProjectNumber: 0x1B5A475C69, Zone: "us-central1-a", ID: 0x030878C5BDD3D99D, Name: "cs-debug-pca"}},
		"GCP of 2022, older authority":      {"gcp-older-ecc-sign", early, "", checked.Instance{Provider: GCP, Project: "google.com:wuale-gcp-testing", ProjectNumber: 0x1B5A475C69, Zone: "us-central1-a", ID: 0x50373D81BDED33F0, Name: "cs-debug"}},
		"GCP before it is valid":            {"gcp-snp", early.AddDate(-1, 0, 0), "valid from", checked.Instance{}},
		"an endorsement key of GCP":         {"gcp-2022-ecc-enc", early, "key usage", checked.Instance{}},
		"an older endorsement key of GCP":   {"gcp-older-ecc-enc", early, "key usage", checked.Instance{}},
		"Azure, Trusted Launch":             {"azure-trustedlaunch", y2026, "", checked.Instance{Provider: Azure, Name: "378964f8555f.TrustedVM.Azure.windows.net"}},
		"Azure, Trusted Launch, CA 03":      {"azure-trustedlaunch-03", y2026, "", checked.Instance{Provider: Azure, Name: "f859864a6a31.TrustedVM.Azure.windows.net"}},
		"Azure, Trusted Launch, expired":    {"azure-trustedlaunch", late, "valid from", checked.Instance{}},
		"Azure, confidential":               {"azure-confidential", early, "", checked.Instance{Provider: Azure}},
		"Azure, confidential, a year later": {"azure-confidential", late, "valid from", checked.Instance{}},
	} {
		t.Run(name, func(t *testing.T) {
			certs := captured(t, tt.file)
			last := len(certs) - 1
			instance, err := Identify(certs[0])
			if err == nil {
				err = endorsement.HandleSAN(certs[0])
			}
			var path []*x509.Certificate
			if err == nil {
				path, err = chain.Path(certs[:last], certs[last:], tt.now)
			}
			if tt.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tt.refused) {
					t.Errorf("%v, want an error about %q", err, tt.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if tt.want.Name == "" {
				tt.want.Name = instance.Name
			}
			if len(path) != len(certs) || instance != tt.want {
				t.Errorf("%d certificates, %+v", len(path), instance)
			}
			// The issuer of the key may be listed in place of the root.
			if _, err := chain.Path(certs[:1], certs[1:2], tt.now); err != nil {
				t.Error(err)
			}
			if _, err := chain.Path(certs[:last], captured(t, map[bool]string{true: "azure-trustedlaunch", false: "gcp-snp"}[tt.want.Provider == GCP])[1:2], tt.now); err == nil {
				t.Error("it chains to an authority of the other cloud")
			}
		})
	}
}

// The policy must list the issuer, and an owner cannot read the certificate in the TPM of a machine without logins.
func TestARefusalNamesTheAddressOfTheIssuer(t *testing.T) {
	// Google's have one name and different keys.
	other := captured(t, "gcp-2022-ecc-sign")[1:2]
	for file, want := range map[string]string{
		"gcp-snp":             `C=US", whose certificate, by its own statement, is at "http://privateca-content-65d53b14-0000-212a-a633-883d24f57bb8.storage.googleapis.com/0c3e79eb0898d02ebb0a/ca.crt"`,
		"azure-trustedlaunch": `"CN=Azure Cloud Virtual TPM CA - 11", whose certificate, by its own statement, is at "http://primary-cdn.pki.core.windows.net/eastus/cacerts/azurevtpmicapki/azurevtpmicause/cert.cer"`,
		"azure-confidential":  `"CN=Global Virtual TPM CA - 03", and names no address`,
	} {
		if _, err := chain.Path(captured(t, file)[:1], other, time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error about %s", file, err, want)
		}
	}
}

func TestMachineIDsDependOnKeyAndInstanceAlone(t *testing.T) {
	leaf, other := captured(t, "gcp-snp")[0], captured(t, "gcp-tdx")[0]
	i, err := Identify(leaf)
	if err != nil {
		t.Fatal(err)
	}
	id := MachineID(leaf, i)
	renamed := i
	renamed.Name, renamed.Zone, renamed.Project = "x", "y", "z"
	if MachineID(leaf, renamed) != id {
		t.Error("names are part of it")
	}
	for name, change := range map[string]func(*checked.Instance){
		"provider": func(i *checked.Instance) { i.Provider = Azure },
		"project":  func(i *checked.Instance) { i.ProjectNumber++ },
		"instance": func(i *checked.Instance) { i.ID++ },
	} {
		j := i
		change(&j)
		if MachineID(leaf, j) == id {
			t.Errorf("another %s has the same ID", name)
		}
	}
	if MachineID(other, i) == id {
		t.Error("another key has the same ID")
	}
}

func TestInstancesThatAreRefused(t *testing.T) {
	genuine := func() *x509.Certificate { return captured(t, "gcp-snp")[0] }
	at := func(c *x509.Certificate) *pkix.Extension {
		for i, e := range c.Extensions {
			if e.Id.Equal(oidGCEInstance) {
				return &c.Extensions[i]
			}
		}
		t.Fatal("no extension")
		return nil
	}
	azure := func(name string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			*c = *captured(t, "azure-trustedlaunch")[0]
			c.Subject.CommonName = name
		}
	}
	for name, tt := range map[string]struct {
		change func(c *x509.Certificate)
		want   string // part of the error; empty: none
	}{
		"no change":                     {func(*x509.Certificate) {}, ""},
		"a longer OID":                  {func(c *x509.Certificate) { e := at(c); e.Id = append(asn1.ObjectIdentifier{}, append(e.Id, 1)...) }, "neither"},
		"a shorter OID":                 {func(c *x509.Certificate) { e := at(c); e.Id = e.Id[:len(e.Id)-1] }, "neither"},
		"the extension twice":           {func(c *x509.Certificate) { c.Extensions = append(c.Extensions, *at(c)) }, "twice"},
		"bytes behind it":               {func(c *x509.Certificate) { e := at(c); e.Value = append(bytes.Clone(e.Value), 0) }, "malformed"},
		"cut short":                     {func(c *x509.Certificate) { e := at(c); e.Value = e.Value[:len(e.Value)-1] }, "malformed"},
		"not in production":             {func(c *x509.Certificate) { e := at(c); e.Value = bytes.Clone(e.Value); e.Value[83] = 0 }, "production"},
		"no security properties":        {func(c *x509.Certificate) { e := at(c); e.Value = bytes.Clone(e.Value[:70]); e.Value[1] = 68 }, "malformed"},
		"a zone that cannot be printed": {func(c *x509.Certificate) { e := at(c); e.Value = bytes.Clone(e.Value); e.Value[5] = 7 }, "printable"},
		"a negative instance":           {func(c *x509.Certificate) { e := at(c); e.Value = bytes.Clone(e.Value); e.Value[36] = 0xFF }, "range"},
		"a key that also encrypts":      {func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageKeyEncipherment }, "key usage"},
		"no key usage":                  {func(c *x509.Certificate) { c.KeyUsage = 0 }, "key usage"},
		"an authority":                  {func(c *x509.Certificate) { c.IsCA = true }, "authority"},
		"an unusual encoding": {func(c *x509.Certificate) {
			c.RawSubjectPublicKeyInfo = append([]byte{}, c.RawSubjectPublicKeyInfo[1:]...)
		}, "encoding"},
		"Azure":                     {azure("0a.ConfidentialVM.Azure.windows.net"), ""},
		"Azure with another domain": {azure("0a.TrustedVM.Azure.windows.net.example"), "not that of"},
		"Azure without a name":      {azure(".TrustedVM.Azure.windows.net"), "not that of"},
		"Azure with two names":      {azure("a.b.TrustedVM.Azure.windows.net"), "not that of"},
		"Azure without the usage":   {func(c *x509.Certificate) { azure("0a.TrustedVM.Azure.windows.net")(c); c.UnknownExtKeyUsage = nil }, "neither"},
	} {
		t.Run(name, func(t *testing.T) {
			c := genuine()
			tt.change(c)
			_, err := Identify(c)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want an error about %q", err, tt.want)
			}
		})
	}
}

func FuzzInstance(f *testing.F) {
	for _, e := range captured(f, "gcp-snp")[0].Extensions {
		f.Add(e.Value)
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		i, err := parseGCE(der)
		if err == nil && (i.Provider != GCP || !printable(i.Project) || !printable(i.Zone) || !printable(i.Name) || i.ID == 0 || i.ProjectNumber == 0) {
			t.Fatalf("%+v", i)
		}
	})
}
