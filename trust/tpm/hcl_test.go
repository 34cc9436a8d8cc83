package tpm_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestSWTPMReturnsTheReportOfAParavisor(t *testing.T) {
	e := tpmtest.SWTPM(t)
	if _, err := e.Open().HCLReport(t.Context()); !errors.Is(err, tpm.ErrNoHCLReport) {
		t.Errorf("without the index: %v", err)
	}
	want, err := os.ReadFile(filepath.Join("..", "attest", "hardware", "testdata", "azure", "snp-milan-rv2", "hcl-report.bin"))
	if err != nil {
		t.Fatal(err)
	}
	const half = 2048 // swtpm has no larger index
	tpmtest.WriteNV(t, raw(t, e), 0x01400002, want[:64])
	if _, err := e.Open().HCLReport(t.Context()); !errors.Is(err, tpm.ErrNoHCLReport) {
		t.Errorf("with the next index only: %v", err)
	}
	tpmtest.WriteNV(t, raw(t, e), 0x01400001, want[:min(half, len(want))])
	if got, err := e.Open().HCLReport(t.Context()); err != nil || !bytes.Equal(got, want[:min(half, len(want))]) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	e.Restart()
	if got, err := e.Open().HCLReport(t.Context()); err != nil || !bytes.Equal(got, want[:min(half, len(want))]) {
		t.Errorf("after a restart: %d bytes, %v", len(got), err)
	}
}
