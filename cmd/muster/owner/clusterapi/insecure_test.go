package clusterapi

import (
	"slices"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// Who can write the status must not hide the switches of a policy that only another version of muster can read.
func TestAPolicyThatCannotBeReadMayHaveAnySwitch(t *testing.T) {
	for name, reported := range map[string][]string{"none reported": nil, "one reported": {"anyMachine"}} {
		p := &v1alpha1.AttestationPolicy{}
		p.Spec.Policy, p.Status.Insecure = `{"ofALaterVersion":true,"insecure":{"anyFirmware":true}}`, reported
		if got := Insecure(p); !slices.Equal(got, append(slices.Clone(reported), UnknownSwitches)) {
			t.Errorf("%s: %q", name, got)
		}
	}
}
