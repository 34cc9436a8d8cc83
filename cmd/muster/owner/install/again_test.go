package install

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// bare removes what earlier tests have left in the API server, also the release of Muster's chart.
func bare(t *testing.T) {
	t.Helper()
	ownertest.Fresh(t)
	if err := ownertest.Shared.Client.DeleteAllOf(t.Context(), &corev1.Secret{}, client.InNamespace(clusterapi.Namespace), client.MatchingLabels{"owner": "helm"}); err != nil {
		t.Fatal(err)
	}
}

// repeated is init again, in an installed cluster.
type repeated struct {
	*ownertest.Owned

	cfg    InitConfig
	kube   *clusterapi.Client
	first  *attesttest.Machine
	policy []byte // of the folder and the cluster
}

// checkAgain runs init again in a cluster or with a folder that has changed since. Afterwards, the cluster is as before.
func checkAgain(t *testing.T, o *ownertest.Owned, cfg InitConfig, ca *attesttest.CA, first *attesttest.Machine) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); rolls(ctx, ownertest.Kube(t, "controller", "system:masters")) }()
	defer func() { cancel(); <-done }()
	a := &repeated{Owned: o, cfg: cfg, first: first}
	var err error
	if a.kube, err = access.Connect(o.Dir); err != nil {
		t.Fatal(err)
	}
	if a.policy, err = o.Read(ownerdir.PolicyFile); err != nil {
		t.Fatal(err)
	}
	t.Run("another policy is for policy apply", a.otherPolicy)
	t.Run("a folder of before a rotation of its key changes nothing", a.otherKey)
	t.Run("a policy that is gone is not replaced by an older one", a.noPolicy)
	t.Run("a first machine that is banned or gone stays so", func(t *testing.T) { a.firstGone(t, attesttest.NewMachine(t, ca, attesttest.Options{})) })
}

func (a *repeated) init(t *testing.T) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	return Init(ctx, a.cfg)
}

func (a *repeated) write(t *testing.T, policy []byte, err error) {
	t.Helper()
	if err == nil {
		err = a.Write(ownerdir.PolicyFile, policy)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (a *repeated) refused(t *testing.T, reason, remedy string) {
	t.Helper()
	was, written := a.cfg.Manifests, neverApplied(t)
	a.cfg.Manifests = written
	err := a.init(t)
	a.cfg.Manifests = was
	absent(t, written)
	if err == nil {
		t.Errorf("it was not refused, want %s", reason)
	} else if p := problem.Explain(err); p.Reason != reason || !strings.Contains(p.Remedy, remedy) {
		t.Errorf("%+v, want %s", p, reason)
	}
}

// neverApplied returns manifests for a run that must be refused before any change.
func neverApplied(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	m, err := clusterapi.ParseManifests("refused.yaml", []byte("{apiVersion: v1, kind: ConfigMap, metadata: {namespace: default, name: of-a-refused-run}}"))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func absent(t *testing.T, manifests []*unstructured.Unstructured) {
	t.Helper()
	for _, m := range manifests {
		if err := ownertest.Shared.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m.DeepCopy()); !apierrors.IsNotFound(err) {
			t.Errorf("the refused run has applied %s: %v", m.GetName(), err)
		}
	}
}

// unchanged expects init to be refused, and neither policy nor release to change.
func (a *repeated) unchanged(t *testing.T, reason, remedy string) {
	t.Helper()
	state := func() (policy string, generation int64, revision int) {
		have, err := a.kube.Policy(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		r, err := a.kube.Release(a.cfg.Log)
		if err != nil {
			t.Fatal(err)
		}
		return have.Spec.Policy, have.Generation, r.Version
	}
	policy, generation, revision := state()
	a.refused(t, reason, remedy)
	if p, g, r := state(); p != policy || g != generation || r != revision {
		t.Errorf("generation %d of the policy and revision %d of the release, before: %d and %d", g, r, generation, revision)
	}
}

func (a *repeated) otherPolicy(t *testing.T) {
	for _, serial := range []uint64{2, 9} { // an old copy of the folder, and an edit that nothing has been compared with
		text, err := policyfile.ListControlPlanes(a.policy, serial, nil, nil)
		a.write(t, text, err)
		a.unchanged(t, "POLICY_INVALID", "muster policy apply")
	}
	a.write(t, a.policy, nil)
}

func (a *repeated) otherKey(t *testing.T) {
	path := a.File("owner.key")
	own, err := os.ReadFile(path)
	if err == nil {
		err = os.Remove(path)
	}
	if err == nil {
		_, err = ownerdir.NewKeyFile(path)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.unchanged(t, "POLICY_SIGNATURE", "use the newest")
	if err := os.WriteFile(path, own, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (a *repeated) noPolicy(t *testing.T) {
	was, err := a.kube.Policy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	accounts := ownertest.Kube(t, "admin", "system:masters").CoreV1().ServiceAccounts(clusterapi.Namespace)
	if err := errors.Join(ownertest.Shared.Client.Delete(t.Context(), was), accounts.Delete(t.Context(), "kms", metav1.DeleteOptions{})); err != nil {
		t.Fatal(err)
	}
	key, err := a.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	edited, err := policyfile.ListControlPlanes(a.policy, 9, nil, nil)
	a.write(t, edited, err)
	if err := os.Remove(a.File(ownerdir.SignedFile)); err != nil {
		t.Fatal(err)
	}
	if err := a.init(t); err == nil || !strings.Contains(problem.Explain(err).Remedy, "muster policy apply") {
		t.Errorf("without a record of the last policy: %v", err)
	}
	if _, err := a.kube.Policy(t.Context()); !clusterapi.Absent(err) {
		t.Errorf("a policy that nothing was compared with: %v", err)
	}
	if _, err := accounts.Get(t.Context(), "kms", metav1.GetOptions{}); err != nil {
		t.Errorf("an object of the chart is still missing: %v", err)
	}
	a.Remembers(t, a.policy, key, nil)
	old, err := policyfile.ListControlPlanes(a.policy, 2, nil, nil)
	a.write(t, old, err)
	a.refused(t, "POLICY_INVALID", "newest copy")
	if _, err := a.kube.Policy(t.Context()); !clusterapi.Absent(err) {
		t.Errorf("the old policy: %v", err)
	}
	a.write(t, edited, nil) // only muster policy apply compares it with the nodes
	a.examined(t, 100)      // by a policy that is not remembered
	if err := a.init(t); err == nil || !strings.Contains(problem.Explain(err).Remedy, "muster policy apply") || !strings.Contains(a.Out.String(), "had at least serial 100") {
		t.Errorf("with a record of an earlier policy: %v\n%s", err, a.Out)
	}
	if _, err := a.kube.Policy(t.Context()); !clusterapi.Absent(err) {
		t.Errorf("the policy before the last one: %v", err)
	}
	a.examined(t, 1)
	a.Remembers(t, old, key, nil) // whoever signed the last policy was interrupted before its record
	if err := a.SetSigned(attest.SignPolicy(key, []byte(was.Spec.Policy))); err != nil {
		t.Fatal(err)
	}
	if err := a.init(t); err == nil || !strings.Contains(problem.Explain(err).Remedy, "muster policy apply") || !strings.Contains(a.Out.String(), "was signed in") {
		t.Errorf("with a record of an earlier policy than the signed one: %v\n%s", err, a.Out)
	}
	if _, err := a.kube.Policy(t.Context()); !clusterapi.Absent(err) {
		t.Errorf("the policy before the signed one: %v", err)
	}
	a.Remembers(t, a.policy, key, nil)
	if err := a.init(t); err != nil {
		t.Fatalf("%v\n%s", err, a.Out)
	}
	now, err := a.kube.Policy(t.Context())
	if err != nil || now.Spec != was.Spec {
		t.Fatalf("the policy that was there before: %v", err)
	}
	now.Status = was.Status
	now.Status.ObservedGeneration = now.Generation
	if err := ownertest.Shared.Client.Status().Update(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	a.write(t, a.policy, nil)
	if err := os.Remove(a.File(ownerdir.KnownFile)); err != nil {
		t.Fatal(err)
	}
}

// examined writes a policy's serial into the status of an enrollment.
func (a *repeated) examined(t *testing.T, serial int64) {
	t.Helper()
	nodes, err := a.kube.Enrollments(t.Context())
	if err != nil || len(nodes) == 0 {
		t.Fatalf("%d enrollments: %v", len(nodes), err)
	}
	nodes[0].Status.PolicySerial = serial
	if err := ownertest.Shared.Client.Status().Update(t.Context(), &nodes[0]); err != nil {
		t.Fatal(err)
	}
}

// put puts a policy into folder and cluster.
func (a *repeated) put(t *testing.T, text []byte, err error) {
	t.Helper()
	a.write(t, text, err)
	_, signed, err := policies.SignedPolicy(a.Dir)
	if err == nil {
		err = ownertest.PutPolicy(t.Context(), a.kube, signed)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// firstGone leaves the cluster to another control plane, and then gives it its first machine back.
func (a *repeated) firstGone(t *testing.T, other *attesttest.Machine) {
	ctx := t.Context()
	other.LockTo(a.ClusterID())
	join, first := ownertest.Listen(t), a.cfg.DialContext
	ownertest.Serve(t, join, other.Attester(attest.PurposeJoinservice), rpc.Serve(joinv1connect.JoinServiceName,
		joinv1connect.JoinServiceHandler(joinv1connect.UnimplementedJoinServiceHandler{}), joinv1connect.NewJoinServiceHandler))
	a.cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == "192.168.77.13:30090" {
			addr = join.Addr().String()
		}
		return first(ctx, network, addr)
	}
	text, err := policyfile.ListControlPlanes(a.policy, 3, []policyfile.ControlPlane{{Machine: other.ID(), Name: "node3"}}, []attest.MachineID{a.first.ID()})
	a.put(t, text, err)
	if _, err := a.kube.Enroll(ctx, "node3", v1alpha1.AttestedNodeSpec{MachineID: other.ID().String(), Role: v1alpha1.RoleControlPlane}, keys.DiskSalt{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ownertest.Unenroll(context.WithoutCancel(ctx), "node3") })
	add(t, "node3")
	node := &corev1.Node{}
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "node3"}, node); err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.77.13"}}
	if err := ownertest.Shared.Client.Status().Update(ctx, node); err != nil {
		t.Fatal(err)
	}
	was := a.Cluster()
	c := a.Cluster()
	delete(c.ControlPlanes, "node1")
	c.ControlPlanes["node3"] = other.ID()
	if err := a.Save(c); err != nil {
		t.Fatal(err)
	}
	presence := func() *clusterapi.Presence {
		t.Helper()
		p, err := a.kube.Presence(ctx, "node1")
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if err := a.kube.SetBanned(ctx, presence(), true); err != nil {
		t.Fatal(err)
	}
	if err := a.init(t); err != nil {
		t.Fatalf("its first machine is banned: %v\n%s", err, a.Out)
	}
	if n := ownertest.EnrollmentOf(t, "node1"); !n.Spec.Banned {
		t.Error("init has lifted the ban")
	}
	if _, err := a.kube.Forget(ctx, presence(), time.Now(), func(string) {}); err != nil {
		t.Fatal(err)
	}
	accounts := ownertest.Kube(t, "admin", "system:masters").CoreV1().ServiceAccounts(clusterapi.Namespace)
	if err := accounts.Delete(ctx, "joinservice", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := a.init(t); err != nil {
		t.Fatalf("its first machine is gone: %v\n%s", err, a.Out)
	}
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "node1"}, &v1alpha1.AttestedNode{}); !apierrors.IsNotFound(err) {
		t.Errorf("init has enrolled it again: %v", err)
	}
	if _, err := accounts.Get(ctx, "joinservice", metav1.GetOptions{}); err != nil {
		t.Errorf("an object of the chart is still missing: %v", err)
	}
	// As before: the enrollment comes with a first init.
	was.Stage = ownerdir.StageInitialized
	if err := a.Save(was); err != nil {
		t.Fatal(err)
	}
	a.put(t, a.policy, nil)
	if err := a.init(t); err != nil {
		t.Fatalf("%v\n%s", err, a.Out)
	}
	if n := ownertest.EnrollmentOf(t, "node1"); n.Spec.MachineID != a.first.ID().String() || n.Status.LastVerdict == nil {
		t.Errorf("a first init enrolls the machine: %+v", n)
	}
	if err := ownertest.Shared.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}); err != nil {
		t.Fatal(err)
	}
}

// A definition that somebody has deleted is put back by the same run, so the comparison before it must not wait for it.
func TestTheComparisonDoesNotWaitForAMissingDefinition(t *testing.T) {
	ownertest.Fresh(t)
	ownertest.Defined(t)
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
	crd.SetName("attestationpolicies." + v1alpha1.GroupVersion.Group)
	if err := ownertest.Shared.Client.Delete(ctx, crd); err != nil {
		t.Fatal(err)
	}
	defer ownertest.Defined(t)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for { // discovery lags behind the deletion
		kube, err := clusterapi.Connect(ownertest.Kubeconfig(t))
		if err != nil {
			t.Fatal(err)
		}
		_, err = kube.PolicyIfDefined(ctx)
		if meta.IsNoMatchError(err) && clusterapi.Absent(err) && ctx.Err() == nil {
			return
		}
		if ctx.Err() != nil || !apierrors.IsNotFound(err) && !meta.IsNoMatchError(err) {
			t.Fatal(err)
		}
		<-tick.C
	}
}
