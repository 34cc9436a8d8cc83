package hcl_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hcl"
)

func FuzzSplit(f *testing.F) {
	for _, p := range []string{"azure/snp-milan-rv2/hcl-report.bin", "azure/tdx-2024/hcl-report.bin", "azure/older-samples/hcl-report-snp.bin"} {
		f.Add(file(f, p))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, report, runtime, err := hcl.Split(b)
		if err != nil {
			if attest.ReasonOf(err) != hardware.Malformed {
				t.Fatal(err)
			}
			return
		}
		if size := map[hcl.Kind]int{hcl.SNP: 1184, hcl.TDX: 1024}[kind]; len(report) != size || !bytes.Contains(b, runtime) {
			t.Fatalf("kind %d, %d bytes", kind, len(report))
		}
	})
}

func FuzzText(f *testing.F) {
	for _, p := range []string{"azure/snp-milan-rv2/hcl-report.bin", "azure/tdx-2024/hcl-report.bin"} {
		_, _, runtime, err := hcl.Split(file(f, p))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(slices.Clone(runtime))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := hcl.Parse(b)
		if err == nil && (r.AK.N.BitLen() != 2048 || r.AK.E != 65537) || err != nil && attest.ReasonOf(err) != hardware.Malformed {
			t.Fatal(r, err)
		}
	})
}
