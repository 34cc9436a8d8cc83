package tdx_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func day(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err)
	}
	return t
}

func file(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "hardware", "testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// field returns the string of a captured JSON file.
func field(t testing.TB, path, name string) string {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal(file(t, path), &all); err != nil {
		t.Fatal(err)
	}
	s, ok := all[name].(string)
	if !ok {
		t.Fatalf("%s has no string %s", path, name)
	}
	return s
}

func quote(t testing.TB, name string) []byte {
	t.Helper()
	var b []byte
	var err error
	switch name {
	case "tdx/v4-rtmr3-json":
		b, err = hex.DecodeString(field(t, name+"/evidence.json", "quote"))
	case "azure/tdx-live":
		b, err = base64.RawURLEncoding.DecodeString(field(t, name+"/evidence.json", "td_quote"))
	case "azure/tdx-2024", "azure/tdx-2026-full":
		b = file(t, name+"/td-quote.bin")
	default:
		b = file(t, name+"/quote.bin")
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// march is the collateral of March 2026.
func march(t testing.TB) tdx.Collateral {
	const dir = "tdx/collateral-2026-03/"
	return tdx.Collateral{
		TCBInfo:    [][]byte{file(t, dir+"tcb_info_50806f000000.json"), file(t, dir+"tcb_info_90c06f000000.json")},
		QEIdentity: file(t, dir+"td_qe_identity.json"), TCBInfoChain: file(t, dir+"tcb_signing_chain.pem"), QEIdentityChain: file(t, dir+"qe_identity_signing_chain.pem"),
		CRLs: [][]byte{file(t, dir+"root_ca_crl.der"), file(t, dir+"pck_crl_platform.der")},
	}
}

// phala is collateral in the form of dcap-qvl.
func phala(t testing.TB, dir string) tdx.Collateral {
	get := func(name string) string { return field(t, dir+"/collateral.json", name) }
	der := func(name string) []byte {
		b, err := hex.DecodeString(get(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	answer := func(name, as string) []byte {
		return []byte(`{"` + as + `":` + get(name) + `,"signature":"` + get(name+"_signature") + `"}`)
	}
	return tdx.Collateral{
		TCBInfo: [][]byte{answer("tcb_info", "tcbInfo")}, QEIdentity: answer("qe_identity", "enclaveIdentity"),
		TCBInfoChain: []byte(get("tcb_info_issuer_chain")), QEIdentityChain: []byte(get("qe_identity_issuer_chain")),
		CRLs: [][]byte{der("root_ca_crl"), der("pck_crl")},
	}
}

// azure2026 is the collateral of azure/tdx-2026-full.
func azure2026(t testing.TB) tdx.Collateral {
	const dir = "azure/tdx-2026-full/"
	var chain []byte
	for _, name := range []string{"tcb_signing.der", "intel_sgx_root_ca.der"} {
		chain = append(chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: file(t, dir+name)})...)
	}
	return tdx.Collateral{
		TCBInfo: [][]byte{file(t, dir+"tcbinfo.json")}, QEIdentity: file(t, dir+"qe_identity.json"), TCBInfoChain: chain, QEIdentityChain: chain,
		CRLs: [][]byte{file(t, dir+"root_ca.crl.der"), file(t, dir+"pck_platform.crl.der")},
	}
}

// february is the TCB info beside v5-td15-google, with identity and lists of that time.
func february(t testing.TB) tdx.Collateral {
	c := phala(t, "tdx/v5-no-tcb-level-2026")
	c.TCBInfo = [][]byte{file(t, "tdx/v5-td15-google/tcbinfo.json")}
	return c
}

// TestCapturedQuotesAreGenuine verifies quotes of real processors with Intel's own collateral, at a
// time when it was valid.
func TestCapturedQuotesAreGenuine(t *testing.T) {
	for _, tt := range []struct {
		name       string
		collateral tdx.Collateral
		at         string
		version    uint16
		fmspc      string
		module     string
		statuses   []tdx.Status
	}{
		{"tdx/v4-uptodate-2025", phala(t, "tdx/v4-uptodate-2025"), "2025-07-01", 4, "b0c06f000000", "1.6", []tdx.Status{tdx.UpToDate, tdx.UpToDate, tdx.UpToDate}},
		{"tdx/v5-td15-google", march(t), "2026-03-20", 5, "90c06f000000", "1.11", slices.Repeat([]tdx.Status{tdx.UpToDate}, 5)},
		{"tdx/v5-td15-google", february(t), "2026-02-25", 5, "90c06f000000", "1.11", slices.Repeat([]tdx.Status{tdx.UpToDate}, 5)},
		{"azure/tdx-live", march(t), "2026-03-20", 4, "90c06f000000", "1.13", []tdx.Status{tdx.UpToDate, tdx.UpToDate, tdx.UpToDate}},
		{"azure/tdx-2026-full", azure2026(t), "2026-03-20", 4, "90c06f000000", "1.7", []tdx.Status{tdx.UpToDate, tdx.UpToDate, tdx.UpToDate}},
		{"tdx/v4-debug", march(t), "2026-03-20", 4, "50806f000000", "0.3", []tdx.Status{tdx.OutOfDate, tdx.UpToDate}},
	} {
		t.Run(tt.name+" "+tt.at, func(t *testing.T) {
			b := quote(t, tt.name)
			q, err := tdx.Genuine(b, tt.collateral, tdx.Intel(), day(tt.at))
			if err != nil {
				t.Fatal(err)
			}
			var statuses []tdx.Status
			for _, l := range q.Levels {
				statuses = append(statuses, l.Status)
			}
			if q.Version != tt.version || q.FMSPC != tt.fmspc || !slices.Equal(statuses, tt.statuses) || q.Evaluation == 0 {
				t.Errorf("version %d FMSPC %s evaluation %d levels %+v", q.Version, q.FMSPC, q.Evaluation, q.Levels)
			}
			if tt.module != tdx.SVN(q.ModuleSVN) {
				t.Errorf("module %s, want %s", tdx.SVN(q.ModuleSVN), tt.module)
			}
			if _, err := tdx.Verify(b, q.Data, tt.collateral, tdx.Intel(), day(tt.at)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSignaturesOfCapturedQuotes has also quotes whose collateral was not captured.
func TestSignaturesOfCapturedQuotes(t *testing.T) {
	for name, tt := range map[string]struct{ mrtd, at string }{ // at: empty if no list is valid with the certificate
		"tdx/gcp-cos113": {"dae67181", "2026-03-20"}, "tdx/gcp-c3-2026": {"9bf86e62", ""}, "tdx/v4-live-ccel": {"eea8b6a8", "2026-04-01"},
		"tdx/v4-rtmr3-json": {"", "2026-03-20"}, "azure/tdx-2024": {"024a32b0", "2026-03-20"}, "tdx/v4-debug": {"705ee938", "2026-03-20"},
		"tdx/v5-no-tcb-level-2026": {"273828c4", "2026-03-20"},
	} {
		q, err := tdx.Signatures(quote(t, name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !strings.HasPrefix(hex.EncodeToString(q.MRTD[:]), tt.mrtd) {
			t.Errorf("%s: MRTD %x", name, q.MRTD)
		}
		at := "2026-06-01"
		if tt.at != "" {
			at = tt.at
		}
		err = tdx.Chain(quote(t, name), march(t), tdx.Intel(), day(at))
		if tt.at != "" && err != nil || tt.at == "" && attest.ReasonOf(err) != hardware.Collateral {
			t.Errorf("%s at %s: %v", name, at, err)
		}
	}
}
