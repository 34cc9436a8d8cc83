package policies

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// otherImages is a cluster whose policy has the images of two machines; policy returns one that has those of machines.
func otherImages(ctx context.Context, t *testing.T) (o *ownertest.Owned, old, next *attesttest.Machine, policy func(serial uint64, machines ...*attesttest.Machine) []byte) {
	t.Helper()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	old, next = attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "next"})
	policy = func(serial uint64, machines ...*attesttest.Machine) []byte {
		return attesttest.Policy(t, ca, machines, func(p *attestv1.Policy) { p.Serial = serial })
	}
	return ownertest.Rules(ctx, t, kube, policy(1, old, next)), old, next, policy
}

// A workstation whose clock is 20 minutes ahead sees an API server that is behind, and nodes that have not attested for 20 minutes.
func TestAWrongClockHidesNoRunningNode(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	o, old, next, policy := otherImages(ctx, t)
	ownertest.Runs(t, "old1", old, 20*time.Minute)
	ownertest.Runs(t, "off", old, time.Hour)
	o.ServerClock(t, -20*time.Minute)
	if plan, err := PlanPolicy(ctx, o.Dir, policy(2, next)); err != nil || len(plan.Refused) != 1 || plan.Refused[0].Node != "old1" {
		t.Errorf("%+v, %v", plan, err)
	}
	stop := answersPreview(ctx, t, "old1")
	got, err := PreviewPolicy(ctx, o.Dir, policy(2, next), ownertest.Patience, func(Preview) {})
	stop()
	if err != nil || len(got) != 1 || got[0].Node != "old1" || !got[0].Answered {
		t.Errorf("%+v, %v", got, err)
	}
}

// A node that answered an earlier preview of the same policy may not attest any more.
func TestAnAnswerToAnEarlierPreviewIsNone(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	o, old, next, policy := otherImages(ctx, t)
	ownertest.Runs(t, "old1", old, time.Minute)
	text := policy(2, next)
	_, json, err := policyfile.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	n, sum := &v1alpha1.AttestedNode{}, sha256.Sum256(json)
	ownertest.Change(ctx, t, true, types.NamespacedName{Name: "old1"}, n, func() {
		n.Status.Candidate = &v1alpha1.CandidateVerdict{Digest: hex.EncodeToString(sum[:]), Verdict: v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(time.Now().Add(-time.Hour))}}
	})
	if got, err := PreviewPolicy(ctx, o.Dir, text, 100*time.Millisecond, func(Preview) {}); err != nil || len(got) != 1 || got[0].Answered {
		t.Errorf("%+v, %v", got, err)
	}
}

// answersPreview has a node attest while a preview waits; stop ends that.
func answersPreview(ctx context.Context, t *testing.T, name string) (stop func()) {
	answering, cancel := context.WithCancel(ctx)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for answering.Err() == nil {
			p := &v1alpha1.AttestationPolicy{}
			if err := ownertest.Shared.Client.Get(answering, types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
				continue
			}
			if _, text, there := strings.Cut(p.Annotations[v1alpha1.PolicyCandidate], " "); there {
				n, sum := &v1alpha1.AttestedNode{}, sha256.Sum256([]byte(text))
				ownertest.Change(answering, t, true, types.NamespacedName{Name: name}, n, func() {
					n.Status.Candidate = &v1alpha1.CandidateVerdict{Digest: hex.EncodeToString(sum[:]), Verdict: v1alpha1.Verdict{Reason: "POLICY_REFUSED", Time: metav1.Now()}}
				})
				return
			}
		}
	}()
	return func() { cancel(); <-answered }
}

// The joinservice that n1 attests to has the right time. The API server, and the joinservice that n2 attests to, are on a control plane whose clock is ahead.
// The one that n3 attests to is behind; its kubelet is heard.
func TestClocksOfControlPlanesHideNoRunningNode(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	o, old, next, policy := otherImages(ctx, t)
	ownertest.Runs(t, "n1", old, 0)
	ownertest.Runs(t, "n2", next, -20*time.Minute)
	ownertest.Runs(t, "n3", old, 20*time.Minute)
	ownertest.Create(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n3"}})
	o.ServerClock(t, 20*time.Minute)
	expels := func(want ...string) {
		t.Helper()
		plan, err := PlanPolicy(ctx, o.Dir, policy(2, next))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range plan.Refused {
			names = append(names, e.Node)
		}
		if !slices.Equal(names, want) {
			t.Errorf("it expels %q, want %q", names, want)
		}
	}
	ownertest.NodeIs(t, "n3", false)
	expels("n1")
	ownertest.NodeIs(t, "n3", true)
	expels("n1", "n3")
	if err := ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "n2"}}); err != nil {
		t.Fatal(err)
	}
	stop1, stop3 := answersPreview(ctx, t, "n1"), answersPreview(ctx, t, "n3")
	got, err := PreviewPolicy(ctx, o.Dir, policy(2, next), ownertest.Patience, func(Preview) {})
	stop1()
	stop3()
	if err != nil || len(got) != 2 || !got[0].Answered || !got[1].Answered {
		t.Errorf("%+v, %v", got, err)
	}
	n3 := &v1alpha1.AttestedNode{}
	ownertest.Change(ctx, t, false, types.NamespacedName{Name: "n3"}, n3, func() { n3.Spec.Banned = true })
	expels("n1")
}

// If joinservice records nothing, which nodes run is not known: that must not mean that none does.
func TestIfNoNodeAttestsAllAreCompared(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	o, old, next, policy := otherImages(ctx, t)
	ownertest.Runs(t, "old1", old, time.Hour)
	ownertest.Runs(t, "next1", next, time.Hour)
	ownertest.Runs(t, "refused", old, time.Hour)
	refused := func(ago time.Duration) {
		n := &v1alpha1.AttestedNode{}
		ownertest.Change(ctx, t, true, types.NamespacedName{Name: "refused"}, n, func() {
			n.Status.LastVerdict = &v1alpha1.Verdict{Reason: "POLICY_REFUSED", Time: metav1.NewTime(time.Now().Add(-ago))}
		})
	}
	refused(time.Hour)
	if plan, err := PlanPolicy(ctx, o.Dir, policy(2, next)); err != nil || len(plan.Refused) != 1 || plan.Refused[0].Node != "old1" || !plan.NoneAttests {
		t.Errorf("%+v, %v", plan, err)
	}
	waiting, stop := context.WithTimeout(ctx, InForceTimeout) // no service answers
	defer stop()
	_, err := ApplyPolicy(waiting, o.Dir, policy(2, next), Consent{})
	if p := problem.Explain(err); p.Reason != "POLICY_REFUSED" || !strings.Contains(p.Message, "no node has attested in the last 15m0s") || !strings.Contains(p.Remedy, "muster doctor") || !strings.Contains(p.Remedy, "--expel") {
		t.Errorf("%+v", p)
	}
	if plan, err := PlanPolicy(ctx, o.Dir, policy(2, old, next)); err != nil || len(plan.Refused) > 0 {
		t.Errorf("one that all match: %+v, %v", plan, err)
	}
	refused(0) // it attests
	if plan, err := PlanPolicy(ctx, o.Dir, policy(2, next)); err != nil || len(plan.Refused) > 0 || plan.NoneAttests {
		t.Errorf("the others are off: %+v, %v", plan, err)
	}
}

// The second of two previews replaces the first one's policy: the first one says so, and leaves the second one's alone.
func TestOfTwoPreviewsTheFirstEnds(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	o, old, next, policy := otherImages(ctx, t)
	ownertest.Runs(t, "old1", old, 0)
	candidate := func() string {
		p := &v1alpha1.AttestationPolicy{}
		if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
			t.Fatal(err)
		}
		return p.Annotations[v1alpha1.PolicyCandidate]
	}
	changes := func(from string) string {
		for range ownertest.Changes(ctx, &v1alpha1.AttestationPolicyList{}, v1alpha1.PolicyName) {
			if now := candidate(); now != from {
				return now
			}
		}
		t.Fatal(ctx.Err())
		return ""
	}
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := PreviewPolicy(ctx, o.Dir, policy(2, old), ownertest.Patience, func(Preview) {})
		first <- err
	}()
	one := changes("")
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, err := PreviewPolicy(waiting, o.Dir, policy(3, next), ownertest.Patience, func(Preview) {})
		second <- err
	}()
	two := changes(one)
	if err := <-first; err == nil || !strings.Contains(err.Error(), "another muster policy diff") {
		t.Errorf("the first one: %v", err)
	}
	if candidate() != two {
		t.Error("the first one has removed the second one's policy")
	}
	stop()
	if err := <-second; err != nil && !errors.Is(err, context.Canceled) || candidate() != "" { // interrupted while it waits, or in a request
		t.Errorf("the second one: %v", err)
	}
}
