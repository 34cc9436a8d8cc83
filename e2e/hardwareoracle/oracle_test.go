package hardwareoracle

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-sev-guest/abi"
	spb "github.com/google/go-sev-guest/proto/sevsnp"
	sevverify "github.com/google/go-sev-guest/verify"
	"github.com/google/go-sev-guest/verify/trust"
	tdxverify "github.com/google/go-tdx-guest/verify"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	accepted  = attestv1.Reason_REASON_ACCEPTED
	untrusted = hardware.Untrusted
	notBound  = hardware.Binding
	malformed = hardware.Malformed
)

func file(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "trust", "attest", "hardware", "testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Ext(path) != ".pem" {
		return b
	}
	p, _ := pem.Decode(b)
	return p.Bytes
}

func day(t *testing.T, s string) time.Time {
	t.Helper()
	d, err := time.Parse(time.DateOnly, s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Differences have their reasons beside them: all of them are why Muster has its own check (docs/decisions/0016).
func TestReportsOfSEVSNP(t *testing.T) {
	authorities := snp.AMD()
	for p, a := range authorities {
		a.InsecureNoRevocationLists = true // none was captured, and the library fetches none
		authorities[p] = a
	}
	for _, tt := range []struct {
		report, certificate, at string
		ours                    attestv1.Reason
		theirs                  bool // it accepts the report
		why                     string
	}{
		{"milan-v2-vcek/report.bin", "milan-v2-vcek/vcek.der", "2026-03-01", accepted, true, ""},
		{"milan-v2-gosevguest/report.bin", "milan-v2-gosevguest/vcek.der", "2026-03-01", accepted, true, ""},
		{"milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der", "2025-06-01", accepted, true, ""},
		{"milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der", "2026-01-01", untrusted, false, ""},
		{"gcp-v5/report-reportdata.bin", "gcp-v5/vcek.pem", "2026-03-01", accepted, true, ""},
		{"genoa-v5-live/report.bin", "genoa-v5-live/vcek.der", "2026-03-01", accepted, false, "the library does not know the model of Siena's processors"},
		{"milan-v2-vcek/report.bin", "milan-v2-vcek/vcek-tampered-a.der", "2026-03-01", untrusted, false, ""},
		{"milan-v2-vcek/report.bin", "milan-v2-vcek/vcek-tampered-b.der", "2026-03-01", untrusted, false, ""},
		{"redacted/report.bin", "milan-v3/vcek.pem", "2026-03-01", untrusted, false, ""},
		{"milan-v3/report.bin", "milan-v3/vcek.pem", "2026-03-01", notBound, true, "report data of zeros: the library compares none here"},
		{"genoa-v3/report.bin", "genoa-v3/vcek.pem", "2026-03-01", notBound, true, "report data of zeros: the library compares none here"},
		{"turin-v5/report.bin", "turin-v5/vcek.pem", "2026-03-01", notBound, false, ""},
	} {
		t.Run(tt.report+" with "+tt.certificate+" at "+tt.at, func(t *testing.T) {
			report, certificate, now := file(t, "snp/"+tt.report), file(t, "snp/"+tt.certificate), day(t, tt.at)
			ours := func(report []byte) error {
				_, err := snp.Verify(snp.Evidence{Report: report, Certificate: certificate}, hardware.ReportData(report[0x50:]), authorities, now)
				return err
			}
			theirs := func(report []byte) error {
				p, err := abi.ReportToProto(report)
				if err != nil {
					return err
				}
				chain := &spb.CertificateChain{VcekCert: certificate}
				if tt.at != "2026-03-01" {
					chain = &spb.CertificateChain{VlekCert: certificate}
				}
				milan := authorities[snp.Milan] // the library has no issuer of VLEKs built in
				roots := map[string][]*trust.AMDRootCerts{"Milan": {{ProductLine: "Milan", ProductCerts: &trust.ProductCerts{Ark: milan.Root, Ask: milan.VCEK, Asvk: milan.VLEK}}}}
				if tt.at == "2026-03-01" {
					roots = nil // those of the library
				}
				return sevverify.SnpAttestation(&spb.Attestation{Report: p, CertificateChain: chain}, &sevverify.Options{
					DisableCertFetching: true, Now: now, TrustedRoots: roots, Product: &spb.SevProduct{Name: spb.SevProduct_SEV_PRODUCT_MILAN},
				})
			}
			compare(t, tt.ours, tt.theirs, tt.why, report, 0x90, ours, theirs)
		})
	}
}

func TestQuotesOfTDX(t *testing.T) {
	live := struct {
		Quote string `json:"td_quote"`
	}{}
	if err := json.Unmarshal(file(t, "azure/tdx-live/evidence.json"), &live); err != nil {
		t.Fatal(err)
	}
	azure, err := base64.RawURLEncoding.DecodeString(live.Quote)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		quote  []byte
		ours   attestv1.Reason
		theirs bool
		why    string
	}{
		{"v4-uptodate-2025", file(t, "tdx/v4-uptodate-2025/quote.bin"), accepted, true, ""},
		{"v4-debug", file(t, "tdx/v4-debug/quote.bin"), accepted, true, ""},
		{"azure/tdx-live", azure, accepted, true, ""},
		{"azure/tdx-2026-full", file(t, "azure/tdx-2026-full/td-quote.bin"), accepted, true, ""},
		{"azure/tdx-2024", file(t, "azure/tdx-2024/td-quote.bin"), accepted, true, ""},
		{"v5-td15-google", file(t, "tdx/v5-td15-google/quote.bin"), accepted, false, "the library has no quotes of version 5"},
		{"v5-no-tcb-level-2026", file(t, "tdx/v5-no-tcb-level-2026/quote.bin"), accepted, false, "the library has no quotes of version 5"},
		{"v4-live-ccel", file(t, "tdx/v4-live-ccel/quote.bin"), notBound, true, "report data of zeros: the library compares none here"},
		{"gcp-cos113", file(t, "tdx/gcp-cos113/quote.bin"), notBound, true, "report data of zeros: the library compares none here"},
		{"v4-spr-2023", file(t, "tdx/v4-spr-2023/quote.bin"), malformed, true, "the library ignores bytes behind the quote"},
		{"tdreport-ccel", file(t, "tdx/tdreport-ccel/tdreport.bin"), malformed, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now, at := day(t, "2026-05-01"), 48
			if tt.quote[0] == 5 {
				at = 54
			}
			ours := func(quote []byte) error {
				return tdx.CheckSigned(quote, hardware.ReportData(quote[at+0x208:]), tdx.Intel(), now)
			}
			theirs := func(quote []byte) error {
				return tdxverify.RawTdxQuote(quote, &tdxverify.Options{Now: now})
			}
			compare(t, tt.ours, tt.theirs, tt.why, tt.quote, at+0x88, ours, theirs)
		})
	}
}

// compare appraises the evidence by Muster and by the library, and then a copy with one changed byte of its measurement, which both must refuse.
func compare(t *testing.T, want attestv1.Reason, theyAccept bool, why string, evidence []byte, measurement int, ours, theirs func([]byte) error) {
	t.Helper()
	if (want == accepted) != theyAccept && why == "" {
		t.Error("the verdicts differ, and the table does not say why")
	}
	if err := ours(evidence); attest.ReasonOf(err) != want {
		t.Errorf("Muster: %v, want %s", err, attest.ReasonName(want))
	}
	if err := theirs(evidence); (err == nil) != theyAccept {
		t.Errorf("the library: %v", err)
	}
	changed := bytes.Clone(evidence)
	changed[measurement] ^= 1
	if err := ours(changed); err == nil {
		t.Error("Muster accepts another measurement")
	}
	if err := theirs(changed); err == nil {
		t.Error("the library accepts another measurement")
	}
}
