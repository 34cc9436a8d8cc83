package policyfile_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"flag"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

var update = flag.Bool("update", false, "write the golden files in testdata anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// root returns a certificate authority that is valid from from to to.
func root(t *testing.T, from, to time.Time) string {
	t.Helper()
	name := pkix.Name{CommonName: "Example TPM CA\n- injected"}
	return authority(t, name, name, from, to)
}

// authority returns the certificate of an authority with these names.
func authority(t *testing.T, subject, issuer pkix.Name, from, to time.Time) string {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: subject, NotBefore: from, NotAfter: to,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, &x509.Certificate{Subject: issuer}, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func template(t *testing.T) policyfile.Template {
	t.Helper()
	m, err := policyfile.ParseMeasurements(read(t, "measurements.json"))
	if err != nil {
		t.Fatal(err)
	}
	return policyfile.Template{
		Measurements: []policyfile.Measurements{m},
		Roots:        []policyfile.Root{{PEM: string(read(t, "ek-root.pem")), Operator: true, Key: attest.EKP256}},
		NodeCIDRs:    []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")},
		Roles:        []string{"worker", "control-plane"},
		Classes:      []*attestv1.MachineClass{class(t, "rack-1", firmware)},
	}
}

// firmware holds Reference Values.
const firmware = `{"version": 1, "bank": "sha256", "pcrs": {"0": "` + zeros + `", "2": "` + zeros + `", "3": "` + zeros + `", "7": "` + zeros + `"}}`

const zeros = "0000000000000000000000000000000000000000000000000000000000000000"

func class(t *testing.T, name, text string) *attestv1.MachineClass {
	t.Helper()
	c, err := policyfile.ParseFirmware(name, []byte(text), "sha256")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestBuildWritesTheFilesInTestdata(t *testing.T) {
	plain := template(t)
	full := template(t)
	full.MachineIDs, full.BareMachineIDs = []attest.MachineID{{1, 2, 3}}, []attest.MachineID{{4, 5, 6}}
	full.Platforms = []*attestv1.PlatformRoot{{
		Pem: full.Roots[0].PEM, Provider: "gcp", Key: "ecc-p256", Projects: []string{"our-project"}, Zones: []string{"europe-west3-a"},
		MachineIds: []string{attest.MachineID{7, 8, 9}.String()},
	}}
	full.Nitro = []*attestv1.NitroRoot{{Pem: full.Roots[0].PEM, MachineIds: []string{attest.MachineID{10, 11, 12}.String()}}}
	full.AllowPlainState, full.AnyMachine, full.AnyFirmware, full.Serial = true, true, true, 7
	full.Classes = nil
	other := full.Measurements[0]
	other.Image = "next # and\n- injected"
	other.PCRs = map[string]string{"4": strings.Repeat("a", 64), "9": other.PCRs["9"], "11": strings.Repeat("b", 64)}
	full.Measurements = append(full.Measurements, other)
	full.Roots[0].Operator = false

	for name, tt := range map[string]policyfile.Template{"policy.yaml": plain, "policy-full.yaml": full} {
		t.Run(name, func(t *testing.T) {
			got, err := policyfile.Build(tt)
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(filepath.Join("testdata", name), got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want := read(t, name); !bytes.Equal(got, want) {
				t.Errorf("differs from testdata/%s; look at the difference after `go test ./internal/owner/policyfile -update`\n%s", name, got)
			}
		})
	}
}

func TestTheSameFileGivesTheSameBytesToSign(t *testing.T) {
	text := read(t, "policy-full.yaml")
	p, first, err := policyfile.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if p.Serial() != 7 || !p.AllowsPlainState() || !p.AllowsAddress(netip.MustParseAddr("192.0.2.7")) {
		t.Error("the policy is another one")
	}
	for range 20 {
		if _, again, err := policyfile.Parse(text); err != nil || !bytes.Equal(first, again) {
			t.Fatalf("%v\n%s", err, again)
		}
	}
	if _, again, err := policyfile.Parse(first); err != nil || !bytes.Equal(first, again) {
		t.Errorf("JSON does not stay the same: %v", err)
	}
}

func TestBuildRefuses(t *testing.T) {
	for name, change := range map[string]func(*policyfile.Template){
		"no measurements":               func(p *policyfile.Template) { p.Measurements = nil },
		"no network":                    func(p *policyfile.Template) { p.NodeCIDRs = nil },
		"no root":                       func(p *policyfile.Template) { p.Roots = nil },
		"a vendor's root alone (A6)":    func(p *policyfile.Template) { p.Roots[0].Operator = false },
		"a root that is no certificate": func(p *policyfile.Template) { p.Roots[0].PEM = "x" },
		"an unknown role":               func(p *policyfile.Template) { p.Roles = []string{"king"} },
		"two banks": func(p *policyfile.Template) {
			m := p.Measurements[0]
			m.Bank = "sha384"
			p.Measurements = append(p.Measurements, m)
		},
		"a PCR that one of two images leaves": func(p *policyfile.Template) {
			m := p.Measurements[0]
			m.PCRs = map[string]string{"0": strings.Repeat("0", 64), "4": m.PCRs["4"], "9": m.PCRs["9"], "11": m.PCRs["11"]}
			p.Measurements = append(p.Measurements, m)
		},
		"measurements without what was booted": func(p *policyfile.Template) { p.Measurements[0].PCRs = map[string]string{} },
	} {
		t.Run(name, func(t *testing.T) {
			p := template(t)
			change(&p)
			if b, err := policyfile.Build(p); err == nil {
				t.Errorf("built\n%s", b)
			}
		})
	}
}

func TestParseMeasurementsRefuses(t *testing.T) {
	good := string(read(t, "measurements.json"))
	for name, change := range map[string][2]string{
		"another version":     {`"version": 1`, `"version": 2`},
		"an unknown field":    {`"image"`, `"picture"`},
		"an unknown bank":     {`"sha256"`, `"sha1"`},
		"a short value":       {"0f0f", "0f"},
		"an upper-case value": {"0f0f", "0F0F"},
		"a PCR with a sign":   {`"4"`, `"+4"`},
		"the lock's PCR":      {`"4"`, `"15"`},
		"no PCR 4":            {`"4"`, `"5"`},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(good, change[0], change[1], 1)
			if text == good {
				t.Fatal("nothing was changed")
			}
			if m, err := policyfile.ParseMeasurements([]byte(text)); err == nil {
				t.Errorf("read: %+v", m)
			}
		})
	}
}

func TestParseIsStrict(t *testing.T) {
	good := string(read(t, "policy.yaml"))
	for name, text := range map[string]string{
		"an unknown field":      good + "\nallowEverything: true\n",
		"a field twice":         good + "\nversion: 2\n",
		"a misspelt switch":     strings.Replace(good, "allowPlainState", "allowPlainstate", 1),
		"a version of before":   strings.Replace(good, "version: 2", "version: 1", 1),
		"a version of tomorrow": strings.Replace(good, "version: 2", "version: 3", 1),
		"no classes":            regexp.MustCompile(`(?s)  classes:.*insecure:`).ReplaceAllString(good, "insecure:"),
		"no YAML":               "\t",
		"a file without end":    strings.Repeat("# comment\n", 200_000),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := policyfile.Parse([]byte(text)); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func TestCheckTellsWhatTheOwnerShouldKnow(t *testing.T) {
	now := time.Date(2027, 1, 2, 0, 0, 0, 0, time.UTC)
	p := template(t)
	p.BareMachineIDs = []attest.MachineID{{2}}
	p.Platforms = []*attestv1.PlatformRoot{{Pem: root(t, now.Add(-48*time.Hour), now.Add(24*time.Hour)), Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}}}
	p.Nitro = []*attestv1.NitroRoot{{Pem: root(t, now.Add(-48*time.Hour), now.AddDate(10, 0, 0)), MachineIds: []string{attest.MachineID{3}.String()}}}
	p.AllowPlainState, p.Roles, p.NodeCIDRs = true, nil, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
	p.Roots = []policyfile.Root{
		{PEM: root(t, now.Add(-48*time.Hour), now.Add(-24*time.Hour)), Operator: true, Key: attest.EKP256},
		{PEM: root(t, now.Add(-48*time.Hour), now.Add(24*time.Hour)), Operator: true, Key: attest.EKP256},
		{PEM: root(t, now.Add(24*time.Hour), now.Add(48*time.Hour)), Operator: true, Key: attest.EKP256},
	}
	text, err := policyfile.Build(p)
	if err != nil {
		t.Fatal(err)
	}
	if text, err = policyfile.AddClass(text, 2, &attestv1.MachineClass{Name: "cloud", EventLog: &attestv1.EventLogRules{}}); err != nil {
		t.Fatal(err)
	}
	_, found, err := policyfile.Check(text, now)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range found {
		got = append(got, string(f.Level)+" "+f.Field)
	}
	want := "insecure insecure.allowPlainState, warning controlPlanes, warning roles, warning nodeCidrs, warning tpm2.classes[1], warning tpm2.classes[1], warning tpm2.bareMachineIds, warning tpm2.bareMachineIds, warning tpm2.platformRoots[0].machineIds, warning tpm2.nitroRoots, warning tpm2.machineIds, " +
		"warning tpm2.ekRoots[0], warning tpm2.ekRoots[1], warning tpm2.ekRoots[2], warning tpm2.platformRoots[0]"
	if s := strings.Join(got, ", "); s != want {
		t.Errorf("found %s\nwant  %s", s, want)
	}
	p = template(t)
	twin := p.Measurements[0]
	twin.Image = "twin"
	p.Measurements = append(p.Measurements, twin)
	p.Classes = append(p.Classes, class(t, "rack-2", firmware))
	if text, err = policyfile.Build(p); err != nil {
		t.Fatal(err)
	}
	_, found, err = policyfile.Check(text, now)
	for _, field := range []string{"tpm2.images[1]", "tpm2.classes[1]"} {
		if err != nil || !slices.ContainsFunc(found, func(f policyfile.Finding) bool {
			return f.Field == field && strings.Contains(f.Text, "the same values as")
		}) {
			t.Errorf("%s has the values of another: %v, %v", field, found, err)
		}
	}
	p = template(t)
	p.MachineIDs, p.ControlPlanes = []attest.MachineID{{1}}, []policyfile.ControlPlane{{Machine: attest.MachineID{1}}}
	if text, err = policyfile.Build(p); err != nil {
		t.Fatal(err)
	}
	if _, found, err = policyfile.Check(text, now); err != nil || len(found) != 0 {
		t.Errorf("a policy without fault: %v, %v", found, err)
	}
}

func TestSplitPEM(t *testing.T) {
	one := read(t, "ek-root.pem")
	if got, err := policyfile.SplitPEM(bytes.Repeat(one, 2)); err != nil || len(got) != 2 || got[0] != string(one) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "no PEM", "-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n"} {
		if _, err := policyfile.SplitPEM([]byte(bad)); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"policy.yaml", "policy-full.yaml"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		_, b, err := policyfile.Parse(text)
		if err != nil {
			return
		}
		if _, err := attest.ParsePolicy(b); err != nil {
			t.Fatalf("accepted, but not as it would be signed: %v", err)
		}
	})
}
