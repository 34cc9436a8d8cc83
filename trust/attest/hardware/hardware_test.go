package hardware_test

import (
	"bytes"
	"encoding/hex"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The value is that of Python's hashlib over the formula of docs/attested-tls.md.
func TestReportDataEqualTheVectorOfAnIndependentProgram(t *testing.T) {
	name := append([]byte{0x00, 0x0B}, bytes.Repeat([]byte{0x11}, 32)...)
	var root [32]byte
	for i := range root {
		root[i] = byte(i)
	}
	got := hardware.NewReportData(name, root)
	const want = "866a12d0a8fc4b3a0cd75b9a8d33c5c0417698e7a7c28e01fa501d034ecfab3dcad91ad9f55a199288bba37d6468619e1b164b0e0c8f728f06d0362d69537266"
	if hex.EncodeToString(got[:]) != want {
		t.Errorf("%x, want %s", got, want)
	}
	if hardware.NewReportData(append(name, 0), [32]byte(append(root[1:], 0))) == got || hardware.NewReportData(nil, root) == got {
		t.Error("another AK name has the same value")
	}
	root[31]++
	if hardware.NewReportData(name, root) == got {
		t.Error("another root has the same value")
	}
}

func TestABindingIsComparedWithSomething(t *testing.T) {
	for name, tt := range map[string]struct {
		got, want hardware.ReportData
		refused   bool
	}{
		"equal":                   {hardware.ReportData{1}, hardware.ReportData{1}, false},
		"different in the last":   {hardware.ReportData{1}, hardware.ReportData{1, 63: 1}, true},
		"empty report":            {hardware.ReportData{}, hardware.ReportData{1}, true},
		"nothing to compare with": {hardware.ReportData{1}, hardware.ReportData{}, true},
		"both empty":              {hardware.ReportData{}, hardware.ReportData{}, true},
	} {
		err := hardware.CheckBinding(tt.got, tt.want)
		if tt.refused != (err != nil) || tt.refused && attest.ReasonOf(err) != hardware.Binding {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The issuer's own fields count, whatever its signature is good for.
func TestAnIssuerIsAnAuthorityWithTheRightName(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	if err := hardware.CheckIssued(v.VCEK.Cert, v.Root.Cert, hardwaretest.Now); err != nil {
		t.Fatal(err)
	}
	old := *v.Root.Cert // as a certificate of version 1, which has no basic constraints
	old.Version, old.BasicConstraintsValid, old.IsCA = 1, false, false
	if err := hardware.CheckIssued(v.VCEK.Cert, &old, hardwaretest.Now); err == nil {
		t.Error("an issuer of version 1 is an authority")
	}
	list := v.VCEK.CRL(t, nil)
	if err := hardware.CheckRevoked([][]byte{list}, v.VCEK.Cert, hardwaretest.Now); err != nil {
		t.Fatal(err)
	}
	if err := hardware.CheckRevoked([][]byte{v.Renamed(t).CRL(t, nil)}, v.VCEK.Cert, hardwaretest.Now); attest.ReasonOf(err) != hardware.Collateral {
		t.Errorf("a list by the key under another name: %v", err)
	}
}

func TestListsOfCertificates(t *testing.T) {
	root, err := os.ReadFile("../tdx/intel.pem")
	if err != nil {
		t.Fatal(err)
	}
	der := bytes.Replace(root, []byte("CERTIFICATE"), []byte("PRIVATE KEY"), 2)
	for name, tt := range map[string]struct {
		pem []byte
		n   int
		ok  bool
	}{
		"one":                     {root, 1, true},
		"with NUL at the end":     {append(bytes.Clone(root), 0), 1, true},
		"two":                     {append(bytes.Clone(root), root...), 2, true},
		"two instead of one":      {append(bytes.Clone(root), root...), 1, false},
		"one instead of two":      {root, 2, false},
		"none":                    {nil, 1, false},
		"another type":            {der, 1, false},
		"text before":             {append([]byte("text\n"), root...), 1, false},
		"text after":              {append(bytes.Clone(root), "text"...), 1, false},
		"content that is cut off": {bytes.Replace(root, []byte("MII"), []byte("MIA"), 1), 1, false},
	} {
		list, err := hardware.ParsePEM(tt.pem, tt.n)
		if tt.ok != (err == nil) || tt.ok && len(list) != tt.n {
			t.Errorf("%s: %d certificates, %v", name, len(list), err)
		}
	}
}

func FuzzParsePEM(f *testing.F) {
	root, err := os.ReadFile("../tdx/intel.pem")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(root)
	f.Fuzz(func(t *testing.T, b []byte) {
		if list, err := hardware.ParsePEM(b, 1); err == nil && len(list) != 1 {
			t.Fatal(len(list))
		}
	})
}
