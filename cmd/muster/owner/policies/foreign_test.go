package policies

import (
	"crypto/ed25519"
	"encoding/base64"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The services have the serial and digest of the last good policy, so they accept the same one again.
func TestTheLastPolicyCanBePutBackOverAForeignOne(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := func(plain bool) []byte {
		return attesttest.Policy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
			p.Serial, p.Insecure = 4, &attestv1.InsecureSwitches{AllowPlainState: plain}
		})
	}
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, "192.0.2.1:6443", policy(false))
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	o.Remembers(t, policy(false), key, nil)
	have := func(by ed25519.PrivateKey, text []byte) *v1alpha1.AttestationPolicy {
		_, json, err := policyfile.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		s := attest.SignPolicy(by, json)
		p := &v1alpha1.AttestationPolicy{Spec: v1alpha1.AttestationPolicySpec{Policy: string(s.GetPolicy()), Signature: base64.StdEncoding.EncodeToString(s.GetSignature())}}
		p.Status.Serial = 4
		return p
	}
	foreign := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	higher := func(have *v1alpha1.AttestationPolicy, text []byte) error {
		p, json, err := policyfile.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return Higher(o.Dir, have, p, string(json), o.File(ownerdir.PolicyFile))
	}
	if err := higher(have(foreign, policy(true)), policy(false)); err != nil {
		t.Errorf("the last one of known.json: %v", err)
	}
	if err := higher(have(foreign, policy(false)), policy(true)); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID || !strings.Contains(problem.Remedy(err), "policy.yaml") {
		t.Errorf("another one of its serial: %v", err)
	}
	if err := higher(have(key, policy(true)), policy(false)); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
		t.Errorf("over another one that the owner has signed: %v", err)
	}
}
