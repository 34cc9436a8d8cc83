package signedpolicy_test

import (
	"crypto/ed25519"
	"encoding/base64"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOnlyTheOwnersPolicyIsOpened(t *testing.T) {
	public, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	ca := attesttest.NewCA(t)
	signed := attest.SignPolicy(key, attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))
	for name, tt := range map[string]struct {
		change func(*v1alpha1.AttestationPolicySpec)
		want   attestv1.Reason
	}{
		"the owner's":  {change: func(*v1alpha1.AttestationPolicySpec) {}},
		"another text": {func(s *v1alpha1.AttestationPolicySpec) { s.Policy += " " }, attestv1.Reason_REASON_POLICY_SIGNATURE},
		"no signature": {func(s *v1alpha1.AttestationPolicySpec) { s.Signature = "" }, attestv1.Reason_REASON_POLICY_SIGNATURE},
		"no base64":    {func(s *v1alpha1.AttestationPolicySpec) { s.Signature = "?" }, attestv1.Reason_REASON_POLICY_SIGNATURE},
	} {
		p := &v1alpha1.AttestationPolicy{Spec: v1alpha1.AttestationPolicySpec{Policy: string(signed.GetPolicy()), Signature: base64.StdEncoding.EncodeToString(signed.GetSignature())}}
		tt.change(&p.Spec)
		if _, err := signedpolicy.Open(p, attest.OwnerKeys{public}); (err != nil) != (tt.want != 0) || err != nil && attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v", name, err)
		}
		if n, err := signedpolicy.Serial(p, attest.OwnerKeys{public}); (err != nil) != (tt.want != 0) || err != nil && attest.ReasonOf(err) != tt.want || err == nil && n != 1 {
			t.Errorf("%s: serial %d, %v", name, n, err)
		}
	}
}
