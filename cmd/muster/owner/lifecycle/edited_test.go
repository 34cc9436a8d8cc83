package lifecycle

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"slices"
	"strings"
	"testing"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"
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
		if err := tt.does(); err == nil || !strings.Contains(err.Error(), "differs from the cluster's policy") || !strings.Contains(problem.Remedy(err), "muster policy apply") {
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

// An administrator reads in the annotation muster.dev/candidate what muster policy diff has shown, and writes it into the cluster's policy: the services refuse
// it, and no command of the owner's may take it for the policy in force.
func TestAnEditIsNotPutInForceThroughAForeignPolicy(t *testing.T) {
	e := newEdited(t)
	if err := e.Write(ownerdir.PolicyFile, e.edited); err != nil {
		t.Fatal(err)
	}
	e.put(t, ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)), e.edited)
	e.refuses(t, "POLICY_SIGNATURE", "the cluster's policy", "Run muster policy apply")
	e.signs(t, e.edited) // the owner has applied it
	if _, err := PlanForget(e.ctx, e.Dir, "cp2", true, false); err != nil {
		t.Error(err, problem.Remedy(err))
	}
}

// Without a policy in the cluster, the last one of known.json is compared, and muster policy apply puts one there.
func TestAnEditIsNotPutInForceAfterThePolicyWasDeleted(t *testing.T) {
	e := newEdited(t)
	key, err := e.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	e.Remembers(t, e.before, key, nil)
	if err := ownertest.Shared.Client.Delete(e.ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}); err != nil {
		t.Fatal(err)
	}
	if err := e.Write(ownerdir.PolicyFile, e.edited); err != nil {
		t.Fatal(err)
	}
	if _, err := PlanForget(e.ctx, e.Dir, "cp2", true, false); err == nil || !strings.Contains(problem.Remedy(err), "Run muster policy apply first") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if plan, err := policies.PlanPolicy(e.ctx, e.Dir, e.edited); err != nil || len(plan.Refused) != 1 || plan.Refused[0].Node != "old1" {
		t.Errorf("%+v, %v", plan, err)
	}
	if err := e.Write(ownerdir.PolicyFile, e.before); err != nil {
		t.Fatal(err)
	}
	if _, err := PlanForget(e.ctx, e.Dir, "cp2", true, false); err != nil {
		t.Error(err, problem.Remedy(err))
	}
}

// A7: only the newest policy of the owner shows that a control plane is not listed. Others can delete the cluster's policy, or put an earlier one there.
func TestARemovalIsNotDoneByAnEarlierPolicy(t *testing.T) {
	e := newEdited(t)
	key, err := e.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	e.Remembers(t, e.before, key, nil) // lists cp2
	text, err := policyfile.ListControlPlanes(e.before, 6, nil, []attest.MachineID{{2}})
	if err == nil {
		err = e.Write(ownerdir.PolicyFile, text) // an interrupted command has written it, and not sent it
	}
	if err != nil {
		t.Fatal(err)
	}
	plans := func(how string) {
		t.Helper()
		if d, err := PlanForget(e.ctx, e.Dir, "cp2", true, false); err != nil || !strings.Contains(strings.Join(d.Plan, "\n"), "does not list machine") {
			t.Errorf("%s: %+v, %v", how, d, err)
		}
	}
	earlier, err := policyfile.ListControlPlanes(e.before, 4, nil, []attest.MachineID{{2}})
	if err != nil {
		t.Fatal(err)
	}
	e.signs(t, earlier)
	plans("an earlier policy")
	if err := ownertest.Shared.Client.Delete(e.ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}); err != nil {
		t.Fatal(err)
	}
	plans("no policy")
}

// The etcd member goes before the policy is changed: what prevents that change must be noticed before.
func TestAPlanRefusesAsTheChangeOfThePolicy(t *testing.T) {
	e := newEdited(t)
	e.signs(t, e.before)
	status := func(serial int64) {
		t.Helper()
		p := &v1alpha1.AttestationPolicy{}
		ownertest.Change(e.ctx, t, true, client.ObjectKey{Name: v1alpha1.PolicyName}, p, func() { p.Status.Serial = serial })
	}
	status(9)
	e.refuses(t, "POLICY_INVALID", "a policy of serial 9 was in force", "newer copy of this folder")
	status(5)
	// The folder has the change already, and the serial of before.
	text, err := policyfile.ListControlPlanes(e.before, 5, nil, []attest.MachineID{{2}})
	if err == nil {
		err = e.Write(ownerdir.PolicyFile, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.refuses(t, "POLICY_INVALID", "its serial is 5", "Set serial to 6")
	if err := e.Write(ownerdir.PolicyFile, e.before); err != nil {
		t.Fatal(err)
	}
	released := func(key ed25519.PublicKey) (remove func()) {
		t.Helper()
		store := storage.Init(driver.NewSecrets(ownertest.Kube(t, "helm", "system:masters").CoreV1().Secrets(clusterapi.Namespace)))
		r := &releasev1.Release{
			Name: "muster", Namespace: clusterapi.Namespace, Version: 1, Info: &releasev1.Info{Status: "deployed"},
			Config: map[string]any{"owner": map[string]any{"publicKeys": []any{base64.StdEncoding.EncodeToString(key)}}},
		}
		if err := store.Create(r); err != nil {
			t.Fatal(err)
		}
		return func() {
			if _, err := store.Delete("muster", 1); err != nil {
				t.Error(err)
			}
		}
	}
	remove := released(make([]byte, ed25519.PublicKeySize))
	e.refuses(t, "POLICY_SIGNATURE", "accept another owner's key", "put its owner.key back")
	remove()
	own, err := e.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	defer released(own.Public().(ed25519.PublicKey))()
	if _, err := PlanForget(e.ctx, e.Dir, "cp2", true, false); err != nil {
		t.Error(err, problem.Remedy(err))
	}
}

// edited is a cluster with the control planes cp1 and cp2, machines 1 and 2.
type edited struct {
	*ownertest.Owned

	ctx  context.Context
	kube *clusterapi.Client
	// before is the policy of serial 5, edited one of serial 6 without the image of a running node.
	before, edited []byte
}

func newEdited(t *testing.T) *edited {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	t.Cleanup(cancel)
	ownertest.Fresh(t)
	e := &edited{ctx: ctx, kube: ownertest.Defined(t)}
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	old, next := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "next"})
	policy := func(serial uint64, machines ...*attesttest.Machine) []byte {
		return attesttest.Policy(t, ca, machines, func(p *attestv1.Policy) {
			p.Serial, p.ControlPlanes = serial, []string{attest.MachineID{1}.String(), attest.MachineID{2}.String()}
		})
	}
	e.before, e.edited = policy(5, old, next), policy(6, next)
	e.Owned = ownertest.Rules(ctx, t, e.kube, e.before)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, name := range []string{"cp1", "cp2"} {
			ownertest.Unenroll(ctx, name)
		}
		_ = ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	})
	for i, name := range []string{"cp1", "cp2"} {
		if _, err := policies.Enroll(ctx, e.Dir, name, v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{byte(i + 1)}.String(), Role: v1alpha1.RoleControlPlane}, func(string) {}); err != nil {
			t.Fatal(err)
		}
	}
	ownertest.Runs(t, "old1", old, 0)
	return e
}

// signs has the cluster have a policy of the owner's.
func (e *edited) signs(t *testing.T, json []byte) {
	t.Helper()
	key, err := e.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	e.put(t, key, json)
}

// put has the cluster have a policy that a key has signed.
func (e *edited) put(t *testing.T, by ed25519.PrivateKey, text []byte) {
	t.Helper()
	json, err := policyfile.ToJSON(text)
	if err == nil {
		err = ownertest.PutPolicy(e.ctx, e.kube, attest.SignPolicy(by, json))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// refuses expects that forgetting cp2 is refused before anything is changed.
func (e *edited) refuses(t *testing.T, reason, says, remedy string) {
	t.Helper()
	before, err := e.kube.Policy(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, err = PlanForget(e.ctx, e.Dir, "cp2", true, false)
	if err == nil {
		t.Fatalf("it is not refused, want %s: %s", reason, says)
	}
	if p := problem.Explain(err); p.Reason != reason || !strings.Contains(p.Message, says) || !strings.Contains(p.Remedy, remedy) {
		t.Errorf("%v, %+v, want %s: %s; %s", err, p, reason, says, remedy)
	}
	if now, err := e.kube.Policy(e.ctx); err != nil || now.Generation != before.Generation {
		t.Errorf("the policy was replaced: %v", err)
	}
}
