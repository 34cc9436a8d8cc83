package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// captured sends a captured SEV-SNP report with that certificate.
type captured struct{ report, certificate []byte }

func (c captured) Report(context.Context, hardware.ReportData) (*attestv1.HardwareReport, error) {
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: c.report, Certificate: c.certificate}}}, nil
}

// milan is a captured report of a processor of that name, with one of the certificates that are beside it.
func milan(t *testing.T, certificate string) captured {
	t.Helper()
	var c captured
	for name, to := range map[string]*[]byte{"report.bin": &c.report, certificate: &c.certificate} {
		b, err := os.ReadFile(filepath.Join("..", "..", "trust", "attest", "hardware", "testdata", "snp", "milan-v2-vcek", name))
		if err != nil {
			t.Fatal(err)
		}
		*to = b
	}
	return c
}

// requireMilan makes a policy require such a report.
func requireMilan(p *attestv1.Policy) {
	p.Serial = 2
	p.Hardware = &attestv1.HardwarePolicy{Require: []string{"sev-snp"}, SevSnp: &attestv1.SevSnpRules{
		MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan", BootLoader: new(uint32), Tee: new(uint32), Snp: new(uint32), Microcode: new(uint32)}}, Keys: []string{"vcek"}, AnyChip: true, AnyMeasurement: true,
	}}
}

// A node that is refused for its hardware report alone loses its good verdict: its kubelet gets no certificate, and the owner sees the reason
// (A10, J7).
func TestARefusedHardwareReportEndsTheVerdict(t *testing.T) {
	for certificate, want := range map[string]attestv1.Reason{
		"vcek-tampered-a.der": attestv1.Reason_REASON_HARDWARE_UNTRUSTED, "vcek.der": attestv1.Reason_REASON_HARDWARE_COLLATERAL,
	} {
		t.Run(attest.ReasonName(want), func(t *testing.T) {
			s := setUp(t, recordsSoon)
			m := attesttest.NewMachine(t, s.ca, attesttest.Options{Hardware: milan(t, certificate)})
			s.ticketFor(t, m, worker(t))
			m.LockTo(s.ID)
			if _, err := s.reattested(t, m); err != nil {
				t.Fatal(err)
			}
			s.inForce(t, s.policy(t, requireMilan))
			if _, err := s.reattest(t, m); rpc.ReasonFrom(err) != want {
				t.Fatalf("%v, want %s", err, attest.ReasonName(want))
			}
			membertest.Eventually(t, func() error {
				v := s.Node(t, "w1").Status.LastVerdict
				return membertest.Want(v != nil && !v.Accepted && v.Reason == attest.ReasonName(want), "last verdict %+v", v)
			})
			s.decided(t, s.file(t, renewal("w1")), certificatesv1.CertificateDenied, "POLICY_REFUSED")
			membertest.Eventually(t, func() error {
				e, listed := s.waiting(t)[m.ID().String()]
				return membertest.Want(listed && e.Reason == attest.ReasonName(want), "listed: %t, %+v", listed, e)
			})
		})
	}
}

// A machine without the hardware report that the policy requires, or with one that is not genuine, gets no session. The reports
// are captured; AMD's list is missing in the policy, since none was captured.
func TestMachinesWhoseHardwareReportIsRefused(t *testing.T) {
	s := setUp(t)
	good := s.machine(t)
	s.inForce(t, s.policy(t, requireMilan))
	for name, tt := range map[string]struct {
		options attesttest.Options
		reason  attestv1.Reason
	}{
		"no report": {attesttest.Options{}, attestv1.Reason_REASON_POLICY_REFUSED},
		"a key's certificate that AMD has not signed": {attesttest.Options{Hardware: milan(t, "vcek-tampered-a.der")}, attestv1.Reason_REASON_HARDWARE_UNTRUSTED},
		"no revocation list of AMD":                   {attesttest.Options{Hardware: milan(t, "vcek.der")}, attestv1.Reason_REASON_HARDWARE_COLLATERAL},
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
