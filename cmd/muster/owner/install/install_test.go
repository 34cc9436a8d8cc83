package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	appsclient "k8s.io/client-go/kubernetes/typed/apps/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// dialTo returns a dialer that connects every address to the same one.
func dialTo(addr string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
}

// daemonSets replaces the controller that this control plane runs without: once the chart is installed, all pods are
// ready.
func daemonSets(ctx context.Context, api appsclient.DaemonSetInterface) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	ready := map[string]bool{}
	for len(ready) < len(clusterapi.Services) {
		for _, name := range clusterapi.Services {
			ds, err := api.Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				continue // not created yet
			}
			if err != nil {
				return err
			}
			ds.Status = appsv1.DaemonSetStatus{ObservedGeneration: ds.Generation, DesiredNumberScheduled: 1, CurrentNumberScheduled: 1, UpdatedNumberScheduled: 1, NumberReady: 1}
			if _, err := api.UpdateStatus(ctx, ds, metav1.UpdateOptions{}); err == nil {
				ready[name] = true
			} else if !apierrors.IsConflict(err) {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
	return nil
}

// TestInitMakesACluster runs all of init against a real API server: the connection to the machine breaks once, and
// everything is repeated.
func TestInitMakesACluster(t *testing.T) {
	bare(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*ownertest.Patience)
	defer cancel()
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))

	join := ownertest.Listen(t)
	ownertest.Serve(t, join, m.Attester(attest.PurposeJoinservice), rpc.Serve(joinv1connect.JoinServiceName,
		joinv1connect.JoinServiceHandler(joinv1connect.UnimplementedJoinServiceHandler{}), joinv1connect.NewJoinServiceHandler))

	node := ownertest.Kube(t, "system:node:node1", "system:nodes")
	if _, err := node.CertificatesV1().CertificateSigningRequests().Create(ctx, ownertest.ServingCSR(t, "node1"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The objects that the first machine writes.
	if err := ownertest.Shared.Namespace(ctx, clusterapi.Namespace); err != nil {
		t.Fatal(err)
	}
	for _, o := range []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: "muster-kms-root"}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: "muster-cluster"}},
	} {
		if err := ownertest.Shared.Client.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	controller := make(chan error, 1)
	admin := ownertest.Kube(t, "controller", "system:masters")
	go func() { controller <- daemonSets(ctx, admin.AppsV1().DaemonSets(clusterapi.Namespace)) }()

	manifests, err := clusterapi.ParseManifests("network.yaml", []byte(`
# A kind and an object of it, as networks bring them.
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: pools.example.net}
spec:
  group: example.net
  scope: Cluster
  names: {kind: Pool, plural: pools, singular: pool, listKind: PoolList}
  versions:
    - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
---
apiVersion: v1
kind: List
items:
  - {apiVersion: v1, kind: Namespace, metadata: {name: network}}
  - {apiVersion: example.net/v1, kind: Pool, metadata: {name: default}, spec: {cidr: 10.244.0.0/16}}
`))
	if err != nil {
		t.Fatal(err)
	}
	cfg := config(o)
	cfg.Manifests = manifests
	cfg.Values = clusterapi.Values{
		JoinserviceImage: "registry.example/muster/joinservice@sha256:" + strings.Repeat("1", 64),
		KMSImage:         "registry.example/muster/kms@sha256:" + strings.Repeat("2", 64),
	}
	cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == "192.168.77.11:30090" {
			addr = join.Addr().String()
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	if err := Init(ctx, cfg); err != nil {
		t.Fatalf("%v\n%s", err, o.Out)
	}
	if err := <-controller; err != nil {
		t.Fatal(err)
	}
	checkCluster(t, o, m)

	// A repetition: everything exists and stays.
	if err := Init(ctx, cfg); err != nil {
		t.Fatalf("a second time: %v\n%s", err, o.Out)
	}
	if n := len(f.Calls()); n != 1 {
		t.Errorf("%d calls of Init", n)
	}
	if o.Leaks([]byte(o.Out.String())) {
		t.Error("a secret was reported (K3)")
	}
	checkAdmission(t)
	checkRest(t, o, m)
	checkAgain(t, o, cfg, ca, m)
	checkUpgrade(t, o, cfg.DialContext)
}

func checkCluster(t *testing.T, o *ownertest.Owned, m *attesttest.Machine) {
	t.Helper()
	ctx := t.Context()
	if s := o.Cluster().Stage; s != ownerdir.StageInstalled {
		t.Errorf("stage %s", s)
	}
	var n v1alpha1.AttestedNode
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "node1"}, &n); err != nil {
		t.Fatal(err)
	}
	if n.Spec.MachineID != m.ID().String() || n.Spec.Role != v1alpha1.RoleControlPlane || n.Status.LastVerdict == nil || !n.Status.LastVerdict.Accepted || n.Status.PCRs["4"] == "" {
		t.Errorf("%+v", n)
	}
	if owner := diskOwner(t, n.Spec.DiskID); owner != m.ID().String() { // J2
		t.Errorf("its disk %s is %q's", n.Spec.DiskID, owner)
	}
	if l := ownertest.Listed(t); l.MembersOnly || !l.Entry("node1").Equal(nodeaccess.Entry{ControlPlane: true}) {
		t.Errorf("members only: %t, node1 %+v", l.MembersOnly, l.Entry("node1"))
	}
	var p v1alpha1.AttestationPolicy
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "default"}, &p); err != nil {
		t.Fatal(err)
	}
	_, signed, err := policies.SignedPolicy(o.Dir)
	if err != nil || p.Spec.Policy != string(signed.GetPolicy()) {
		t.Errorf("the policy is not the owner's, byte for byte: %v", err)
	}
	if in, err := attest.ParsePolicy([]byte(p.Spec.Policy)); err != nil || !slices.Equal(in.ControlPlanes(), []attest.MachineID{m.ID()}) { // A7
		t.Errorf("the policy does not list the first machine: %v", err)
	}
	var csrs certificatesv1.CertificateSigningRequestList
	if err := ownertest.Shared.Client.List(ctx, &csrs); err != nil {
		t.Fatal(err)
	}
	for _, c := range csrs.Items { // the machine made its node's certificates itself
		if len(c.Status.Conditions) > 0 {
			t.Errorf("%s was decided: %v", c.Name, c.Status.Conditions)
		}
	}
	var secrets corev1.SecretList
	if err := ownertest.Shared.Client.List(ctx, &secrets); err != nil {
		t.Fatal(err)
	}
	for _, s := range secrets.Items {
		for k, v := range s.Data {
			if o.Leaks(v) {
				t.Errorf("%s/%s holds a secret of the owner in %s (K3)", s.Namespace, s.Name, k)
			}
		}
	}
}

// checkAdmission tests the chart's policies: whatever RBAC allows, only joinservice approves node certificates, and a
// node that is not enrolled writes nothing.
func checkAdmission(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	admin := ownertest.Kube(t, "somebody", "system:masters")
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for denied := false; !denied; { // policies take a moment to be in force
		csr, err := admin.CertificatesV1().CertificateSigningRequests().Create(ctx, ownertest.ServingCSR(t, "node9"), metav1.CreateOptions{})
		switch {
		case err == nil:
			if err := admin.CertificatesV1().CertificateSigningRequests().Delete(ctx, csr.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		case strings.Contains(err.Error(), "muster-node-certificates"):
			denied = true
		default:
			t.Fatal(err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("an administrator asks for a node's certificate")
		}
	}
	ownertest.Access(t, map[string]nodeaccess.Entry{"node1": {ControlPlane: true}, "node9": {Suspended: true}})
	removed := ownertest.Kube(t, "system:node:node9", "system:nodes")
	for {
		_, err := removed.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node9"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil && strings.Contains(err.Error(), "muster-node-access") {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("a node that was removed: %v", err)
		}
	}
	enrolled := ownertest.Kube(t, "system:node:node1", "system:nodes")
	_, err := enrolled.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Errorf("the first node: %v", err)
	}
}

// checkRest runs the other commands against the cluster.
func checkRest(t *testing.T, o *ownertest.Owned, m *attesttest.Machine) {
	t.Helper()
	ctx := t.Context()
	other := attest.MachineID{1}
	spec := v1alpha1.AttestedNodeSpec{MachineID: other.String(), Role: v1alpha1.RoleControlPlane}
	for i, want := range []bool{true, false} {
		if created, err := policies.Enroll(ctx, o.Dir, "node2", spec, func(string) {}); err != nil || created != want {
			t.Errorf("enrollment %d: %v, %v", i, created, err)
		}
	}
	for name, tt := range map[string]struct {
		node string
		spec v1alpha1.AttestedNodeSpec
		want string
	}{
		"a name of another machine":    {"node1", v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{2}.String(), Role: v1alpha1.RoleControlPlane}, "NAME_TAKEN"},
		"a machine with another name":  {"node3", spec, "NAME_MISMATCH"},
		"a machine with another role":  {"node2", v1alpha1.AttestedNodeSpec{MachineID: other.String(), Role: v1alpha1.RoleWorker}, "ROLE_REFUSED"},
		"a machine with another disk":  {"node1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane, DiskID: "0191e0a8-7b1c-7000-8000-000000000000"}, "DISK_MISMATCH"},
		"a machine with other address": {"node1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane, Addresses: []string{"192.168.77.99"}}, "ADDRESS_REFUSED"},
	} {
		if _, err := policies.Enroll(ctx, o.Dir, tt.node, tt.spec, func(string) {}); err == nil || problem.Explain(err).Reason != tt.want || problem.Explain(err).Remedy == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	k, err := access.Connect(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := k.Status(ctx, config(o).Log)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Nodes) != 2 || s.Nodes[0].Name != "node1" || !s.Nodes[0].Joined || s.Nodes[0].Reason != "ACCEPTED" || s.Nodes[1].Joined || s.Chart.Revision != 2 || s.Policy == nil {
		t.Errorf("%+v", s)
	}
	checkApply(t, o)
}

// checkApply changes the policy; the test acts as the services.
func checkApply(t *testing.T, o *ownertest.Owned) {
	t.Helper()
	setStatus := func(change func(*v1alpha1.AttestationPolicyStatus)) error {
		var p v1alpha1.AttestationPolicy
		if err := ownertest.Shared.Client.Get(t.Context(), client.ObjectKey{Name: "default"}, &p); err != nil {
			return err
		}
		p.Status.ObservedGeneration = p.Generation
		change(&p.Status)
		return ownertest.Shared.Client.Status().Update(t.Context(), &p)
	}
	if err := setStatus(func(s *v1alpha1.AttestationPolicyStatus) { s.Accepted, s.Serial = true, 2 }); err != nil {
		t.Fatal(err)
	}
	if p, err := policies.ApplyPolicy(t.Context(), o.Dir, nil, policies.Consent{}); err != nil || p.Status.Serial != 2 {
		t.Errorf("the same policy again: %v", err)
	}
	text, err := o.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	changed := []byte(strings.Replace(string(text), "10.0.0.0/8", "10.0.0.0/9", 1))
	if err := o.Write(ownerdir.PolicyFile, changed); err != nil {
		t.Fatal(err)
	}
	if _, err := policies.ApplyPolicy(t.Context(), o.Dir, nil, policies.Consent{}); err == nil || !strings.Contains(problem.Explain(err).Remedy, "Set serial to 3") {
		t.Errorf("another policy of the same serial: %v", err)
	}
	next, err := policyfile.ListControlPlanes(changed, 3, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Write(ownerdir.PolicyFile, next); err != nil {
		t.Fatal(err)
	}
	checkForeignKey(t, o, text)
	done := make(chan error, 1)
	go func() { done <- refuseNext(t.Context(), setStatus) }()
	_, err = policies.ApplyPolicy(t.Context(), o.Dir, nil, policies.Consent{})
	if p := problem.Explain(err); p.Reason != "POLICY_SIGNATURE" || !strings.Contains(p.Message, "serial 2 stays in force") {
		t.Errorf("a policy that the services refuse: %v", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// checkForeignKey applies the policy with a key that the services do not accept: they would refuse it, and the good one would be gone.
func checkForeignKey(t *testing.T, o *ownertest.Owned, inForce []byte) {
	t.Helper()
	path := o.File("owner.key")
	own, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := ownerdir.NewKeyFile(path); err != nil {
		t.Fatal(err)
	}
	before := &v1alpha1.AttestationPolicy{}
	if err := ownertest.Shared.Client.Get(t.Context(), client.ObjectKey{Name: "default"}, before); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err = policies.ApplyPolicy(ctx, o.Dir, nil, policies.Consent{})
	if p := problem.Explain(err); p.Reason != "POLICY_SIGNATURE" || !strings.Contains(p.Message, "accept another owner's key") || !strings.Contains(p.Remedy, "was not changed") {
		t.Errorf("with another owner's key: %+v", p)
	}
	next, err := o.Read(ownerdir.PolicyFile)
	if err == nil {
		err = o.Write(ownerdir.PolicyFile, inForce)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = policies.Enroll(ctx, o.Dir, "node9", v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{9}.String(), Role: v1alpha1.RoleControlPlane}, func(string) {})
	if p := problem.Explain(err); p.Reason != "POLICY_SIGNATURE" {
		t.Errorf("a command that lists a machine, with another owner's key: %+v", p)
	}
	if now, err := o.Read(ownerdir.PolicyFile); err != nil || !bytes.Equal(now, inForce) {
		t.Errorf("the folder's policy was changed: %v", err)
	}
	if err := o.Write(ownerdir.PolicyFile, next); err != nil {
		t.Fatal(err)
	}
	after := &v1alpha1.AttestationPolicy{}
	if err := ownertest.Shared.Client.Get(t.Context(), client.ObjectKey{Name: "default"}, after); err != nil || after.Generation != before.Generation {
		t.Errorf("the policy was replaced: generation %d, was %d, %v", after.Generation, before.Generation, err)
	}
	if err := os.WriteFile(path, own, 0o600); err != nil {
		t.Fatal(err)
	}
}

// refuseNext refuses the next generation of the policy, like services with another key.
func refuseNext(ctx context.Context, setStatus func(func(*v1alpha1.AttestationPolicyStatus)) error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		var p v1alpha1.AttestationPolicy
		if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "default"}, &p); err != nil {
			return err
		}
		if p.Generation > p.Status.ObservedGeneration {
			err := setStatus(func(s *v1alpha1.AttestationPolicyStatus) {
				s.Accepted, s.Reason, s.Message = false, "POLICY_SIGNATURE", "not signed by the owner"
			})
			if err == nil || !apierrors.IsConflict(err) {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func TestAnAddressOutsideThePolicyStopsTheInstall(t *testing.T) {
	bare(t)
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), func(r *initv1.InitResult) { r.Addresses = []string{"203.0.113.5"} }))
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	err := Init(ctx, config(o))
	if p := problem.Explain(err); p.Reason != "ADDRESS_REFUSED" || !strings.Contains(p.Remedy, "nodeCidrs") {
		t.Errorf("%+v", p)
	}
}

func TestExplainPutsTheOwnersRemedyFirst(t *testing.T) {
	err := fmt.Errorf("step: %w", problem.WithRemedy(errors.New("cause"), "do this"))
	if p := problem.Explain(err); p.Remedy != "do this" || p.Message != "step: cause" || p.Reason != "" {
		t.Errorf("%+v", p)
	}
}
