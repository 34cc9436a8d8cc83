package snp_test

import (
	"testing"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
)

// FuzzReport passes changed reports with real certificates. No change of a report is genuine.
func FuzzReport(f *testing.F) {
	for _, dir := range []string{"milan-v3", "genoa-v3", "turin-v5"} {
		f.Add(file(f, dir+"/report.bin"), file(f, dir+"/vcek.pem"))
	}
	f.Add(file(f, "milan-v3-vlek/report.bin"), file(f, "milan-v3-vlek/vlek.der"))
	f.Add(file(f, "milan-v2-vcek/report.bin"), file(f, "milan-v2-vcek/vcek-tampered-b.der"))
	known := map[string]bool{}
	for _, p := range []string{"milan-v3/report.bin", "genoa-v3/report.bin", "turin-v5/report.bin", "milan-v3-vlek/report.bin", "milan-v2-vcek/report.bin"} {
		known[string(file(f, p)[:0x2A0])] = true
	}
	now := day("2026-03-01")
	allowed := map[reason]bool{hardware.Malformed: true, hardware.Untrusted: true, hardware.Signature: true, hardware.Binding: true}
	f.Fuzz(func(t *testing.T, report, certificate []byte) {
		r, err := snp.Genuine(snp.Evidence{Report: report, Certificate: certificate}, amd(), now)
		if err != nil {
			if !allowed[attest.ReasonOf(err)] {
				t.Fatal(err)
			}
			return
		}
		if !known[string(report[:0x2A0])] || r.Product == "" {
			t.Fatalf("genuine: %+v", r)
		}
	})
}
