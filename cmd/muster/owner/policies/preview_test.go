package policies

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestAPolicyIsComparedWithWhatRuns(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	old, next := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "next"})
	policy := func(serial uint64, machines ...*attesttest.Machine) []byte {
		return attesttest.Policy(t, ca, machines, func(p *attestv1.Policy) { p.Serial = serial })
	}
	o := ownertest.Rules(ctx, t, kube, policy(1, old))
	inForce := func() int64 {
		p, err := kube.Policy(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return p.Generation
	}
	before := inForce()
	ownertest.Runs(t, "old1", old, 0)
	ownertest.Runs(t, "next1", next, 0)
	ownertest.Runs(t, "off", old, time.Hour)
	t.Run("one that a running node does not match is refused", func(t *testing.T) {
		if err := o.Write(ownerdir.PolicyFile, policy(2, next)); err != nil {
			t.Fatal(err)
		}
		_, err := ApplyPolicy(ctx, o.Dir, nil, Consent{})
		if p := problem.Explain(err); p.Reason != "POLICY_REFUSED" || !strings.Contains(p.Message, "1 running nodes") || !strings.Contains(p.Message, "old1: POLICY_REFUSED: its PCRs have the values of no image") || !strings.Contains(p.Remedy, "--expel") {
			t.Errorf("%+v", p)
		}
		if inForce() != before {
			t.Error("it was put in force")
		}
	})
	t.Run("a plan names the node and changes nothing", func(t *testing.T) {
		had, err := o.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := PlanPolicy(ctx, o.Dir, policy(3, next))
		if err != nil || plan.Policy.Serial() != 3 || len(plan.Refused) != 1 || plan.Refused[0].Node != "old1" || !strings.Contains(plan.Refused[0].Why, "values of no image") {
			t.Errorf("%+v, %v", plan, err)
		}
		if plan, err := PlanPolicy(ctx, o.Dir, policy(3, old, next)); err != nil || len(plan.Refused) != 0 {
			t.Errorf("%+v, %v", plan, err)
		}
		// The checks of an application.
		if _, err := PlanPolicy(ctx, o.Dir, policy(1, old, next)); err == nil || problem.Explain(err).Reason != "POLICY_INVALID" || !strings.Contains(problem.Explain(err).Remedy, "Set serial to 2") {
			t.Errorf("another policy of the same serial: %v", err)
		}
		ownertest.Create(t, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "cp9"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{9}.String(), Role: v1alpha1.RoleControlPlane}})
		if _, err := PlanPolicy(ctx, o.Dir, policy(3, old, next)); err == nil || problem.Explain(err).Reason != "SERVER_NOT_LISTED" {
			t.Errorf("a control plane that is not listed: %v", err)
		}
		if _, err := PlanPolicy(ctx, o.Dir, policy(3, old, next), "cp9"); err != nil {
			t.Error(err)
		}
		ownertest.Unenroll(ctx, "cp9")
		if has, err := o.Read(ownerdir.PolicyFile); err != nil || string(has) != string(had) || inForce() != before {
			t.Errorf("something was changed: %v", err)
		}
	})
	t.Run("a refused file does not replace the folder's policy", func(t *testing.T) {
		had, err := o.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ApplyPolicy(ctx, o.Dir, policy(3, next), Consent{}); err == nil {
			t.Error("it is accepted")
		}
		if has, err := o.Read(ownerdir.PolicyFile); err != nil || string(has) != string(had) {
			t.Errorf("enroll and forget would put it in force: %v", err)
		}
	})
	t.Run("a revoked machine", func(t *testing.T) {
		revoking := attesttest.Policy(t, ca, []*attesttest.Machine{old, next}, func(p *attestv1.Policy) {
			p.Serial, p.Tpm2.Revoked = 2, &attestv1.Revoked{Keys: []string{next.ID().String()}}
		})
		if err := o.Write(ownerdir.PolicyFile, revoking); err != nil {
			t.Fatal(err)
		}
		if _, err := ApplyPolicy(ctx, o.Dir, nil, Consent{}); err == nil || !strings.Contains(err.Error(), "next1: EK_UNTRUSTED: the policy revokes") || strings.Contains(err.Error(), "old1") {
			t.Errorf("%v", err)
		}
	})
	t.Run("with --expel it is put in force", func(t *testing.T) {
		if err := o.Write(ownerdir.PolicyFile, policy(2, next)); err != nil {
			t.Fatal(err)
		}
		waiting, stop := context.WithCancel(ctx) // no service answers
		defer stop()
		done := make(chan error, 1)
		go func() { _, err := ApplyPolicy(waiting, o.Dir, nil, Consent{Expel: true}); done <- err }()
		for inForce() == before {
			if err := ctx.Err(); err != nil {
				t.Fatal(err)
			}
		}
		stop()
		if err := <-done; err == nil {
			t.Error("it returned before a joinservice had read the policy")
		}
	})
}

// joinservice, which does not run here, appraises by the candidate what attests.
func TestAPreviewShowsEachRunningNodeAndLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	m, other, silent, off := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := attesttest.Policy(t, ca, []*attesttest.Machine{m})
	o := ownertest.Rules(ctx, t, kube, policy)
	ownertest.Runs(t, "n1", m, 0)
	ownertest.Runs(t, "n2", other, 0)
	ownertest.Runs(t, "n3", silent, 0)
	ownertest.Runs(t, "n4", off, time.Hour)
	// Collateral has ended, and they are refused.
	renewed, refused := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	for name, m := range map[string]*attesttest.Machine{"n5": renewed, "n6": refused} {
		ownertest.Runs(t, name, m, 0)
		n := &v1alpha1.AttestedNode{}
		if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil {
			t.Fatal(err)
		}
		n.Status.LastVerdict = &v1alpha1.Verdict{Reason: "HARDWARE_COLLATERAL", Time: metav1.Now()}
		if err := ownertest.Shared.Client.Status().Update(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	next := attesttest.Policy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) { p.Serial = 2 })
	if d, err := DiffPolicy(ctx, o.Dir, next); err != nil || !strings.Contains(d, "+serial: \"2\"") {
		t.Errorf("%v\n%s", err, d)
	}
	waiting, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	appraised := make(chan struct{})
	go func() {
		defer close(appraised)
		p := &v1alpha1.AttestationPolicy{}
		for range ownertest.Changes(ctx, &v1alpha1.AttestationPolicyList{}, v1alpha1.PolicyName) {
			if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
				t.Error(err)
				return
			}
			if p.Annotations[v1alpha1.PolicyCandidate] != "" {
				break
			}
		}
		encoded, text, _ := strings.Cut(p.Annotations[v1alpha1.PolicyCandidate], " ")
		signature, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			t.Error(err)
		}
		key, err := o.OwnerKey()
		if err != nil {
			t.Error(err)
			return
		}
		candidate := &attestv1.SignedPolicy{Policy: []byte(text), Signature: signature}
		if _, err := attest.OpenCandidate(attest.OwnerKeys{access.PublicOf(key)}, candidate); err != nil {
			t.Errorf("the candidate is refused: %v", err)
		}
		if _, err := attest.OpenPolicy(attest.OwnerKeys{access.PublicOf(key)}, candidate); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE {
			t.Errorf("whoever reads the preview's policy can put it in force: %v", err)
		}
		sum := sha256.Sum256([]byte(text))
		for name, v := range map[string]v1alpha1.Verdict{"n1": {Accepted: true, Reason: "ACCEPTED"}, "n2": {Reason: "POLICY_REFUSED"}, "n5": {Accepted: true, Reason: "ACCEPTED"}} {
			n := &v1alpha1.AttestedNode{}
			if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil {
				t.Error(err)
				return
			}
			v.Time, v.Message = metav1.Now(), "because\x1b[2J"
			n.Status.Candidate = &v1alpha1.CandidateVerdict{Digest: hex.EncodeToString(sum[:]), Verdict: v}
			if err := ownertest.Shared.Client.Status().Update(ctx, n); err != nil {
				t.Error(err)
			}
		}
	}()
	answered := 0
	got, err := PreviewPolicy(waiting, o.Dir, next, ownertest.Patience, func(Preview) {
		if answered++; answered == 3 {
			stop()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	<-appraised
	by := map[string]Preview{}
	for _, p := range got {
		by[p.Node] = p
	}
	if p := by["n5"]; !p.Answered || !p.Accepted || p.String() != "accepted" {
		t.Errorf("a node that only the policy in force refuses: %+v", p)
	}
	if p := by["n6"]; p.Answered || p.Accepted || !strings.Contains(p.String(), "refused by the policy in force with HARDWARE_COLLATERAL") {
		t.Errorf("a refused node that is silent: %+v, %s", p, p)
	}
	if len(got) != 5 || !by["n1"].Accepted || by["n2"].Accepted || by["n2"].Reason != "POLICY_REFUSED" || strings.Contains(by["n2"].Message, "\x1b") || by["n3"].Answered {
		t.Errorf("%+v", got)
	}
	p, err := kube.Policy(ctx)
	if err != nil || p.Annotations[v1alpha1.PolicyCandidate] != "" {
		t.Errorf("the candidate stays: %v", err)
	}
}
