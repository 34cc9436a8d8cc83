package appraisal

import (
	"context"
	"encoding/hex"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
)

func TestVerifyShowsWhatDiffers(t *testing.T) {
	ca := attesttest.NewCA(t)
	good := attesttest.NewMachine(t, ca, attesttest.Options{})
	bad := attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"})
	policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{good})
	for _, m := range []*attesttest.Machine{good, bad} {
		f := ownertest.ServeFirst(t, m)
		cfg := VerifyConfig{ClusterID: &[32]byte{5}}
		cfg.Addr, cfg.Purpose, cfg.Policy, cfg.Locks = f.Addr, attest.PurposeMachine, policy, []attest.Lock{attest.Unlocked()}
		s, err := Verify(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if s.Accepted != (m == good) || s.Machine != m.ID().String() || s.Lock != "unlocked" || len(s.PCRs) != 16 || len(s.Events) == 0 || s.SecureBoot != "off" {
			t.Errorf("%+v", s)
		}
		if match := s.PCRs[4].Match; match == nil || *match != (m == good) || s.PCRs[4].Expected != hex.EncodeToString(good.PCRs()[4]) {
			t.Errorf("PCR 4: %+v", s.PCRs[4])
		}
		if (s.Err == nil) != (m == good) || m == bad && s.Problem.Reason != "POLICY_REFUSED" {
			t.Errorf("%v", s.Err)
		}
	}
	// Firmware and drivers in words: what was loaded from outside the firmware, and Secure Boot's keys.
	driven := attesttest.NewMachine(t, ca, attesttest.Options{Drivers: []string{"evil.efi"}, SecureBoot: true})
	f := ownertest.ServeFirst(t, driven)
	cfg := VerifyConfig{}
	cfg.Addr, cfg.Purpose, cfg.Policy, cfg.Locks = f.Addr, attest.PurposeMachine, policy, []attest.Lock{attest.Unlocked()}
	if s, err := Verify(t.Context(), cfg); err != nil || s.Accepted || s.SecureBoot != "on" || !slices.ContainsFunc(s.Firmware, func(l string) bool {
		return strings.HasPrefix(l, "PCR 2  EV_EFI_BOOT_SERVICES_DRIVER") && strings.Contains(l, "evil.efi")
	}) || !slices.ContainsFunc(s.Firmware, func(l string) bool { return strings.HasPrefix(l, "PCR 7  PK, digest ") }) {
		t.Errorf("a machine with a driver: %q, Secure Boot %s, %v", s.Firmware, s.SecureBoot, err)
	}
	f = ownertest.ServeFirst(t, good)
	cfg.Addr = f.Addr
	if s, err := Verify(t.Context(), cfg); err != nil || !slices.Contains(s.Firmware, "PCR 2  no drivers from outside the firmware") {
		t.Errorf("a machine without drivers: %q, %v", s.Firmware, err)
	}
	for want, lock := range map[string][32]byte{"locked to this cluster": {5}, "locked to another cluster": {6}} {
		m := attesttest.NewMachine(t, ca, attesttest.Options{})
		m.LockTo(lock)
		f := ownertest.ServeFirst(t, m)
		cfg := VerifyConfig{ClusterID: &[32]byte{5}}
		cfg.Addr, cfg.Purpose, cfg.Policy, cfg.Locks = f.Addr, attest.PurposeMachine, policy, []attest.Lock{attest.LockedTo([32]byte{5})}
		if s, err := Verify(t.Context(), cfg); err != nil || s.Lock != want || s.Accepted != (lock[0] == 5) {
			t.Errorf("%s: %+v, %v", want, s, err)
		}
	}
	// Evidence for a service is not valid for a machine (A5), and then nothing of it is shown.
	l := ownertest.Listen(t)
	ownertest.Serve(t, l, good.Attester(attest.PurposeKMS), rpc.Serve(joinv1connect.JoinServiceName,
		joinv1connect.JoinServiceHandler(joinv1connect.UnimplementedJoinServiceHandler{}), joinv1connect.NewJoinServiceHandler))
	cfg = VerifyConfig{}
	cfg.Addr, cfg.Purpose, cfg.Policy, cfg.Locks = l.Addr().String(), attest.PurposeMachine, policy, []attest.Lock{attest.Unlocked()}
	if s, err := Verify(t.Context(), cfg); err != nil || s.Accepted || s.Machine != "" || s.Problem.Reason != "BINDING_MISMATCH" {
		t.Errorf("%+v, %v", s, err)
	}
}

// A machine that sends no hardware report has neither another image nor other firmware.
func TestAMissingHardwareReportHasItsOwnRemedy(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	cfg := VerifyConfig{}
	cfg.Addr, cfg.Purpose, cfg.Locks = ownertest.ServeFirst(t, m).Addr, attest.PurposeMachine, []attest.Lock{attest.Unlocked()}
	cfg.Policy = attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
		p.Hardware = &attestv1.HardwarePolicy{Require: []string{"sev-snp"}, SevSnp: &attestv1.SevSnpRules{
			MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan", BootLoader: new(uint32), Tee: new(uint32), Snp: new(uint32), Microcode: new(uint32)}}, Keys: []string{"vcek"}, AnyChip: true, AnyMeasurement: true,
		}}
	})
	s, err := Verify(t.Context(), cfg)
	if err != nil || s.Accepted || s.Problem.Reason != "POLICY_REFUSED" || !strings.Contains(s.Problem.Message, "the machine sent none") || !strings.Contains(s.Problem.Remedy, "Only the hardware report") {
		t.Errorf("%+v, %v", s.Problem, err)
	}
}

// lent sends a captured report, which is not over this session.
type lent struct{}

func (lent) Report(context.Context, hardware.ReportData) (*attestv1.HardwareReport, error) {
	folder := "../../../../trust/attest/hardware/testdata/snp/milan-v2-vcek/"
	report, err := os.ReadFile(folder + "report.bin")
	if err != nil {
		return nil, err
	}
	certificate, err := os.ReadFile(folder + "vcek.der")
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: report, Certificate: certificate}}}, err
}

// The owner reads from a refused report what the policy has to list. What is not genuine is not shown.
func TestVerifyShowsTheValuesOfAGenuineReport(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{Hardware: lent{}})
	cfg := VerifyConfig{}
	cfg.Addr, cfg.Purpose, cfg.Locks = ownertest.ServeFirst(t, m).Addr, attest.PurposeMachine, []attest.Lock{attest.Unlocked()}
	cfg.Policy = attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
		p.Hardware = &attestv1.HardwarePolicy{SevSnp: &attestv1.SevSnpRules{MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan", BootLoader: new(uint32), Tee: new(uint32), Snp: new(uint32), Microcode: new(uint32)}}, Keys: []string{"vcek"}, AnyChip: true, AnyMeasurement: true}}
	})
	s, err := Verify(t.Context(), cfg)
	if err != nil || s.Accepted || s.Hardware != "sev-snp, not accepted" {
		t.Fatalf("%q, %v, %v", s.Hardware, s.Err, err)
	}
	s.Show(peerdial.Result{Claims: s.claims, Err: &attest.HardwareError{Report: "SEV-SNP on Milan"}}, cfg)
	if s.Hardware != "sev-snp, genuine, not accepted: SEV-SNP on Milan" {
		t.Errorf("%q", s.Hardware)
	}
}
