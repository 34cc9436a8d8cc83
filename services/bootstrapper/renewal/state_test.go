package renewal

import (
	"crypto/ed25519"
	"encoding/base64"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// K5: of an image with several keys, a backup is for the one that signed the policy in force.
func TestABackupIsForTheKeyThatSignedThePolicy(t *testing.T) {
	key := func() (ed25519.PublicKey, ed25519.PrivateKey) {
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		return public, private
	}
	before, signsBefore := key()
	after, signsAfter := key()
	_, stranger := key()
	ca := attesttest.NewCA(t)
	machine := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := func(by ed25519.PrivateKey, serial uint64, inForce int64) v1alpha1.AttestationPolicy {
		p := attest.SignPolicy(by, attesttest.Policy(t, ca, []*attesttest.Machine{machine}, func(p *attestv1.Policy) { p.Serial = serial }))
		return v1alpha1.AttestationPolicy{
			Spec:   v1alpha1.AttestationPolicySpec{Policy: string(p.GetPolicy()), Signature: base64.StdEncoding.EncodeToString(p.GetSignature())},
			Status: v1alpha1.AttestationPolicyStatus{Serial: inForce},
		}
	}
	c := &cluster{owner: attest.OwnerKeys{before, after}}
	for name, tt := range map[string]struct {
		policy v1alpha1.AttestationPolicy
		want   ed25519.PublicKey // nil: refused
	}{
		"before the switch":                   {policy(signsBefore, 4, 4), before},
		"after it":                            {policy(signsAfter, 5, 5), after},
		"before the services have applied it": {policy(signsAfter, 5, 4), after},
		"an older policy that was put back":   {policy(signsBefore, 4, 5), nil},
		"a stranger's policy":                 {policy(stranger, 9, 5), nil},
		"none":                                {v1alpha1.AttestationPolicy{}, nil},
		"a signature that is none":            {v1alpha1.AttestationPolicy{Spec: v1alpha1.AttestationPolicySpec{Signature: "!"}}, nil},
	} {
		got, err := c.signerOf(tt.policy)
		if (err == nil) != (tt.want != nil) || !got.Equal(tt.want) {
			t.Errorf("%s: %x, %v", name, got, err)
		}
	}
	// With one key nothing depends on a policy.
	if got, err := (&cluster{owner: attest.OwnerKeys{after}}).recipient(t.Context()); err != nil || !got.Equal(after) {
		t.Errorf("one key: %x, %v", got, err)
	}
}
