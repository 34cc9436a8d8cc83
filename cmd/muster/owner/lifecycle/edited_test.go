package lifecycle

import (
	"context"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// muster policy apply refuses a policy that a running node does not match. An owner who has edited the control planes in the same file must not put it in
// force by a command that changes only those.
func TestAnEditThatWasNotAppliedIsPutInForceByNoOtherCommand(t *testing.T) {
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	old, next := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "next"})
	policy := func(serial uint64, control []attest.MachineID, machines ...*attesttest.Machine) []byte {
		return attesttest.Policy(t, ca, machines, func(p *attestv1.Policy) {
			p.Serial, p.ControlPlanes = serial, nil
			for _, id := range control {
				p.ControlPlanes = append(p.ControlPlanes, id.String())
			}
		})
	}
	cp1, cp2, cp3 := attest.MachineID{1}, attest.MachineID{2}, attest.MachineID{3}
	both := []attest.MachineID{cp1, cp2}
	o := ownertest.Rules(ctx, t, kube, policy(5, both, old, next))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, name := range []string{"cp1", "cp2", "cp3"} {
			ownertest.Unenroll(ctx, name)
		}
		_ = ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	})
	control := func(m attest.MachineID) v1alpha1.AttestedNodeSpec {
		return v1alpha1.AttestedNodeSpec{MachineID: m.String(), Role: v1alpha1.RoleControlPlane}
	}
	for name, id := range map[string]attest.MachineID{"cp1": cp1, "cp2": cp2} {
		if _, err := policies.Enroll(ctx, o.Dir, name, control(id), func(string) {}); err != nil {
			t.Fatal(err)
		}
	}
	ownertest.Runs(t, "old1", old, 0)
	inForce := func() string {
		var have v1alpha1.AttestationPolicy
		if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: v1alpha1.PolicyName}, &have); err != nil {
			t.Fatal(err)
		}
		return have.Spec.Policy
	}
	before := inForce()
	for name, tt := range map[string]struct {
		folder []byte
		does   func() error
	}{
		"forget": {policy(6, []attest.MachineID{cp1}, next), func() error {
			d, err := PlanForget(ctx, o.Dir, "cp2", true, false)
			if err == nil {
				_, err = d.Do(ctx, func(string) {})
			}
			return err
		}},
		"replace": {policy(6, []attest.MachineID{cp1, cp3}, next), func() error {
			d, err := PlanReplace(ctx, o.Dir, "cp2", clusterapi.Replacement{MachineID: cp3.String()})
			if err == nil {
				_, err = d.Do(ctx, func(string) {})
			}
			return err
		}},
		"enroll": {policy(6, append(slices.Clone(both), cp3), next), func() error {
			_, err := policies.Enroll(ctx, o.Dir, "cp3", control(cp3), func(string) {})
			return err
		}},
		"another control plane is lost": {policy(6, nil, old, next), func() error {
			d, err := PlanForget(ctx, o.Dir, "cp2", true, false)
			if err == nil {
				_, err = d.Do(ctx, func(string) {})
			}
			return err
		}},
	} {
		if err := o.Write(ownerdir.PolicyFile, tt.folder); err != nil {
			t.Fatal(err)
		}
		if err := tt.does(); err == nil || !strings.Contains(err.Error(), "is not the policy that the cluster has") || !strings.Contains(problem.Remedy(err), "muster policy apply") {
			t.Errorf("%s: %v: %s", name, err, problem.Remedy(err))
		}
		if inForce() != before {
			t.Fatalf("%s: %s is in force", name, inForce())
		}
	}
	// An edit of just the control planes may go on, in another order, too, and the plan says so.
	if err := o.Write(ownerdir.PolicyFile, policy(6, []attest.MachineID{cp3, cp1, cp2}, old, next)); err != nil {
		t.Fatal(err)
	}
	if _, err := policies.Enroll(ctx, o.Dir, "cp3", control(cp3), func(string) {}); err != nil {
		t.Fatal(err, problem.Remedy(err))
	}
	text, err := o.Read(ownerdir.PolicyFile)
	if err == nil {
		text, err = policyfile.ListControlPlanes(text, 7, nil, []attest.MachineID{cp2})
	}
	if err == nil {
		err = o.Write(ownerdir.PolicyFile, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	d, err := PlanForget(ctx, o.Dir, "cp2", true, false)
	if err != nil || !strings.Contains(strings.Join(d.Plan, "\n"), "does not list machine "+cp2.String()) {
		t.Fatalf("%+v, %v", d, err)
	}
	if _, err := d.Do(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
	listed(t, o, 7, cp3, cp1)
}
