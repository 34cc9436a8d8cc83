package certificates

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
)

// inForce returns a store whose policy has serial 4 and generation 2.
func inForce(t *testing.T) *policy.Store {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := policy.New(policy.Config{Owner: attest.OwnerKeys{public}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	ca := attesttest.NewCA(t)
	signed := attest.SignPolicy(private, attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}, func(p *attestv1.Policy) { p.Serial = 4 }))
	s.Set(&v1alpha1.AttestationPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName, Generation: 2},
		Spec:       v1alpha1.AttestationPolicySpec{Policy: string(signed.GetPolicy()), Signature: base64.StdEncoding.EncodeToString(signed.GetSignature())},
	})
	return s
}

// J7
func TestARenewalNeedsARecentVerdictUnderThePolicyInForce(t *testing.T) {
	const maxAge = 15 * time.Minute
	verdict := func(age time.Duration, generation, serial int64) v1alpha1.AttestedNodeStatus {
		return v1alpha1.AttestedNodeStatus{LastVerdict: &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(time.Now().Add(-age))}, PolicyGeneration: generation, PolicySerial: serial}
	}
	refused := verdict(0, 2, 4)
	refused.LastVerdict.Accepted, refused.LastVerdict.Reason = false, "POLICY_REFUSED"
	p := inForce(t)
	without, err := policy.New(policy.Config{Owner: attest.OwnerKeys{make(ed25519.PublicKey, ed25519.PublicKeySize)}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	type asked struct {
		status v1alpha1.AttestedNodeStatus
		policy *policy.Store
		grace  time.Duration // the rest of it
		reason attestv1.Reason
		waits  bool
	}
	check := func(c asked) error {
		a := &Approver{policy: c.policy, maxAge: maxAge, grace: c.grace}
		return a.checkVerdict(&v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Status: c.status})
	}
	cases := map[string]asked{
		"recent":                           {verdict(14*time.Minute, 2, 4), p, 0, attestv1.Reason_REASON_ACCEPTED, false},
		"old":                              {verdict(16*time.Minute, 2, 4), p, time.Hour, attestv1.Reason_REASON_VERDICT_OLD, true},
		"of a time to come":                {verdict(-16*time.Minute, 2, 4), p, time.Hour, attestv1.Reason_REASON_VERDICT_OLD, true},
		"none":                             {v1alpha1.AttestedNodeStatus{}, p, time.Hour, attestv1.Reason_REASON_VERDICT_OLD, true},
		"refused":                          {refused, p, time.Hour, attestv1.Reason_REASON_POLICY_REFUSED, false},
		"under the policy before":          {verdict(0, 1, 3), p, 0, attestv1.Reason_REASON_VERDICT_OLD, true},
		"the same, while that is new":      {verdict(0, 1, 3), p, time.Hour, attestv1.Reason_REASON_ACCEPTED, false},
		"under a policy that was replaced": {verdict(0, 2, 3), p, 0, attestv1.Reason_REASON_VERDICT_OLD, true},
		"of the owner's program":           {verdict(0, 0, 4), p, time.Hour, attestv1.Reason_REASON_VERDICT_OLD, true},
		"without a policy":                 {verdict(0, 2, 4), without, time.Hour, attestv1.Reason_REASON_NOT_READY, true},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			err := check(tt)
			later, waits := errors.AsType[*notYet](err)
			if waits {
				err = later.err
			}
			if attest.ReasonOf(err) != tt.reason || waits != tt.waits {
				t.Errorf("%v, waits: %t", err, waits)
			}
		})
	}
	var rows []hardwaretest.Vector
	for _, name := range []string{"under the policy before", "under a policy that was replaced"} {
		rows = append(rows, hardwaretest.Vector{
			Name: "renewal with a verdict " + name, Want: attestv1.Reason_REASON_VERDICT_OLD,
			Wrong: func(testing.TB) error {
				err := check(cases[name])
				if later, waits := errors.AsType[*notYet](err); waits {
					return later.err
				}
				return err
			},
			Right: func(testing.TB) error { return check(cases["recent"]) },
		})
	}
	hardwaretest.Refused(t, "Peer of an older policy", rows)
}
