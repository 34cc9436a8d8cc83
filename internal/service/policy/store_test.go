package policy_test

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

type owner struct {
	public  ed25519.PublicKey
	private ed25519.PrivateKey
	ca      *attesttest.CA
	machine *attesttest.Machine
}

func newOwner(t *testing.T) *owner {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	ca := attesttest.NewCA(t)
	return &owner{public, private, ca, attesttest.NewMachine(t, ca, attesttest.Options{})}
}

func (o *owner) store(t *testing.T) *policy.Store {
	t.Helper()
	s, err := policy.New(policy.Config{Owner: attest.OwnerKeys{o.public}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (o *owner) object(t *testing.T, generation int64, serial uint64) *v1alpha1.AttestationPolicy {
	t.Helper()
	json := attesttest.Policy(t, o.ca, []*attesttest.Machine{o.machine}, func(p *attestv1.Policy) { p.Serial = serial })
	signed := attest.SignPolicy(o.private, json)
	return &v1alpha1.AttestationPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "u", Generation: generation},
		Spec:       v1alpha1.AttestationPolicySpec{Policy: string(json), Signature: base64.StdEncoding.EncodeToString(signed.GetSignature())},
	}
}

func (o *owner) claims(t *testing.T) attest.Claims {
	t.Helper()
	c, err := attesttest.Claims(t.Context(), o.machine.Attester(attest.PurposeMachine), attesttest.Verifier(t, o.ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestAJudgeAppliesThePolicyInForceNow(t *testing.T) {
	o := newOwner(t)
	s := o.store(t)
	banned := false
	appraiser, err := s.NewAppraiser(
		func(c attest.Claims) bool { return banned && c.Machine() == o.machine.ID() },
		func() ([]attest.Lock, error) { return []attest.Lock{attest.Unlocked()}, nil },
	)
	if err != nil {
		t.Fatal(err)
	}
	c := o.claims(t)
	expect := func(want attestv1.Reason) {
		t.Helper()
		if _, err := appraiser.Appraise(t.Context(), c); attest.ReasonOf(err) != want {
			t.Errorf("%v, want %s", err, attest.ReasonName(want))
		}
	}
	expect(attestv1.Reason_REASON_NOT_READY) // A3
	s.Set(o.object(t, 3, 5))
	expect(attestv1.Reason_REASON_ACCEPTED)
	if a, err := appraiser.Appraise(t.Context(), c); err != nil || a.Generation != 3 || a.PolicySerial != 5 {
		t.Errorf("appraisal %+v, %v", a, err)
	}
	banned = true
	expect(attestv1.Reason_REASON_BANNED)
	banned = false
	s.Remove(nil)
	expect(attestv1.Reason_REASON_NOT_READY)
}

// B7: the serials of all keys are one sequence, so the key that is being replaced can't bring back what the new one has replaced.
func TestPoliciesOfTwoKeysHaveOneSequenceOfSerials(t *testing.T) {
	before := newOwner(t)
	after, stranger := *before, *before
	var err error
	if after.public, after.private, err = ed25519.GenerateKey(nil); err != nil {
		t.Fatal(err)
	}
	if stranger.public, stranger.private, err = ed25519.GenerateKey(nil); err != nil {
		t.Fatal(err)
	}
	s, err := policy.New(policy.Config{Owner: attest.OwnerKeys{before.public, after.public}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		by     *owner
		serial uint64
		want   attestv1.Reason
	}{
		{before, 4, attestv1.Reason_REASON_ACCEPTED},
		{&stranger, 5, attestv1.Reason_REASON_POLICY_SIGNATURE},
		{&after, 3, attestv1.Reason_REASON_POLICY_INVALID},
		{&after, 5, attestv1.Reason_REASON_ACCEPTED},
		{before, 4, attestv1.Reason_REASON_POLICY_INVALID},
		{before, 6, attestv1.Reason_REASON_ACCEPTED}, // until the old key is dropped
		{&after, 5, attestv1.Reason_REASON_POLICY_INVALID},
		{&after, 7, attestv1.Reason_REASON_ACCEPTED},
	} {
		s.Set(step.by.object(t, int64(i+1), step.serial))
		if r, _ := s.Latest(); attest.ReasonOf(r.Err) != step.want {
			t.Errorf("step %d: %v, want %s", i, r.Err, attest.ReasonName(step.want))
		}
	}
	// A service that starts again knows the serial by the status, whichever key signed.
	again, err := policy.New(policy.Config{Owner: attest.OwnerKeys{before.public, after.public}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	old := before.object(t, 9, 6)
	old.Status.Serial = 7
	again.Set(old)
	if r, _ := again.Latest(); attest.ReasonOf(r.Err) != attestv1.Reason_REASON_POLICY_INVALID {
		t.Errorf("after a restart: %v", r.Err)
	}
}

func TestNoEvidenceIsCheckedWithoutAPolicy(t *testing.T) {
	o := newOwner(t)
	s := o.store(t)
	v := s.Guard(attesttest.Verifier(t, o.ca))
	check := func() error {
		_, err := attesttest.Claims(t.Context(), o.machine.Attester(attest.PurposeMachine), v, attest.PurposeMachine, attest.Binding{1})
		return err
	}
	if err := check(); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_READY {
		t.Errorf("%v, want NOT_READY", err)
	}
	s.Set(o.object(t, 1, 1))
	if err := check(); err != nil {
		t.Error(err)
	}
}

func TestALowerSerialIsNotForgottenByARestart(t *testing.T) {
	o := newOwner(t)
	s := o.store(t) // as after a restart: without state
	old := o.object(t, 2, 4)
	old.Status.Serial = 5
	s.Set(old)
	if report, _ := s.Latest(); attest.ReasonOf(report.Err) != attestv1.Reason_REASON_POLICY_INVALID || report.InForce != nil {
		t.Errorf("report %+v", report)
	}
	s.Set(o.object(t, 3, 5))
	if s.Generation() != 3 {
		t.Error("the right serial is not accepted")
	}
	t.Run("nor by deleting and making the object anew", func(t *testing.T) {
		s.Remove(old)
		again := o.object(t, 1, 4)
		again.UID = "v"
		s.Set(again)
		if s.Generation() != 0 {
			t.Error("a lower serial is in force")
		}
	})
}

// A provider that restores all control planes restores the status too (B7).
func TestAPolicyBelowTheLowestSerialOfTheImageAdmitsNobody(t *testing.T) {
	o := newOwner(t)
	s, err := policy.New(policy.Config{Owner: attest.OwnerKeys{o.public}, Lowest: 5, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	s.Set(o.object(t, 1, 4))
	if report, _ := s.Latest(); attest.ReasonOf(report.Err) != attestv1.Reason_REASON_POLICY_INVALID || report.InForce != nil || !strings.Contains(report.Err.Error(), "lowestPolicySerial") {
		t.Errorf("report %+v", report)
	}
	s.Set(o.object(t, 2, 5))
	if s.Generation() != 2 {
		t.Error("the lowest serial itself is not accepted")
	}
}

// With two policies of one serial, an attacker could switch between them.
func TestASerialBelongsToOnePolicy(t *testing.T) {
	o := newOwner(t)
	s := o.store(t)
	first := o.object(t, 1, 5)
	s.Set(first)
	other := o.object(t, 2, 5)
	other.Spec.Policy += " " // an equal policy, in other bytes
	other.Spec.Signature = base64.StdEncoding.EncodeToString(attest.SignPolicy(o.private, []byte(other.Spec.Policy)).GetSignature())
	refused := func(s *policy.Store, generation int64) {
		t.Helper()
		report, _ := s.Latest()
		if attest.ReasonOf(report.Err) != attestv1.Reason_REASON_POLICY_INVALID || s.Generation() != generation {
			t.Errorf("report %+v", report)
		}
	}
	s.Set(other)
	refused(s, 1)
	again := first.DeepCopy()
	again.Generation = 3
	s.Set(again)
	if s.Generation() != 3 {
		t.Error("the same policy is not accepted again")
	}
	t.Run("after a restart too", func(t *testing.T) {
		sum := sha256.Sum256([]byte(first.Spec.Policy))
		other.Status.Serial, other.Status.PolicyDigest = 5, hex.EncodeToString(sum[:])
		s := o.store(t)
		s.Set(other)
		refused(s, 0)
		again.Status = other.Status
		s.Set(again)
		if s.Generation() != 3 {
			t.Error("the same policy is not accepted again")
		}
	})
}

func TestAChangeOfStatusAloneIsNoNews(t *testing.T) {
	o := newOwner(t)
	s := o.store(t)
	p := o.object(t, 1, 1)
	s.Set(p)
	_, changed := s.Latest()
	again := p.DeepCopy()
	again.Status.Accepted = true
	s.Set(again)
	select {
	case <-changed:
		t.Error("it was reported again")
	default:
	}
}

func TestNothingIsMadeThatChecksNothing(t *testing.T) {
	o := newOwner(t)
	good := policy.Config{Owner: attest.OwnerKeys{o.public}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()}
	for name, change := range map[string]func(*policy.Config){
		"without an owner": func(c *policy.Config) { c.Owner = nil },
		"with half a key":  func(c *policy.Config) { c.Owner = attest.OwnerKeys{o.public[:16]} },
		"without a log":    func(c *policy.Config) { c.Log = nil },
		"without metrics":  func(c *policy.Config) { c.Metrics = nil },
	} {
		cfg := good
		change(&cfg)
		if _, err := policy.New(cfg); err == nil {
			t.Errorf("a store %s was made", name)
		}
	}
	s := o.store(t)
	if _, err := s.NewAppraiser(nil, func() ([]attest.Lock, error) { return nil, nil }); err == nil {
		t.Error("an appraiser that knows no bans was made")
	}
	if _, err := s.NewAppraiser(func(attest.Claims) bool { return false }, nil); err == nil {
		t.Error("an appraiser that knows no locks was made")
	}
	s.Set(o.object(t, 1, 1))
	appraiser, err := s.NewAppraiser(func(attest.Claims) bool { return false }, func() ([]attest.Lock, error) { return nil, nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := appraiser.Appraise(context.WithoutCancel(t.Context()), o.claims(t)); attest.ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
		t.Errorf("%v: without an expected lock state no machine may be accepted", err)
	}
}
