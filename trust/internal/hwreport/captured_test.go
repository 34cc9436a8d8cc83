package hwreport_test

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var march = time.Date(2026, 3, 20, 0, 0, 0, 0, time.UTC)

func file(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "attest", "hardware", "testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	if p, _ := pem.Decode(b); strings.HasPrefix(path, "snp/") && p != nil {
		return p.Bytes
	}
	return b
}

// vendors are the real ones. No revocation list of AMD was captured.
func vendors() hwreport.Vendors {
	v := hwreport.RealVendors()
	for p, a := range v.AMD {
		a.InsecureNoRevocationLists = true
		v.AMD[p] = a
	}
	return v
}

// collateral is that of March 2026.
func collateral(t testing.TB) *attestv1.Collateral {
	const dir = "tdx/collateral-2026-03/"
	return &attestv1.Collateral{
		TcbInfos:   [][]byte{file(t, dir+"tcb_info_50806f000000.json"), file(t, dir+"tcb_info_90c06f000000.json")},
		QeIdentity: file(t, dir+"td_qe_identity.json"), TcbInfoChain: file(t, dir+"tcb_signing_chain.pem"), QeIdentityChain: file(t, dir+"qe_identity_signing_chain.pem"),
		IntelCrls: [][]byte{file(t, dir+"root_ca_crl.der"), file(t, dir+"pck_crl_platform.der")},
	}
}

// capturedSNP returns a report with its certificate, and the value that it is over.
func capturedSNP(t testing.TB, report, certificate string) hwreport.Evidence {
	b := file(t, "snp/"+report)
	return hwreport.Evidence{
		Want: hardware.ReportData(b[0x50:0x90]), Now: march,
		Report: &attestv1.HardwareReport{Report: &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: b, Certificate: file(t, "snp/"+certificate)}}},
	}
}

// capturedTDX returns a quote, and the value that it is over.
func capturedTDX(t testing.TB, quote string, data int) hwreport.Evidence {
	b := file(t, "tdx/"+quote+"/quote.bin")
	return hwreport.Evidence{
		Want: hardware.ReportData(b[data : data+64]), Now: march,
		Report: &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Tdx{Tdx: &attestv1.TdxQuote{Quote: b}}},
	}
}

// capturedAzure returns what Azure's paravisor has bound to a platform key: on TDX or SEV-SNP.
func capturedAzure(t testing.TB, dir string) hwreport.Evidence {
	t.Helper()
	var all map[string]json.RawMessage
	if err := json.Unmarshal(file(t, "azure/"+dir+"/evidence.json"), &all); err != nil {
		t.Fatal(err)
	}
	if inner, ok := all["evidence"]; ok {
		if err := json.Unmarshal(inner, &all); err != nil {
			t.Fatal(err)
		}
	}
	get := func(name string) []byte {
		var numbers []uint16
		if json.Unmarshal(all[name], &numbers) == nil && len(numbers) > 0 {
			var out []byte
			for _, n := range numbers {
				out = append(out, byte(n))
			}
			return out
		}
		var s string
		if json.Unmarshal(all[name], &s) != nil {
			return nil
		}
		if p, _ := pem.Decode([]byte(s)); p != nil {
			return p.Bytes
		}
		b, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(strings.NewReplacer("+", "-", "/", "_").Replace(s), "="))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	m := &attestv1.AzureReport{HclReport: get("hcl_report"), Certificate: get("vcek"), Quote: get("td_quote")}
	if m.HclReport == nil {
		m.HclReport = get("report")
	}
	_, report, runtime, err := hcl.Split(m.GetHclReport())
	if err != nil {
		t.Fatal(err)
	}
	var r *hcl.Report
	if len(m.GetQuote()) > 0 {
		c := hwreport.CollateralOf(collateral(t), vendors())
		r, err = hcl.VerifyTDX(m.GetQuote(), runtime, c.Intel, tdx.Intel(), march)
	} else {
		r, err = hcl.VerifySNP(snp.Evidence{Report: report, Certificate: m.GetCertificate()}, runtime, vendors().AMD, march)
	}
	if err != nil {
		t.Fatal(err)
	}
	spki, err := x509.MarshalPKIXPublicKey(r.AK)
	if err != nil {
		t.Fatal(err)
	}
	return hwreport.Evidence{Now: march, PlatformKey: sha256.Sum256(spki), Report: &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Azure{Azure: m}}}
}

// policy returns rules by which the captured reports are acceptable: the measurements are theirs.
func policy(t testing.TB, e hwreport.Evidence) *attestv1.HardwarePolicy {
	digest := func(b []byte) []string { return []string{hex.EncodeToString(b[:48])} }
	p := &attestv1.HardwarePolicy{Require: []string{"sev-snp", "tdx", "azure-sev-snp", "azure-tdx"}, Collateral: collateral(t)}
	p.SevSnp = &attestv1.SevSnpRules{
		MinTcb: []*attestv1.SevSnpTcb{tcb("Milan", 0, 0, 0, 0), tcb("Genoa", 0, 0, 0, 0), {Product: "Turin", Fmc: new(uint32), BootLoader: new(uint32), Tee: new(uint32), Snp: new(uint32), Microcode: new(uint32)}}, Keys: []string{"vcek"}, AnyChip: true,
		Measurements: digest(make([]byte, 48)), AllowGuestPolicy: []string{"SMT", "MIGRATE_MA"},
	}
	p.AzureSevSnp = &attestv1.SevSnpRules{MinTcb: p.GetSevSnp().GetMinTcb(), Keys: []string{"vcek"}, AnyChip: true, IdKeys: digest(make([]byte, 48)), AllowGuestPolicy: []string{"SMT"}}
	p.Tdx = &attestv1.TdxRules{
		Statuses: []string{"UpToDate"}, Modules: []*attestv1.TdxModule{{Major: 1, Svn: new(uint32(5))}}, Mrtds: digest(make([]byte, 48)), RequireAttributes: []string{"SEPT_VE_DISABLE"},
		AllowAttributes: []string{"PKS", "PERFMON"},
	}
	p.AzureTdx = &attestv1.TdxRules{Statuses: []string{"UpToDate"}, Modules: []*attestv1.TdxModule{{Major: 1, Svn: new(uint32(5))}}, Mrtds: digest(make([]byte, 48)), RequireAttributes: []string{"SEPT_VE_DISABLE"}}
	if b := e.Report.GetSevSnp().GetReport(); b != nil {
		p.SevSnp.Measurements = digest(b[0x90:])
	}
	if b := e.Report.GetTdx().GetQuote(); b != nil {
		at := 48 + 0x88
		if b[0] == 5 {
			at += 6
		}
		p.Tdx.Mrtds = digest(b[at:])
	}
	if a := e.Report.GetAzure(); a != nil && len(a.GetQuote()) > 0 {
		p.AzureTdx.Mrtds = digest(a.GetQuote()[48+0x88:])
	} else if a != nil {
		p.AzureSevSnp.IdKeys = digest(a.GetHclReport()[0x20+0xE0:])
	}
	return p
}

func check(t testing.TB, p *attestv1.HardwarePolicy, e hwreport.Evidence) (string, error) {
	t.Helper()
	r, err := hwreport.Parse(p, vendors())
	if err != nil {
		t.Fatal(err)
	}
	return r.Check(e)
}

// TestCapturedReportsAreAppraised has each kind and product. The value that a report is over is its
// own: no captured report is over a session of Muster.
func TestCapturedReportsAreAppraised(t *testing.T) {
	for name, tt := range map[string]struct {
		evidence hwreport.Evidence
		change   func(*attestv1.HardwarePolicy)
		want     string // beginning of the description
	}{
		"Milan, VCEK":    {capturedSNP(t, "milan-v2-vcek/report.bin", "milan-v2-vcek/vcek.der"), nil, "SEV-SNP on Milan, key vcek"},
		"Genoa":          {capturedSNP(t, "genoa-v5-live/report.bin", "genoa-v5-live/vcek.der"), nil, "SEV-SNP on Genoa, key vcek"},
		"Azure, Milan":   {capturedAzure(t, "snp-milan-rv3-live"), nil, "Azure, Secure Boot true, SEV-SNP on Milan"},
		"Azure, Genoa":   {capturedAzure(t, "snp-genoa-rv3"), nil, "Azure, Secure Boot true, SEV-SNP on Genoa"},
		"TDX 1.5":        {capturedTDX(t, "v5-td15-google", 48+6+0x208), nil, "TDX on model 90c06f000000"},
		"Azure, TDX 1.0": {capturedAzure(t, "tdx-live"), nil, "Azure, Secure Boot true, TDX on model 90c06f000000"},
	} {
		p := policy(t, tt.evidence)
		if tt.change != nil {
			tt.change(p)
		}
		words, err := check(t, p, tt.evidence)
		if err != nil || !strings.HasPrefix(words, tt.want) {
			t.Errorf("%s: %q, %v", name, words, err)
		}
		wrong := tt.evidence
		wrong.Want[0] ^= 1
		wrong.PlatformKey[0] ^= 1
		if _, err := check(t, p, wrong); attest.ReasonOf(err) != hardware.Binding {
			t.Errorf("%s, for another session or machine: %v", name, err)
		}
	}
	azure := capturedAzure(t, "snp-milan-rv3-live")
	if words, err := check(t, policy(t, azure), azure); err != nil || !strings.Contains(words, ", ID key 942fd93ebde6ea7a96efadeafc60f1c6b3d10e703b1dafd7555b92f7f3d32d0e006767648cba5b102af3d65756af4177, guest SVN 10,") {
		t.Errorf("the signer of the paravisor and its version: %q, %v", words, err)
	}
}

// TestAzuresReportIsForItsOwnKey has a report with the certificate by which Azure named its key. Of its HCL
// report only the JSON text was captured.
func TestAzuresReportIsForItsOwnKey(t *testing.T) {
	tail := file(t, "azure/tdx-2026-full/runtime-data.bin")
	runtime := tail[20 : 20+binary.LittleEndian.Uint32(tail[16:])]
	cert, err := x509.ParseCertificate(file(t, "azure/tdx-2026-full/ak-cert.der"))
	if err != nil {
		t.Fatal(err)
	}
	onTDX := hwreport.Evidence{Now: march, PlatformKey: sha256.Sum256(cert.RawSubjectPublicKeyInfo), Report: &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Azure{Azure: &attestv1.AzureReport{
		HclReport: hardwaretest.HCL(hcl.TDX, make([]byte, snp.ReportSize), runtime), Quote: file(t, "azure/tdx-2026-full/td-quote.bin"),
	}}}}
	strayKey, _ := pem.Decode(file(t, "azure/older-samples/akpub.pem"))
	for name, e := range map[string]hwreport.Evidence{"SEV-SNP": capturedAzure(t, "snp-milan-rv3-live"), "TDX": onTDX} {
		if _, err := check(t, policy(t, e), e); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for other, key := range map[string][sha256.Size]byte{"another machine's key": sha256.Sum256(strayKey.Bytes), "no key": {}} {
			e.PlatformKey = key
			if _, err := check(t, policy(t, e), e); attest.ReasonOf(err) != hardware.Binding { // A10
				t.Errorf("%s, %s: %v", name, other, err)
			}
		}
	}
}

// TestCapturedReportsThatAreRefused has the oddities that the rules must refuse; those of the report
// itself are in packages snp, tdx and hcl.
func TestCapturedReportsThatAreRefused(t *testing.T) {
	vlek := capturedSNP(t, "milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der")
	vlek.Now = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)
	if c, err := x509.ParseCertificate(vlek.Report.GetSevSnp().GetCertificate()); err != nil {
		t.Fatal(err)
	} else {
		vlek.Now = c.NotBefore.Add(time.Hour)
	}
	asVLEK := func(p *attestv1.HardwarePolicy) {
		p.SevSnp.Keys, p.SevSnp.AnyChip, p.SevSnp.Providers, p.SevSnp.MaxVmpl = []string{"vlek"}, false, []string{"CN=cc-us-east-2.amazonaws.com"}, 1
	}
	debug := capturedSNP(t, "milan-v2-gosevguest/report.bin", "milan-v2-gosevguest/vcek.der")
	spoiled := capturedSNP(t, "milan-v2-vcek/report.bin", "milan-v2-vcek/vcek-tampered-a.der")
	debugTD := capturedTDX(t, "v4-debug", 48+0x208)
	ended := capturedTDX(t, "v5-td15-google", 48+6+0x208)
	ended.Now = ended.Now.Add(60 * 24 * time.Hour)
	for name, tt := range map[string]struct {
		evidence hwreport.Evidence
		change   func(*attestv1.HardwarePolicy)
		want     attestv1.Reason
	}{
		"VLEK where the policy lists VCEKs":   {vlek, nil, hardware.Policy},
		"VLEK of another provider":            {vlek, func(p *attestv1.HardwarePolicy) { asVLEK(p); p.SevSnp.Providers[0] += "2" }, hardware.Policy},
		"VMPL 1 where 0 is the highest":       {vlek, func(p *attestv1.HardwarePolicy) { asVLEK(p); p.SevSnp.MaxVmpl = 0 }, hardware.Policy},
		"guest that allows debugging":         {debug, nil, hardware.Policy},
		"certificate that AMD has not signed": {spoiled, nil, hardware.Untrusted},
		"debug TD": {debugTD, func(p *attestv1.HardwarePolicy) {
			p.Tdx.Modules, p.Tdx.Statuses = []*attestv1.TdxModule{{Svn: new(uint32)}}, []string{"UpToDate", "OutOfDate"}
		}, hardware.Policy},
		"debug TD on an old platform": {debugTD, nil, hardware.TCB},
		"collateral that has ended":   {ended, nil, hardware.Collateral},
	} {
		p := policy(t, tt.evidence)
		if tt.change != nil {
			tt.change(p)
		}
		if _, err := check(t, p, tt.evidence); attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := policy(t, vlek)
	asVLEK(p)
	if words, err := check(t, p, vlek); err != nil || !strings.Contains(words, "key vlek") {
		t.Errorf("the VLEK with its provider and VMPL listed: %q, %v", words, err)
	}
}
