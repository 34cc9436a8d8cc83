package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// captured sends a captured SEV-SNP report with that certificate.
type captured struct{ report, certificate []byte }

func (c captured) Report(context.Context, hardware.ReportData) (*attestv1.HardwareReport, error) {
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: c.report, Certificate: c.certificate}}}, nil
}

// A machine without the hardware report that the policy requires, or with one that is not genuine, gets no session. The reports
// are captured; AMD's list is missing in the policy, since none was captured.
func TestMachinesWhoseHardwareReportIsRefused(t *testing.T) {
	s := setUp(t)
	file := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("..", "..", "trust", "attest", "hardware", "testdata", "snp", "milan-v2-vcek", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := s.machine(t)
	s.inForce(t, s.policy(t, func(p *attestv1.Policy) {
		p.Serial = 2
		p.Hardware = &attestv1.HardwarePolicy{Require: []string{"sev-snp"}, SevSnp: &attestv1.SevSnpRules{
			MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan"}}, Keys: []string{"vcek"}, AnyChip: true, AnyMeasurement: true,
		}}
	}))
	for name, tt := range map[string]struct {
		options attesttest.Options
		reason  attestv1.Reason
	}{
		"no report": {attesttest.Options{}, attestv1.Reason_REASON_POLICY_REFUSED},
		"a key's certificate that AMD has not signed": {attesttest.Options{Hardware: captured{file("report.bin"), file("vcek-tampered-a.der")}}, attestv1.Reason_REASON_HARDWARE_UNTRUSTED},
		"no revocation list of AMD":                   {attesttest.Options{Hardware: captured{file("report.bin"), file("vcek.der")}}, attestv1.Reason_REASON_HARDWARE_COLLATERAL},
	} {
		t.Run(name, func(t *testing.T) {
			client := s.dial(t, attesttest.NewMachine(t, s.ca, tt.options).Attester(attest.PurposeMachine))
			refusaltest.Refused(t, s.observations(t), tt.reason, refusaltest.Connection(), func() error {
				_, err := client.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
				return err
			})
		})
	}
	s.inForce(t, s.policy(t, func(p *attestv1.Policy) { p.Serial = 3 }))
	s.ticketFor(t, good, worker(t))
}
