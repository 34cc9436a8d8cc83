package attest_test

import (
	"errors"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

// TestAReportIsVerifiedAfterEverythingElse sends reports that nothing but their verification refuses (A10).
func TestAReportIsVerifiedAfterEverythingElse(t *testing.T) {
	f := newFleet(t)
	for name, tt := range map[string]struct {
		whole func(*attestv1.Policy)
		want  attestv1.Reason
	}{
		"an image that is not listed": {func(p *attestv1.Policy) { p.Tpm2.Images[0].Pcrs[0].Value = strings.Repeat("00", 32) }, attestv1.Reason_REASON_POLICY_REFUSED},
		"no root":                     {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Pem = attesttest.NewCA(t).PEM() }, attestv1.Reason_REASON_EK_UNTRUSTED},
		"nothing else":                {func(*attestv1.Policy) {}, hardware.Signature},
	} {
		s := f.scene(t, hwreport.SevSnp)
		s.whole = tt.whole
		s.sent = func(r *attestv1.HardwareReport) *attestv1.HardwareReport { r.GetSevSnp().Report[0x2A0] ^= 1; return r }
		_, _, err := s.appraise()
		if attest.ReasonOf(err) != tt.want || strings.Contains(err.Error(), "SEV-SNP") != (tt.want == hardware.Signature) {
			t.Errorf("%s: %v", name, err)
		}
		if _, only := errors.AsType[*attest.HardwareError](err); only != (tt.want == hardware.Signature) {
			t.Errorf("%s: the refusal is for the report alone: %t", name, only)
		}
	}
}

// A program without a TPM can make a bare EK, and attach a genuine report of another machine.
func TestAReportOfAMachineThatIsNotListedIsNotVerified(t *testing.T) {
	f := newFleet(t)
	s := f.scene(t, hwreport.SevSnp)
	s.bare = true
	s.sent = func(r *attestv1.HardwareReport) *attestv1.HardwareReport { r.GetSevSnp().Report[0x2A0] ^= 1; return r }
	_, c, err := s.appraise()
	if attest.ReasonOf(err) != attestv1.Reason_REASON_EK_UNTRUSTED {
		t.Fatal(err)
	}
	if list, err := s.parsed.AppraiseAsListed(c, attest.Unlocked()); list != "tpm2.bareMachineIds" || err != nil {
		t.Errorf("list %q, %v", list, err)
	}
	if err := s.parsed.CheckHardware(c); attest.ReasonOf(err) != hardware.Signature {
		t.Errorf("the report, which an owner's command verifies before it lists the machine: %v", err)
	}
}
