// Package ownertest contains what the tests of several of the owner's packages share: an API server, an owner's folder, first machines, machines that execute
// orders.
package ownertest

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"maps"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Unenroll deletes an enrollment, if it is there, in a cluster where no joinservice runs.
func Unenroll(ctx context.Context, name string) {
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_ = Shared.Client.Patch(ctx, n, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null},"spec":{"banned":true}}`)))
	_ = Shared.Client.Delete(ctx, n)
}

// Kubeconfig returns the administrator's kubeconfig of [Shared].
func Kubeconfig(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile(Shared.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Endpoint returns HOST:PORT of the API server of [Shared].
func Endpoint() string { return strings.TrimPrefix(Shared.Admin.Host, "https://") }

// Shared is the cluster of a package's tests: an API server and etcd, without nodes.
var Shared *kubetest.Cluster

// Main runs the tests of a package with a cluster.
func Main(m *testing.M) {
	kubetest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		if Shared, err = kubetest.Start(ctx); err != nil {
			return nil, err
		}
		return Shared.Stop, nil
	})
}

// Kube returns typed clients of a user.
func Kube(t *testing.T, user string, groups ...string) *kubernetes.Clientset {
	t.Helper()
	cfg, err := Shared.AsUser(user, groups...)
	if err != nil {
		t.Fatal(err)
	}
	k, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Defined returns a client of the cluster, which knows Muster's objects then.
func Defined(t *testing.T) *clusterapi.Client {
	t.Helper()
	kube, err := clusterapi.Connect(Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	if applied == nil || !maps.Equal(applied, definitionsNow(t)) {
		definitions, err := clusterapi.Definitions()
		if err != nil {
			t.Fatal(err)
		}
		if err := kube.Apply(t.Context(), definitions, func(string) {}); err != nil {
			t.Fatal(err)
		}
		applied = definitionsNow(t)
	}
	if err := kube.EnsureNamespace(t.Context()); err != nil {
		t.Fatal(err)
	}
	return kube
}

// applied are the definitions as [Defined] has left them: to apply them again takes the API server's time, also if nothing changes.
var applied map[string]int64

// definitionsNow returns the generation of each definition, by UID.
func definitionsNow(t *testing.T) map[string]int64 {
	t.Helper()
	l := &metav1.PartialObjectMetadataList{}
	l.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinitionList"))
	if err := Shared.Client.List(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	out := map[string]int64{}
	for _, d := range l.Items {
		out[string(d.UID)] = d.Generation
	}
	return out
}

// Access sets the list of nodes that may not write to exactly this, until the test ends. The list is never deleted:
// where the chart is installed, that is refused.
func Access(t *testing.T, entries map[string]nodeaccess.Entry) {
	t.Helper()
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: nodeaccess.ConfigMap}}
	made := m.DeepCopy()
	made.Data = map[string]string{nodeaccess.KeySuspended: "\nother\n"} // for an object that is created empty the API server does not record who wrote it when
	if err := Shared.Client.Create(t.Context(), made); client.IgnoreAlreadyExists(err) != nil {
		t.Fatal(err)
	}
	l := nodeaccess.New(false)
	for name, e := range entries {
		l.Set(name, e)
	}
	data, err := l.Data()
	if err != nil {
		t.Fatal(err)
	}
	replace := func(ctx context.Context, data map[string]string) (was map[string]string) {
		if err := Shared.Client.Get(ctx, client.ObjectKeyFromObject(m), m); err != nil {
			t.Fatal(err)
		}
		was, m.Data = m.Data, data
		if err := Shared.Client.Update(ctx, m); err != nil {
			t.Fatal(err)
		}
		return was
	}
	was := replace(t.Context(), data)
	t.Cleanup(func() { replace(context.WithoutCancel(t.Context()), was) })
}

// Listed reads the list of nodes that may not write.
func Listed(t *testing.T) *nodeaccess.List {
	t.Helper()
	m := &corev1.ConfigMap{}
	if err := Shared.Client.Get(t.Context(), enrollment.Key(), m); err != nil {
		t.Fatal(err)
	}
	l, err := nodeaccess.Parse(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Lifecycle is an installed cluster with an owner's folder.
type Lifecycle struct {
	*Owned
	ID     keys.ClusterID
	Public ed25519.PublicKey
}

// NewLifecycle returns an owner's folder for [Shared], without nodes.
func NewLifecycle(t *testing.T) *Lifecycle {
	t.Helper()
	Fresh(t)
	Defined(t)
	Access(t, nil)
	ca := attesttest.NewCA(t)
	l := &Lifecycle{ID: keys.ClusterID{3}, Owned: Own(t, &FirstMachine{Addr: "192.0.2.1:9000"}, Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))}
	if err := l.Write(ownerdir.AdminConf, Kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	c := l.Cluster()
	c.Stage, c.ClusterID = ownerdir.StageInstalled, l.ID.String()
	if err := l.Save(c); err != nil {
		t.Fatal(err)
	}
	key, err := l.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	l.Public = key.Public().(ed25519.PublicKey)
	return l
}

// Node makes a Node that is ready, and its enrollment.
func (l *Lifecycle) Node(t *testing.T, name string, id byte, role v1alpha1.Role) ownerorder.Addressee {
	t.Helper()
	on := ownerorder.Addressee{Cluster: l.ID, Node: name, Machine: attest.MachineID{id}, Disk: "5f0c95b6-2a3d-4c7e-9f10-0000000000" + string("0123456789"[id/10]) + string("0123456789"[id%10])}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: on.Machine.String(), Role: role, DiskID: on.Disk, DiskMode: v1alpha1.DiskModeLUKS}}
	if err := Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Unenroll(context.WithoutCancel(t.Context()), name) })
	d := &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: on.Disk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: n.Spec.MachineID, Salt: strings.Repeat("ab", 32), RootVersion: 1}}
	if err := Shared.Client.Create(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	if role == v1alpha1.RoleControlPlane {
		node.Labels["node-role.kubernetes.io/control-plane"] = ""
	}
	if err := Shared.Client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := Shared.Client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	return on
}

// Obeys has a machine report the states for its next order.
func (l *Lifecycle) Obeys(ctx context.Context, t *testing.T, on ownerorder.Addressee, states ...v1alpha1.OrderState) {
	done := make(chan struct{})
	go func() { defer close(done); Obey(ctx, t, on.Node, on, l.Public, time.Time{}, states) }()
	t.Cleanup(func() { <-done })
}

// Next is [lifecycle.obeys] for an order that is yet to be signed, of a machine that has had one.
func (l *Lifecycle) Next(ctx context.Context, t *testing.T, on ownerorder.Addressee, states ...v1alpha1.OrderState) {
	now, done := time.Now(), make(chan struct{})
	go func() { defer close(done); Obey(ctx, t, on.Node, on, l.Public, now, states) }()
	t.Cleanup(func() { <-done })
}

// Through puts a proxy before the API server that the folder names, which changes requests.
func (l *Lifecycle) Through(t *testing.T, change func(*http.Request)) {
	t.Helper()
	l.proxied(t, change, nil)
}

// Pod makes a pod on a node; no kubelet ends it, so it has no grace period.
func Pod(t *testing.T, node, name string, change func(*corev1.Pod)) {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name, Labels: map[string]string{"app": "drained"}},
		Spec:       corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	if change != nil {
		change(p)
	}
	if err := Shared.Client.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	p.Status.Phase, p.Status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}} // a pod that waits has no budget
	if err := Shared.Client.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Shared.Client.Delete(context.WithoutCancel(t.Context()), p, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
}

// PodsOn returns the names of a node's pods.
func PodsOn(t *testing.T, node string) (names []string) {
	t.Helper()
	var l corev1.PodList
	if err := Shared.Client.List(t.Context(), &l, client.MatchingFields{"spec.nodeName": node}); err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Items {
		names = append(names, p.Name)
	}
	return names
}

// Unschedulable reports whether a node takes no new pods.
func Unschedulable(t *testing.T, node string) bool {
	t.Helper()
	n := &corev1.Node{}
	if err := Shared.Client.Get(t.Context(), types.NamespacedName{Name: node}, n); err != nil {
		t.Fatal(err)
	}
	return n.Spec.Unschedulable
}

// Expiring is a context whose deadline comes when it is told.
type Expiring struct {
	context.Context

	once sync.Once
	Over chan struct{}
}

// Expire ends the context.
func (e *Expiring) Expire(string) { e.once.Do(func() { close(e.Over) }) }

// Done implements [context.Context].
func (e *Expiring) Done() <-chan struct{} { return e.Over }

// Err implements [context.Context].
func (e *Expiring) Err() error {
	select {
	case <-e.Over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// EnrollmentOf returns a node's AttestedNode.
func EnrollmentOf(t *testing.T, name string) *v1alpha1.AttestedNode {
	t.Helper()
	n := &v1alpha1.AttestedNode{}
	if err := Shared.Client.Get(t.Context(), types.NamespacedName{Name: name}, n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Obey waits for an order that was signed later, reports the states, and returns when it was signed.
func Obey(ctx context.Context, t *testing.T, name string, on ownerorder.Addressee, owner ed25519.PublicKey, after time.Time, states []v1alpha1.OrderState) time.Time {
	for range Changes(ctx, &v1alpha1.AttestedNodeList{}, name) {
		n := &v1alpha1.AttestedNode{}
		if err := Shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil || n.Annotations[v1alpha1.OwnerOrder] == "" {
			continue
		}
		signed, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
		if err != nil {
			t.Error(err)
			return time.Time{}
		}
		o, err := signed.Genuine(attest.OwnerKeys{owner}, on)
		if err == nil {
			err = o.Timely(time.Now())
		}
		if err != nil {
			t.Errorf("%s: %v", signed.Text, err)
			return time.Time{}
		}
		if !o.SignedAt.After(after) {
			continue // the one before
		}
		for _, s := range states {
			n.Status.Order = &v1alpha1.OrderReport{Digest: signed.Digest(), Action: string(o.Action), State: s, Message: "because\nReason: NONE"}
			if err := Shared.Client.Status().Update(ctx, n); err != nil {
				t.Error(err)
			}
		}
		return o.SignedAt
	}
	return time.Time{}
}

// Runs makes an enrollment whose machine was accepted some time ago.
func Runs(t *testing.T, name string, m *attesttest.Machine, ago time.Duration) {
	t.Helper()
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleWorker}}
	if err := Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Unenroll(context.WithoutCancel(t.Context()), name) })
	n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(time.Now().Add(-ago))}
	n.Status.PCRs = map[string]string{}
	for i, v := range m.PCRs() {
		n.Status.PCRs[strconv.Itoa(i)] = hex.EncodeToString(v)
	}
	if err := Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

// Rules returns an owner with that policy, which is in force in the test's cluster.
func Rules(ctx context.Context, t *testing.T, kube *clusterapi.Client, policy []byte) *Owned {
	t.Helper()
	o := Own(t, &FirstMachine{Addr: "192.0.2.1:9000"}, Endpoint(), policy)
	if err := o.Write(ownerdir.AdminConf, Kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	_, json, err := policyfile.Parse(policy)
	if err != nil {
		t.Fatal(err)
	}
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := PutPolicy(ctx, kube, attest.SignPolicy(key, json)); err != nil {
		t.Fatal(err)
	}
	return o
}

// PutPolicy replaces whatever policy the test's cluster has, as an administrator of the API could. No owner's folder has it.
func PutPolicy(ctx context.Context, kube *clusterapi.Client, signed *attestv1.SignedPolicy) error {
	have, err := kube.Policy(ctx)
	if clusterapi.Absent(err) {
		have, err = &v1alpha1.AttestationPolicy{}, nil
	}
	if err != nil {
		return err
	}
	return kube.PutPolicy(ctx, have.Spec, signed)
}

// Services makes Muster's DaemonSets look ready, as their controller reports them.
func (l *Lifecycle) Services(t *testing.T) {
	t.Helper()
	for _, name := range clusterapi.Services {
		labels := map[string]string{"app": name}
		ds := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: name}, Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}}},
		}}
		daemonSets := kubernetes.NewForConfigOrDie(Shared.Admin).AppsV1().DaemonSets(clusterapi.Namespace)
		made, err := daemonSets.Create(t.Context(), ds, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) { // of the chart, by another test
			made, err = daemonSets.Get(t.Context(), name, metav1.GetOptions{})
		} else if err == nil {
			t.Cleanup(func() {
				if err := daemonSets.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		made.Status = appsv1.DaemonSetStatus{ObservedGeneration: made.Generation, DesiredNumberScheduled: 1, CurrentNumberScheduled: 1, UpdatedNumberScheduled: 1, NumberReady: 1}
		if _, err := daemonSets.UpdateStatus(t.Context(), made, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}
