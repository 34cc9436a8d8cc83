package tpm2_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// reports counts the reports of a processor that signs nothing.
type reports struct {
	made int
	data hardware.ReportData
	none bool
	err  error
}

func (r *reports) Report(_ context.Context, data hardware.ReportData) (*attestv1.HardwareReport, error) {
	if r.made++; r.none || r.err != nil {
		return nil, r.err
	}
	r.data = data
	return largest(), nil
}

// largest is a report of all kinds' largest size, of zeros.
func largest() *attestv1.HardwareReport {
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Azure{Azure: &attestv1.AzureReport{HclReport: make([]byte, 8<<10), Quote: make([]byte, 16<<10)}}}
}

func TestSessionsThatShareAQuoteShareAHardwareReport(t *testing.T) {
	r := &reports{}
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Hardware: r})
	a, err := tpm2.NewAttester(tpm2.Config{TPM: m, Purpose: attest.PurposeMachine, Bank: m.Bank(), Hardware: r})
	if err != nil {
		t.Fatal(err)
	}
	all, err := a.AttestAll(t.Context(), attestv1.Format_FORMAT_TPM2, []attest.Binding{{1}, {2}, {3}})
	if err != nil || r.made != 1 || m.Quotes() != 1 {
		t.Fatalf("%d reports and %d quotes, %v", r.made, m.Quotes(), err)
	}
	for i, e := range all {
		// The quote's extraData, at its fixed place after the signer's name.
		root := e.GetTpm2().GetAttest()[4+2+2+34+2:][:32]
		ak, err := tpm2.ParseAttestationKey(e.GetTpm2().GetAkPublic())
		if err != nil || r.data != hardware.NewReportData(ak.Name, [32]byte(root)) || e.GetTpm2().GetHardware() == nil {
			t.Errorf("evidence %d: the report is not over its attestation key and quote, %v", i, err)
		}
	}
}

// TestPublicEvidenceHasNoHardwareReport: any client may ask for it.
func TestPublicEvidenceHasNoHardwareReport(t *testing.T) {
	for purpose, made := range map[attest.Purpose]int{
		attest.PurposePublic: 0, attest.PurposeMachine: 1, attest.PurposeJoinservice: 1, attest.PurposeKMS: 1, attest.PurposeOrder: 1,
	} {
		r := &reports{}
		ev, err := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Hardware: r}).Attester(purpose).Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{1})
		if err != nil || r.made != made || (ev.GetTpm2().GetHardware() != nil) != (made > 0) {
			t.Errorf("%s: %d reports, want %d, %v", purpose, r.made, made, err)
		}
	}
}

// TestReportsAreMadeOnceASecond: a session needs a report before its peer has proven anything. Without a report, quotes do not
// wait.
func TestReportsAreMadeOnceASecond(t *testing.T) {
	for name, tt := range map[string]struct {
		reports *reports
		want    time.Duration
	}{
		"reports": {&reports{}, 4 * time.Second}, "failures": {&reports{err: errors.New("busy")}, 4 * time.Second}, "a machine that is no confidential one": {&reports{none: true}, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Hardware: tt.reports}).Attester(attest.PurposeMachine)
			begin := time.Now()
			for i := range 5 {
				if _, err := a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{byte(i)}); (err != nil) != (tt.reports.err != nil) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if took := time.Since(begin); tt.reports.made != 5 || took != tt.want {
				t.Errorf("%s: %d reports in %s, want 5 in %s", name, tt.reports.made, took, tt.want)
			}
		})
	}
}

func TestAMachineWithoutHardwareSendsNoReport(t *testing.T) {
	for name, o := range map[string]attesttest.Options{"no reporter": {}, "no hardware": {Hardware: &reports{none: true}}} {
		ev, err := attesttest.NewMachine(t, attesttest.NewCA(t), o).Attester(attest.PurposeMachine).Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{1})
		if err != nil || ev.GetTpm2().GetHardware() != nil {
			t.Errorf("%s: %v, %v", name, ev.GetTpm2().GetHardware(), err)
		}
	}
}

// TestAReportThatFailsIsNotLeftOut: evidence without it would be refused elsewhere, for a reason that
// hides the cause.
func TestAReportThatFailsIsNotLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reports{err: errors.New("the firmware is busy")}
		m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Hardware: r})
		a := m.Attester(attest.PurposeMachine)
		if _, err := a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{1}); err == nil || !strings.Contains(err.Error(), "hardware report: the firmware is busy") {
			t.Errorf("%v", err)
		}
		r.err = nil
		if _, err := a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{1}); err != nil {
			t.Errorf("repaired: %v", err)
		}
	})
}

// TestAnUnprovenPeersReportIsNotVerified: a report costs a verifier its bytes, until the machine has
// proven that its attestation key is in a TPM that the policy's roots certify.
func TestAnUnprovenPeersReportIsNotVerified(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{Hardware: &reports{}, Tamper: attesttest.Tamper{MAC: func(b []byte) []byte { b[0] ^= 1; return b }}})
	_, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if attest.ReasonOf(err) != attestv1.Reason_REASON_ACTIVATION_FAILED {
		t.Errorf("a report of zeros from a machine that fails the challenge: %v", err)
	}
	amd := func(report, certificate int) func(*attestv1.HardwareReport) {
		return func(r *attestv1.HardwareReport) {
			r.Report = &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: make([]byte, report), Certificate: make([]byte, certificate)}}
		}
	}
	intel := func(quote int) func(*attestv1.HardwareReport) {
		return func(r *attestv1.HardwareReport) {
			r.Report = &attestv1.HardwareReport_Tdx{Tdx: &attestv1.TdxQuote{Quote: make([]byte, quote)}}
		}
	}
	azure := func(certificate int) func(*attestv1.HardwareReport) {
		return func(r *attestv1.HardwareReport) {
			r.GetAzure().Quote, r.GetAzure().Certificate = nil, make([]byte, certificate)
		}
	}
	const malformed, accepted = attestv1.Reason_REASON_EVIDENCE_MALFORMED, attestv1.Reason_REASON_ACCEPTED
	for name, tt := range map[string]struct {
		change func(*attestv1.HardwareReport)
		want   attestv1.Reason
	}{
		"SEV-SNP, a byte too long":             {amd(1185, 1), malformed},
		"SEV-SNP, a byte too short":            {amd(1183, 1), malformed},
		"SEV-SNP, no certificate":              {amd(1184, 0), accepted},
		"SEV-SNP, certificate over 4 KiB":      {amd(1184, 4097), malformed},
		"SEV-SNP, the largest":                 {amd(1184, 4096), accepted},
		"TDX, no quote":                        {intel(0), malformed},
		"TDX, quote over 16 KiB":               {intel(16<<10 + 1), malformed},
		"TDX, the largest":                     {intel(16 << 10), accepted},
		"Azure, neither quote nor certificate": {azure(0), malformed},
		"Azure, certificate over 4 KiB":        {azure(4097), malformed},
		"Azure, the largest certificate":       {azure(4096), accepted},
		"a byte more than 8 KiB":               {func(r *attestv1.HardwareReport) { r.GetAzure().HclReport = append(r.GetAzure().GetHclReport(), 0) }, malformed},
		"a byte more than 16 KiB":              {func(r *attestv1.HardwareReport) { r.GetAzure().Quote = append(r.GetAzure().GetQuote(), 0) }, malformed},
		"the largest":                          {func(*attestv1.HardwareReport) {}, accepted},
	} {
		m := attesttest.NewMachine(t, ca, attesttest.Options{Hardware: &reports{}, Tamper: attesttest.Tamper{Evidence: func(e *attestv1.Evidence) { tt.change(e.GetTpm2().GetHardware()) }}})
		c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
		if attest.ReasonOf(err) != tt.want || err == nil && c.HardwareKind() == "" {
			t.Errorf("%s: %q, %v", name, c.HardwareKind(), err)
		}
	}
}
