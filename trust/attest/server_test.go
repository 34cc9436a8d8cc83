package attest_test

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A7: an accepted machine may not serve joinservice or kms unless the policy lists it.
func TestOnlyListedMachinesMayServe(t *testing.T) {
	ca := attesttest.NewCA(t)
	listed, other := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	claims := func(m *attesttest.Machine) attest.Claims {
		c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeJoinservice), attesttest.Verifier(t, ca), attest.PurposeJoinservice, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	noServers := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{listed})
	one := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{listed}, attesttest.ControlPlanes(listed))
	for name, tt := range map[string]struct {
		policy  *attest.Policy
		machine *attesttest.Machine
		want    attestv1.Reason
	}{
		"a listed one":                           {one, listed, attestv1.Reason_REASON_ACCEPTED},
		"another one of the same image and root": {one, other, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"a policy that lists no server (A3)":     {noServers, listed, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"no policy (A3)":                         {&attest.Policy{}, listed, attestv1.Reason_REASON_FORMAT_NONE},
	} {
		c := claims(tt.machine)
		_, err := tt.policy.AppraiseServer(c, attest.Unlocked())
		_, same := tt.policy.ForServer(attest.Unlocked()).Appraise(t.Context(), c)
		if attest.ReasonOf(err) != tt.want || attest.ReasonOf(same) != tt.want {
			t.Errorf("%s: %v, %v", name, err, same)
		}
	}
	if _, err := one.AppraiseServer(claims(listed)); attest.ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
		t.Errorf("no lock state: %v", err)
	}
	if err := (*attest.Policy)(nil).MayServe(listed.ID()); attest.ReasonOf(err) != attestv1.Reason_REASON_SERVER_NOT_LISTED {
		t.Errorf("no policy at all: %v", err)
	}
}

func TestAListOfControlPlanesIsChecked(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	id := m.ID().String()
	many := make([]string, attest.MaxControlPlanes+1)
	for i := range many {
		many[i] = attest.MachineID{byte(i)}.String()
	}
	for name, tt := range map[string]struct {
		list []string
		good bool
	}{
		"one":                      {[]string{id}, true},
		"as many as may be":        {many[1:], true},
		"one more":                 {many, false},
		"one twice":                {[]string{id, id}, false},
		"one in upper case":        {[]string{strings.ToUpper(id[:63]) + "A"}, false},
		"one that is too short":    {[]string{id[2:]}, false},
		"an empty one":             {[]string{""}, false},
		"a node's name, not an ID": {[]string{"node1"}, false},
	} {
		p, err := attest.ParsePolicy(attesttest.Policy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) { p.ControlPlanes = tt.list }))
		if tt.good != (err == nil) || err != nil && attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && len(p.ControlPlanes()) != len(tt.list) {
			t.Errorf("%s: %v", name, p.ControlPlanes())
		}
	}
}
