package hcl_test

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
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
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var march = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

func file(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "hardware", "testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func amd() snp.Authorities {
	out := snp.AMD()
	for p, a := range out {
		a.InsecureNoRevocationLists = true // none was captured
		out[p] = a
	}
	return out
}

// bytesOf decodes a value of captured JSON: an array of numbers, PEM, or base64.
func bytesOf(t testing.TB, raw json.RawMessage) []byte {
	t.Helper()
	var numbers []uint16
	if json.Unmarshal(raw, &numbers) == nil {
		var out []byte
		for _, n := range numbers {
			out = append(out, byte(n))
		}
		return out
	}
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		t.Fatal(err)
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

// captured returns an HCL report and the certificate of its VCEK.
func captured(t testing.TB, dir string) (report, vcek []byte) {
	t.Helper()
	if dir == "snp-milan-rv2" {
		p, _ := pem.Decode(file(t, "azure/"+dir+"/vcek-chain.pem"))
		return file(t, "azure/"+dir+"/hcl-report.bin"), p.Bytes
	}
	all := map[string]json.RawMessage{}
	if err := json.Unmarshal(file(t, "azure/"+dir+"/evidence.json"), &all); err != nil {
		t.Fatal(err)
	}
	if inner, ok := all["evidence"]; ok {
		if err := json.Unmarshal(inner, &all); err != nil {
			t.Fatal(err)
		}
	}
	if all["hcl_report"] == nil {
		all["hcl_report"] = all["report"]
	}
	if all["vcek"] == nil {
		return bytesOf(t, all["hcl_report"]), nil
	}
	return bytesOf(t, all["hcl_report"]), bytesOf(t, all["vcek"])
}

func verifySNP(t testing.TB, dir string) (*hcl.Report, error) {
	b, vcek := captured(t, dir)
	kind, report, runtime, err := hcl.Split(b)
	if err != nil {
		return nil, err
	}
	if kind != hcl.SNP {
		t.Fatalf("%s is of kind %d", dir, kind)
	}
	return hcl.VerifySNP(snp.Evidence{Report: report, Certificate: vcek}, runtime, amd(), march)
}

// intel is the collateral of March 2026.
func intel(t testing.TB) tdx.Collateral {
	const dir = "tdx/collateral-2026-03/"
	return tdx.Collateral{
		TCBInfo: [][]byte{file(t, dir+"tcb_info_90c06f000000.json")}, QEIdentity: file(t, dir+"td_qe_identity.json"),
		TCBInfoChain: file(t, dir+"tcb_signing_chain.pem"), QEIdentityChain: file(t, dir+"qe_identity_signing_chain.pem"),
		CRLs: [][]byte{file(t, dir+"root_ca_crl.der"), file(t, dir+"pck_crl_platform.der")},
	}
}

// full2026 returns the JSON text of azure/tdx-2026-full, of whose HCL report only the end was
// captured.
func full2026(t testing.TB) []byte {
	tail := file(t, "azure/tdx-2026-full/runtime-data.bin")
	return tail[20 : 20+binary.LittleEndian.Uint32(tail[16:])]
}

func TestCapturedSNPReportsBindTheirAK(t *testing.T) {
	for dir, tt := range map[string]struct {
		product  snp.Product
		userData bool
	}{
		"snp-milan-rv2": {snp.Milan, false}, "snp-milan-rv3-live": {snp.Milan, false}, "snp-milan-rv3-nononce": {snp.Milan, false},
		"snp-milan-rv3-userdata": {snp.Milan, true}, "snp-genoa-rv3": {snp.Genoa, false},
	} {
		r, err := verifySNP(t, dir)
		if err != nil {
			t.Errorf("%s: %v", dir, err)
			continue
		}
		if r.SNP.Product != tt.product || !r.SecureBoot || r.VMID == "" || tt.userData != (r.UserData != [64]byte{}) || r.SNP.IDKeyDigest == [48]byte{} {
			t.Errorf("%s: %+v", dir, r)
		}
		rules := hcl.Rules{SNP: snp.Rules{MinTCB: map[snp.Product]snp.TCB{tt.product: {}}, Keys: []snp.Key{snp.VCEK}, AnyChip: true, AllowPolicy: snp.PolicySMT, IDKeys: [][48]byte{r.SNP.IDKeyDigest}}}
		if err := rules.Check(r); err != nil {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

func TestCapturedTDXQuotesBindTheirAK(t *testing.T) {
	now := time.Date(2026, 3, 20, 0, 0, 0, 0, time.UTC)
	live, _ := captured(t, "tdx-live")
	_, _, runtime, err := hcl.Split(live)
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(file(t, "azure/tdx-live/evidence.json"), &all); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ quote, runtime []byte }{
		"tdx-live":      {bytesOf(t, all["td_quote"]), runtime},
		"tdx-2026-full": {file(t, "azure/tdx-2026-full/td-quote.bin"), full2026(t)},
	} {
		r, err := hcl.VerifyTDX(tt.quote, tt.runtime, intel(t), tdx.Intel(), now)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		rules := hcl.Rules{TDX: tdx.Rules{Statuses: []tdx.Status{tdx.UpToDate}, MinModule: map[uint8]uint8{1: 7}, MRTDs: [][48]byte{r.TDX.MRTD}, RequireAttributes: tdx.AttributeSEPTVEDisable}}
		if err := rules.Check(r); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Of 2024 no collateral was captured. The quote is over the hash of its JSON text.
	kind, _, runtime, err := hcl.Split(file(t, "azure/tdx-2024/hcl-report.bin"))
	hash := sha256.Sum256(runtime)
	if err != nil || kind != hcl.TDX || !bytes.Equal(file(t, "azure/tdx-2024/td-quote.bin")[48+0x208:][:32], hash[:]) {
		t.Errorf("tdx-2024: kind %d, %v", kind, err)
	}
}

// made is an HCL report with vendors of the test.
type made struct {
	amd     *hardwaretest.AMD
	intel   *hardwaretest.Intel
	tdx     bool
	runtime []byte
	chip    hardwaretest.Chip
	data    func(hardware.ReportData) hardware.ReportData
	hcl     func([]byte) []byte
	rules   hcl.Rules
}

func (m *made) report(t testing.TB) (*hcl.Report, error) {
	hash := sha256.Sum256(m.runtime)
	var data hardware.ReportData
	copy(data[:], hash[:])
	if m.data != nil {
		data = m.data(data)
	}
	kind, inner := hcl.SNP, make([]byte, 1184)
	var e snp.Evidence
	if m.tdx {
		kind = hcl.TDX
	} else {
		e = m.amd.Report(t, m.chip, data)
		inner = e.Report
	}
	b := hardwaretest.HCL(kind, inner, m.runtime)
	if m.hcl != nil {
		b = m.hcl(b)
	}
	_, report, runtime, err := hcl.Split(b)
	if err != nil {
		return nil, err
	}
	if m.tdx {
		return hcl.VerifyTDX(m.intel.Quote(t, hardwaretest.TD{}, data), runtime, m.intel.Collateral(t, hardwaretest.TCBInfo(), hardwaretest.QEIdentity()), []*x509.Certificate{m.intel.Root.Cert}, hardwaretest.Now)
	}
	return hcl.VerifySNP(snp.Evidence{Report: report, Certificate: e.Certificate}, runtime, m.amd.Authorities(), hardwaretest.Now)
}

func (m *made) verdict(t testing.TB) error {
	r, err := m.report(t)
	if err == nil {
		err = m.rules.Check(r)
	}
	return err
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// text returns a JSON text.
func text(secureBoot bool, keys ...string) []byte {
	return fmt.Appendf(nil, `{"keys":[%s],"vm-configuration":{"secure-boot":%t,"vmUniqueId":"V"},"user-data":"%s"}`, strings.Join(keys, ","), secureBoot, strings.Repeat("0A", 64))
}

func jwk(id, kty string, n []byte, e string) string {
	return fmt.Sprintf(`{"kid":%q,"kty":%q,"n":%q,"e":%q}`, id, kty, b64(n), e)
}

func TestHCLReportsThatAreRefused(t *testing.T) {
	a, i := hardwaretest.NewAMD(t), hardwaretest.NewIntel(t)
	ak, ek := hardwaretest.NewRSA(t).PublicKey, hardwaretest.NewRSA(t).PublicKey
	mine, other := jwk("HCLAkPub", "RSA", ak.N.Bytes(), "AQAB"), jwk("HCLEkPub", "RSA", ek.N.Bytes(), "AQAB")
	measured := [48]byte(bytes.Repeat([]byte{0x4D}, 48))
	base := func() *made {
		return &made{
			amd: a, intel: i, runtime: text(true, mine, other), chip: hardwaretest.Chip{Product: snp.Milan},
			rules: hcl.Rules{
				SNP: snp.Rules{MinTCB: map[snp.Product]snp.TCB{snp.Milan: {}}, Keys: []snp.Key{snp.VCEK}, AnyChip: true, Measurements: [][48]byte{measured}, MaxVMPL: 3},
				TDX: tdx.Rules{Statuses: []tdx.Status{tdx.UpToDate}, MinModule: map[uint8]uint8{1: 6}, MRTDs: [][48]byte{measured}, RequireAttributes: tdx.AttributeSEPTVEDisable},
			},
		}
	}
	var all []hardwaretest.Vector
	add := func(name string, want attestv1.Reason, change func(*made)) {
		onTDX := strings.HasSuffix(name, "TDX")
		all = append(all, hardwaretest.Vector{Name: name, Want: want,
			Wrong: func(t testing.TB) error { m := base(); m.tdx = onTDX; change(m); return m.verdict(t) },
			Right: func(t testing.TB) error { m := base(); m.tdx = onTDX; return m.verdict(t) },
		})
	}
	put := func(at int, v uint32) func(*made) {
		return func(m *made) {
			m.hcl = func(b []byte) []byte { binary.LittleEndian.PutUint32(b[at:], v); return b }
		}
	}
	runtime := func(b []byte) func(*made) { return func(m *made) { m.runtime = b } }

	add("shorter than its headers", hardware.Malformed, func(m *made) { m.hcl = func(b []byte) []byte { return b[:0x4C0+19] } })
	add("more than 8 KiB", hardware.Malformed, func(m *made) { m.hcl = func(b []byte) []byte { return append(b, make([]byte, 8<<10)...) } })
	add("other first bytes", hardware.Malformed, put(0, 0))
	add("version 3", hardware.Malformed, put(4, 3))
	add("runtime data of version 2", hardware.Malformed, put(0x4C4, 2))
	add("report data hashed by SHA-512", hardware.Malformed, put(0x4CC, 3))
	add("length beyond the end", hardware.Malformed, func(m *made) {
		m.hcl = func(b []byte) []byte {
			for _, at := range []int{0x008, 0x4C0, 0x4D0} {
				binary.LittleEndian.PutUint32(b[at:], binary.LittleEndian.Uint32(b[at:])+11)
			}
			return b
		}
	})
	add("length of the JSON text that does not fit", hardware.Malformed, put(0x4D0, 1<<31))
	add("total length that does not fit", hardware.Malformed, put(8, 0x4C0))
	add("length of runtime data that does not fit", hardware.Malformed, put(0x4C0, 20))
	add("trailing byte", hardware.Malformed, func(m *made) { m.hcl = func(b []byte) []byte { return append(b, 1) } })
	add("report of another kind: VBS", hardware.Malformed, put(0x4C8, 1))
	add("byte after the TDREPORT, TDX", hardware.Malformed, func(m *made) { m.hcl = func(b []byte) []byte { b[0x20+1024] = 1; return b } })
	add("JSON text that is none", hardware.Malformed, runtime([]byte("{")))
	add("no attestation key", hardware.Malformed, runtime(text(true, other)))
	add("two attestation keys", hardware.Malformed, runtime(text(true, mine, mine)))
	add("attestation key that is not RSA", hardware.Malformed, runtime(text(true, jwk("HCLAkPub", "EC", ak.N.Bytes(), "AQAB"))))
	add("attestation key of 1024 bits", hardware.Malformed, runtime(text(true, jwk("HCLAkPub", "RSA", ak.N.Bytes()[:128], "AQAB"))))
	add("attestation key with exponent 3", hardware.Malformed, runtime(text(true, jwk("HCLAkPub", "RSA", ak.N.Bytes(), "Aw"))))
	add("user data of 63 bytes", hardware.Malformed, runtime(bytes.Replace(text(true, mine), []byte("0A0A"), []byte("0A"), 1)))

	add("JSON text that the report is not bound to", hardware.Binding, func(m *made) {
		m.hcl = func(b []byte) []byte { return bytes.Replace(b, []byte(`"V"`), []byte(`"W"`), 1) }
	})
	add("JSON text that the quote is not bound to, TDX", hardware.Binding, func(m *made) {
		m.hcl = func(b []byte) []byte { return bytes.Replace(b, []byte(`"V"`), []byte(`"W"`), 1) }
	})
	add("empty report data", hardware.Binding, func(m *made) { m.data = func(hardware.ReportData) hardware.ReportData { return hardware.ReportData{} } })
	add("report data with more than the hash", hardware.Binding, func(m *made) {
		m.data = func(d hardware.ReportData) hardware.ReportData { d[63] = 1; return d }
	})
	add("report that the guest's system asked for, not the paravisor", hardware.Binding, func(m *made) { m.chip.Report = func(b []byte) { b[0x30] = 1 } })

	add("Secure Boot off", hardware.Policy, runtime(text(false, mine)))
	add("Secure Boot not stated", hardware.Policy, runtime(fmt.Appendf(nil, `{"keys":[%s]}`, mine)))
	add("any measurement, which any guest could have", hardware.Policy, func(m *made) { m.rules.SNP.AnyMeasurement = true })
	add("any MRTD, which any guest could have, TDX", hardware.Policy, func(m *made) { m.rules.TDX.AnyMRTD = true })
	add("measurement that is not the paravisor's", hardware.Policy, func(m *made) { m.rules.SNP.Measurements = [][48]byte{{1}} })
	add("MRTD that is not the paravisor's, TDX", hardware.Policy, func(m *made) { m.rules.TDX.MRTDs = [][48]byte{{1}} })
	add("rules that are empty", hardware.Policy, func(m *made) { m.rules = hcl.Rules{} })

	hardwaretest.Refused(t, "Azure", append(all, capturedVectors(t, i)...))
}

func capturedVectors(t *testing.T, i *hardwaretest.Intel) (all []hardwaretest.Vector) {
	add := func(name string, want attestv1.Reason, wrong, right func(testing.TB) error) {
		all = append(all, hardwaretest.Vector{Name: name, Want: want, Wrong: wrong, Right: right})
	}
	rv2 := func(t testing.TB) error { _, err := verifySNP(t, "snp-milan-rv2"); return err }
	with := func(path string, vcek func(testing.TB) []byte) func(testing.TB) error {
		return func(t testing.TB) error {
			_, report, runtime, err := hcl.Split(file(t, path))
			if err != nil {
				return err
			}
			_, err = hcl.VerifySNP(snp.Evidence{Report: report, Certificate: vcek(t)}, runtime, amd(), march)
			return err
		}
	}
	pemOf := func(path string) func(testing.TB) []byte {
		return func(t testing.TB) []byte { p, _ := pem.Decode(file(t, path)); return p.Bytes }
	}
	add("captured older-samples: VCEK of another chip", hardware.Untrusted, with("azure/older-samples/hcl-report-snp.bin", pemOf("azure/older-samples/certs.pem")), rv2)
	add("captured redacted: CHIP_ID set to zero", hardware.Untrusted, with("azure/redacted/hcl-report.bin", pemOf("azure/snp-milan-rv2/vcek-chain.pem")), rv2)

	least := func(tcb snp.TCB) func(testing.TB) error {
		return func(t testing.TB) error {
			r, err := verifySNP(t, "snp-milan-rv2")
			if err != nil {
				return err
			}
			return hcl.Rules{SNP: snp.Rules{MinTCB: map[snp.Product]snp.TCB{snp.Milan: tcb}, Keys: []snp.Key{snp.VCEK}, AnyChip: true, AllowPolicy: snp.PolicySMT, IDKeys: [][48]byte{r.SNP.IDKeyDigest}}}.Check(r)
		}
	}
	add("captured snp-milan-rv2: TCB below the minimum", hardware.TCB, least(snp.TCB{BootLoader: 4, SNP: 24, Microcode: 0xD9}), least(snp.TCB{}))

	rules := hcl.Rules{TDX: tdx.Rules{Statuses: []tdx.Status{tdx.UpToDate}, MinModule: map[uint8]uint8{1: 6}, MRTDs: [][48]byte{[48]byte(bytes.Repeat([]byte{0x4D}, 48))}, RequireAttributes: tdx.AttributeSEPTVEDisable}}
	insecure := func(allow bool) func(testing.TB) error {
		return func(t testing.TB) error { // its quote was not captured: one of the test's vendor is bound to it
			_, _, runtime, err := hcl.Split(file(t, "azure/older-samples/hcl-report-tdx.bin"))
			if err != nil {
				return err
			}
			hash := sha256.Sum256(runtime)
			var data hardware.ReportData
			copy(data[:], hash[:])
			r, err := hcl.VerifyTDX(i.Quote(t, hardwaretest.TD{}, data), runtime, i.Collateral(t, hardwaretest.TCBInfo(), hardwaretest.QEIdentity()), []*x509.Certificate{i.Root.Cert}, hardwaretest.Now)
			if err != nil {
				return err
			}
			p := rules
			p.AllowNoSecureBoot = allow
			return p.Check(r)
		}
	}
	add("captured older-samples, TDX: Secure Boot off", hardware.Policy, insecure(false), insecure(true))
	swapped := func(t testing.TB) error {
		b, vcek := captured(t, "snp-milan-rv3-live")
		_, report, _, err := hcl.Split(b)
		if err != nil {
			return err
		}
		_, err = hcl.VerifySNP(snp.Evidence{Report: report, Certificate: vcek}, bytes.TrimRight(file(t, "azure/older-samples/var-data.bin"), "\x00"), amd(), march)
		return err
	}
	add("captured older-samples: JSON text of another VM", hardware.Binding, swapped, func(t testing.TB) error { _, err := verifySNP(t, "snp-milan-rv3-live"); return err })

	// The quotes of other keys: the TPM's quote is not part of this package, only whose key signs it.
	_, _, runtime, err := hcl.Split(file(t, "azure/snp-milan-rv2/hcl-report.bin"))
	if err != nil {
		t.Fatal(err)
	}
	r, err := hcl.Parse(runtime)
	if err != nil {
		t.Fatal(err)
	}
	signed := func(t testing.TB, message, signature []byte) error {
		digest := sha256.Sum256(message)
		if rsa.VerifyPKCS1v15(r.AK, crypto.SHA256, digest[:], signature) != nil && rsa.VerifyPSS(r.AK, crypto.SHA256, digest[:], signature, nil) != nil {
			return attest.Refuse(hardware.Signature, "the quote is not signed by the AK of the HCL report")
		}
		return nil
	}
	add("captured snp-milan-rv2, stray-quote: of another AK", hardware.Signature,
		func(t testing.TB) error {
			return signed(t, file(t, "azure/snp-milan-rv2/stray-quote.msg"), file(t, "azure/snp-milan-rv2/stray-quote.sig"))
		},
		func(t testing.TB) error {
			b := file(t, "azure/snp-milan-rv2/quote.bincode")
			take := func() []byte { n := binary.LittleEndian.Uint64(b); out := b[8 : 8+n]; b = b[8+n:]; return out }
			signature := take()
			return signed(t, take(), signature)
		})
	return all
}

func TestEmptyRulesAndReportsAcceptNothing(t *testing.T) {
	for _, r := range []*hcl.Report{nil, {}, {AK: &rsa.PublicKey{}}, {AK: &rsa.PublicKey{}, SNP: &snp.Report{}, TDX: &tdx.Quote{}}} {
		if err := (hcl.Rules{AllowNoSecureBoot: true}).Check(r); attest.ReasonOf(err) != hardware.Policy {
			t.Error(err)
		}
	}
}
