package tpm2_test

import (
	"crypto/x509"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// A machine that lacks only a place in a list is told apart from one that no list would let in. Appraise refuses all that lack one.
func TestOnlyAMissingPlaceInAListCanBeApproved(t *testing.T) {
	ca, cloud := attesttest.NewCA(t), attesttest.NewCA(t)
	other := strings.Repeat("0c", 32)
	vendor := func(p *attestv1.Policy) {
		p.Tpm2.EkRoots[0].Operator, p.Tpm2.MachineIds = false, []string{other}
	}
	clouds := func(change func(*attestv1.PlatformRoot)) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) {
			r := &attestv1.PlatformRoot{Pem: cloud.PEM(), Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}, MachineIds: []string{other}}
			change(r)
			p.Tpm2.PlatformRoots = append(p.Tpm2.PlatformRoots, r)
		}
	}
	same := func(*attestv1.PlatformRoot) {}
	revoke := func(m *attesttest.Machine) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) { p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{m.ID().String()}} }
	}
	minimum := func(version string) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].MinFirmwareVersion = version }
	}
	model := attesttest.NewMachine(t, ca, attesttest.Options{})
	machine := func(o attesttest.Options) *attesttest.Machine { return attesttest.NewMachine(t, ca, o) }
	certified, bare := machine(attesttest.Options{}), machine(attesttest.Options{Bare: true})
	rented := machine(attesttest.Options{Platform: &attesttest.Platform{CA: cloud, Project: "ours", Zone: "a"}})
	foreign := machine(attesttest.Options{Platform: &attesttest.Platform{CA: cloud, Project: "theirs", Zone: "a"}})
	inAWS := machine(attesttest.Options{Nitro: &attesttest.Nitro{CA: cloud}})
	aws := func(id string) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) {
			p.Tpm2.NitroRoots = append(p.Tpm2.NitroRoots, &attestv1.NitroRoot{Pem: cloud.PEM(), MachineIds: []string{id}})
		}
	}
	foreignAWS := func(p *attestv1.Policy) {
		p.Tpm2.NitroRoots = append(p.Tpm2.NitroRoots, &attestv1.NitroRoot{Pem: ca.PEM(), MachineIds: []string{other}})
	}
	tampered := machine(attesttest.Options{Bare: true, Image: "tampered"})
	locked := machine(attesttest.Options{Bare: true})
	locked.LockTo([32]byte{9})
	secure := machine(attesttest.Options{Bare: true, SecureBoot: true}) // another firmware
	refused, untrusted := attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_EK_UNTRUSTED
	ok := attestv1.Reason_REASON_ACCEPTED
	for name, tt := range map[string]struct {
		m       *attesttest.Machine // the policy has the bank and values of model, of AWS's those of inAWS
		changes []func(*attestv1.Policy)
		list    string
		want    attestv1.Reason // of what remains once it is listed
		now     attestv1.Reason // of Appraise
	}{
		"a certified machine":                        {certified, []func(*attestv1.Policy){vendor}, "tpm2.machineIds", ok, refused},
		"a certified machine with old TPM firmware":  {certified, []func(*attestv1.Policy){vendor, minimum("0xffffffffffffffff")}, "", refused, refused},
		"a certified machine that needs no list":     {certified, nil, "", ok, ok},
		"a certified machine that is revoked":        {certified, []func(*attestv1.Policy){vendor, revoke(certified)}, "", untrusted, untrusted},
		"a bare machine":                             {bare, nil, "tpm2.bareMachineIds", ok, untrusted},
		"a bare machine beside others":               {bare, []func(*attestv1.Policy){lists(certified.ID())}, "tpm2.bareMachineIds", ok, untrusted},
		"a bare machine that is listed":              {bare, []func(*attestv1.Policy){lists(bare.ID())}, "", ok, ok},
		"a bare machine that is revoked":             {bare, []func(*attestv1.Policy){revoke(bare)}, "", untrusted, untrusted},
		"a bare machine with another image":          {tampered, nil, "tpm2.bareMachineIds", refused, untrusted},
		"a bare machine with other firmware":         {secure, nil, "tpm2.bareMachineIds", refused, untrusted},
		"a bare machine of another cluster":          {locked, nil, "tpm2.bareMachineIds", attestv1.Reason_REASON_LOCK_FOREIGN, untrusted},
		"a rented machine":                           {rented, []func(*attestv1.Policy){clouds(same)}, "tpm2.platformRoots[0].machineIds", ok, refused},
		"a rented machine of a rule without a list":  {rented, []func(*attestv1.Policy){clouds(func(r *attestv1.PlatformRoot) { r.MachineIds = nil })}, "", ok, ok},
		"a rented machine of the second rule":        {rented, []func(*attestv1.Policy){clouds(func(r *attestv1.PlatformRoot) { r.Zones = []string{"b"} }), clouds(same)}, "tpm2.platformRoots[1].machineIds", ok, refused},
		"a rented machine of another project":        {foreign, []func(*attestv1.Policy){clouds(same)}, "", untrusted, untrusted},
		"a machine of AWS":                           {inAWS, []func(*attestv1.Policy){aws(other)}, "tpm2.nitroRoots[0].machineIds", ok, refused},
		"a machine of AWS that is listed":            {inAWS, []func(*attestv1.Policy){aws(inAWS.ID().String())}, "", ok, ok},
		"a machine of AWS, of the second rule":       {inAWS, []func(*attestv1.Policy){foreignAWS, aws(other)}, "tpm2.nitroRoots[1].machineIds", ok, refused},
		"a machine of AWS below no listed root":      {inAWS, []func(*attestv1.Policy){foreignAWS}, "", untrusted, untrusted},
		"a machine of AWS that is revoked":           {inAWS, []func(*attestv1.Policy){aws(other), revoke(inAWS)}, "", untrusted, untrusted},
		"a rented machine without a rule for clouds": {rented, nil, "", untrusted, untrusted},
	} {
		t.Run(name, func(t *testing.T) {
			roots := append(ca.Roots(), cloud.Roots()...)
			c, err := attesttest.Claims(t.Context(), tt.m.Attester(attest.PurposeMachine), verifierOf(t, roots), attest.PurposeMachine, attest.Binding{1})
			if err != nil {
				t.Fatal(err)
			}
			values := model
			if tt.m == inAWS {
				values = inAWS
			}
			p := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{values}, tt.changes...)
			list, err := p.AppraiseAsListed(c, attest.Unlocked())
			if list != tt.list || attest.ReasonOf(err) != tt.want {
				t.Errorf("list %q, %v; want %q and %s", list, err, tt.list, attest.ReasonName(tt.want))
			}
			if _, err := p.Appraise(c, attest.Unlocked()); attest.ReasonOf(err) != tt.now {
				t.Errorf("Appraise: %v, want %s", err, attest.ReasonName(tt.now))
			}
		})
	}
	for _, p := range []*attest.Policy{nil, {}, attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{model})} {
		if list, err := p.AppraiseAsListed(attest.Claims{}, attest.Unlocked()); list != "" || err == nil {
			t.Errorf("without claims: %q, %v", list, err)
		}
	}
}

func verifierOf(t *testing.T, roots []*x509.Certificate) *tpm2.Verifier {
	t.Helper()
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	return v
}
