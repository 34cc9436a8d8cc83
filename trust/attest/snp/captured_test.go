package snp_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func day(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err)
	}
	return t
}

// amd returns AMD's own authorities. No revocation list of AMD was captured.
func amd() snp.Authorities {
	out := snp.AMD()
	for p, a := range out {
		a.InsecureNoRevocationLists = true
		out[p] = a
	}
	return out
}

func file(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "hardware", "testdata", "snp", path))
	if err != nil {
		t.Fatal(err)
	}
	if p, _ := pem.Decode(b); p != nil {
		return p.Bytes
	}
	return b
}

func captured(t testing.TB, report, certificate string) snp.Evidence {
	return snp.Evidence{Report: file(t, report), Certificate: file(t, certificate)}
}

// genoaJSON is the second report of the chip of genoa-v5-live.
func genoaJSON(t testing.TB) snp.Evidence {
	var out struct {
		Evidence struct {
			Report string `json:"attestation_report"`
			Chain  struct {
				VCEK string `json:"vcek"`
			} `json:"cert_chain"`
		} `json:"evidence"`
	}
	if err := json.Unmarshal(file(t, "genoa-v5-live/evidence.json"), &out); err != nil {
		t.Fatal(err)
	}
	decode := func(s string) []byte {
		b, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(strings.NewReplacer("+", "-", "/", "_").Replace(s), "="))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	return snp.Evidence{Report: decode(out.Evidence.Report), Certificate: decode(out.Evidence.Chain.VCEK)}
}

// TestCapturedReportsAreGenuine verifies the reports of real processors with AMD's own roots, at a
// time when their certificates were valid.
func TestCapturedReportsAreGenuine(t *testing.T) {
	for name, tt := range map[string]struct {
		evidence snp.Evidence
		at       string
		product  snp.Product
		key      snp.Key
		chip     string // begins with; empty: VLEK
		vmpl     uint32
		tcb      snp.TCB
		bound    bool // its report data are not zero
	}{
		"Milan, version 2":        {captured(t, "milan-v2-vcek/report.bin", "milan-v2-vcek/vcek.der"), "2026-03-01", snp.Milan, snp.VCEK, "c38427a3", 0, snp.TCB{BootLoader: 3, SNP: 8, Microcode: 0x73}, true},
		"Milan, version 2, debug": {captured(t, "milan-v2-gosevguest/report.bin", "milan-v2-gosevguest/vcek.der"), "2026-03-01", snp.Milan, snp.VCEK, "3ac3fe21", 0, snp.TCB{BootLoader: 2, SNP: 5, Microcode: 0x44}, true},
		"Milan, version 3":        {captured(t, "milan-v3/report.bin", "milan-v3/vcek.pem"), "2026-03-01", snp.Milan, snp.VCEK, "4ffb5cb4", 0, snp.TCB{BootLoader: 4, SNP: 24, Microcode: 0xDB}, false},
		"Milan, version 3, VLEK":  {captured(t, "milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der"), "2025-06-01", snp.Milan, snp.VLEK, "", 1, snp.TCB{BootLoader: 4, SNP: 24, Microcode: 0xD9}, true},
		"Milan, version 5, GCP":   {captured(t, "gcp-v5/report.bin", "gcp-v5/vcek.pem"), "2026-03-01", snp.Milan, snp.VCEK, "980cf7b6", 0, snp.TCB{BootLoader: 4, SNP: 27, Microcode: 0xDE}, false},
		"the same at VMPL 1":      {captured(t, "gcp-v5/report-reportdata.bin", "gcp-v5/vcek.pem"), "2026-03-01", snp.Milan, snp.VCEK, "980cf7b6", 1, snp.TCB{BootLoader: 4, SNP: 27, Microcode: 0xDE}, true},
		"Genoa, version 3":        {captured(t, "genoa-v3/report.bin", "genoa-v3/vcek.pem"), "2026-03-01", snp.Genoa, snp.VCEK, "b1e24a27", 0, snp.TCB{BootLoader: 10, SNP: 23, Microcode: 0x54}, false},
		"Siena, version 5":        {captured(t, "genoa-v5-live/report.bin", "genoa-v5-live/vcek.der"), "2026-03-01", snp.Genoa, snp.VCEK, "b5f9a4c8", 0, snp.TCB{BootLoader: 10, SNP: 27, Microcode: 0x1B}, true},
		"the same, reissued VCEK": {genoaJSON(t), "2026-03-01", snp.Genoa, snp.VCEK, "b5f9a4c8", 0, snp.TCB{BootLoader: 10, SNP: 27, Microcode: 0x1B}, true},
		"Turin, version 5":        {captured(t, "turin-v5/report.bin", "turin-v5/vcek.pem"), "2026-03-01", snp.Turin, snp.VCEK, "59790fb1c39f35c1", 0, snp.TCB{FMC: 1, BootLoader: 1, TEE: 1, SNP: 4, Microcode: 0x51}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := snp.Genuine(tt.evidence, amd(), day(tt.at))
			if err != nil {
				t.Fatal(err)
			}
			if r.Product != tt.product || r.Key != tt.key || !strings.HasPrefix(hex.EncodeToString(r.ChipID), tt.chip) || r.VMPL != tt.vmpl || r.Reported != tt.tcb {
				t.Errorf("%s %s chip %x VMPL %d TCB %s", r.Product, r.Key, r.ChipID, r.VMPL, r.Reported)
			}
			want := hardware.ReportData(tt.evidence.Report[0x50:])
			_, err = snp.Verify(tt.evidence, want, amd(), day(tt.at))
			if tt.bound != (err == nil) || !tt.bound && attest.ReasonOf(err) != hardware.Binding {
				t.Errorf("bound to what it has: %v", err)
			}
		})
	}
}
