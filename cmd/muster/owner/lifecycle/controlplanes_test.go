package lifecycle

import (
	"context"
	"math"
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
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// listed is the policy of the folder and that of the cluster, which are the same after each command.
func listed(t *testing.T, o *ownertest.Owned, serial uint64, want ...attest.MachineID) {
	t.Helper()
	_, p, json, err := policies.FolderPolicy(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var have v1alpha1.AttestationPolicy
	if err := ownertest.Shared.Client.Get(t.Context(), client.ObjectKey{Name: v1alpha1.PolicyName}, &have); err != nil {
		t.Fatal(err)
	}
	if have.Spec.Policy != string(json) || p.Serial() != serial || !slices.Equal(p.ControlPlanes(), want) {
		t.Errorf("the folder has serial %d with %v, want %d with %v; the cluster has %s", p.Serial(), p.ControlPlanes(), serial, want, have.Spec.Policy)
	}
}

// A7: the owner's policy lists the enrolled control planes, with one signature for each change, and each command
// continues after an interruption.
func TestThePolicyListsTheControlPlanes(t *testing.T) {
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, name := range []string{"cp7", "cp8", "w7"} {
			ownertest.Unenroll(ctx, name)
		}
		_ = ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	})
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))
	one, two, three := attest.MachineID{1}, attest.MachineID{2}, attest.MachineID{3}
	report := func(string) {}
	control := func(m attest.MachineID) v1alpha1.AttestedNodeSpec {
		return v1alpha1.AttestedNodeSpec{MachineID: m.String(), Role: v1alpha1.RoleControlPlane}
	}
	enroll := func(t *testing.T, name string, spec v1alpha1.AttestedNodeSpec) {
		t.Helper()
		if _, err := policies.Enroll(ctx, o.Dir, name, spec, report); err != nil {
			t.Fatal(err)
		}
	}
	if err := o.Write(ownerdir.AdminConf, ownertest.Kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a repetition changes nothing
		enroll(t, "cp7", control(one))
		listed(t, o, 2, one)
	}
	t.Run("a name that another machine has lists nobody", func(t *testing.T) {
		_, err := policies.Enroll(ctx, o.Dir, "cp7", control(two), report)
		if rpc.ReasonFrom(err) != attestv1.Reason_REASON_NAME_TAKEN {
			t.Errorf("%v, want NAME_TAKEN", err)
		}
		listed(t, o, 2, one)
	})
	t.Run("an enrollment that stopped after the folder goes on", func(t *testing.T) {
		text, err := o.Read(ownerdir.PolicyFile)
		if err == nil {
			text, err = policyfile.ListControlPlanes(text, 3, []policyfile.ControlPlane{{Machine: two}}, nil)
		}
		if err == nil {
			err = o.Write(ownerdir.PolicyFile, text)
		}
		if err != nil {
			t.Fatal(err)
		}
		enroll(t, "cp8", control(two))
		listed(t, o, 3, one, two)
	})
	t.Run("a worker is not listed, and its leaving changes nothing", func(t *testing.T) {
		enroll(t, "w7", v1alpha1.AttestedNodeSpec{MachineID: three.String(), Role: v1alpha1.RoleWorker})
		leave(ctx, t, o, "w7", nil)
		listed(t, o, 3, one, two)
	})
	t.Run("a worker that the API gives the machine of a control plane", func(t *testing.T) {
		enroll(t, "w8", v1alpha1.AttestedNodeSpec{MachineID: three.String(), Role: v1alpha1.RoleWorker})
		n := ownertest.EnrollmentOf(t, "w8")
		n.Spec.Banned = true
		if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		n.Spec.MachineID = two.String()
		if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		leave(ctx, t, o, "w8", nil)
		listed(t, o, 3, one, two)
	})
	t.Run("no serial of the status is signed", func(t *testing.T) {
		setStatus := func(serial int64) {
			t.Helper()
			p := &v1alpha1.AttestationPolicy{}
			if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: v1alpha1.PolicyName}, p); err != nil {
				t.Fatal(err)
			}
			p.Status.Serial = serial
			if err := ownertest.Shared.Client.Status().Update(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
		setStatus(math.MaxInt64 - 1)
		text, err := o.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		_, err = policies.Enroll(ctx, o.Dir, "cp9", control(three), report)
		if p := problem.Explain(err); p.Reason != "POLICY_INVALID" || !strings.Contains(p.Remedy, "--subresource status, serial: 3") {
			t.Errorf("%+v", p)
		}
		if have, err := o.Read(ownerdir.PolicyFile); err != nil || string(have) != string(text) {
			t.Errorf("the folder has another policy: %v", err)
		}
		setStatus(3)
		listed(t, o, 3, one, two)
	})
	t.Run("a policy that leaves out an enrolled control plane is refused", func(t *testing.T) {
		text, err := o.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		without, err := policyfile.ListControlPlanes(text, 4, nil, []attest.MachineID{two})
		if err == nil {
			err = o.Write(ownerdir.PolicyFile, without)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = policies.ApplyPolicy(ctx, o.Dir, nil, policies.Consent{})
		if p := problem.Explain(err); p.Reason != "SERVER_NOT_LISTED" || !strings.Contains(p.Remedy, two.String()+`" # cp8`) {
			t.Errorf("%+v", p)
		}
		// An edit in the folder is not signed together with another change.
		if _, err := PlanReplace(ctx, o.Dir, "cp7", clusterapi.Replacement{MachineID: three.String()}); err == nil || !strings.Contains(problem.Explain(err).Remedy, "policy apply") {
			t.Errorf("%v", err)
		}
		if err := o.Write(ownerdir.PolicyFile, text); err != nil {
			t.Fatal(err)
		}
		listed(t, o, 3, one, two)
	})
	t.Run("a machine that is replaced", func(t *testing.T) {
		leave(ctx, t, o, "cp7", &clusterapi.Replacement{MachineID: three.String()})
		listed(t, o, 4, two, three)
		var n v1alpha1.AttestedNode
		if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "cp7"}, &n); err != nil || n.Spec.MachineID != three.String() || n.Spec.Banned {
			t.Errorf("%+v, %v", n.Spec, err)
		}
	})
	t.Run("one that is forgotten, interrupted after the policy", func(t *testing.T) {
		d := plan(ctx, t, o, "cp8", nil)
		if err := d.listed.Apply(ctx, o.Dir, kube, report); err != nil {
			t.Fatal(err)
		}
		listed(t, o, 5, three)
		leave(ctx, t, o, "cp8", nil)
		listed(t, o, 5, three)
	})
}
