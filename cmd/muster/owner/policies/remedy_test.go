package policies

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// The general texts of these reasons name muster approve, which has just refused the machine.
func TestARefusedApprovalDoesNotAdviseToApprove(t *testing.T) {
	for _, reason := range []attestv1.Reason{attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_EK_UNTRUSTED} {
		c := &Candidate{}
		(&Approver{}).booted(c, attest.Refuse(reason, "a rule of the policy"))
		if c.Problem == nil || c.Problem.Remedy == "" || strings.Contains(c.Problem.Remedy, "`muster approve`") {
			t.Errorf("%s: %+v", reason, c.Problem)
		}
	}
}
