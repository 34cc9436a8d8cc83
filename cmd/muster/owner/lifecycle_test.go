package owner

import (
	"context"
	"crypto/ed25519"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// lifecycle is an installed cluster with an owner's folder.
type lifecycle struct {
	*owned
	cluster keys.ClusterID
	public  ed25519.PublicKey
}

func newLifecycle(t *testing.T) *lifecycle {
	t.Helper()
	fresh(t)
	defined(t)
	access(t, nil)
	ca := attesttest.NewCA(t)
	l := &lifecycle{cluster: keys.ClusterID{3}, owned: own(t, &firstMachine{addr: "192.0.2.1:9000"}, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))}
	if err := l.Write(ownerdir.AdminConf, kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	c := l.Cluster()
	c.Stage, c.ClusterID = ownerdir.StageInstalled, l.cluster.String()
	if err := l.Save(c); err != nil {
		t.Fatal(err)
	}
	key, err := l.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	l.public = key.Public().(ed25519.PublicKey)
	return l
}

// node makes a Node that is ready, and its enrollment.
func (l *lifecycle) node(t *testing.T, name string, id byte, role v1alpha1.Role) ownerorder.Addressee {
	t.Helper()
	on := ownerorder.Addressee{Cluster: l.cluster, Node: name, Machine: attest.MachineID{id}, Disk: "5f0c95b6-2a3d-4c7e-9f10-0000000000" + string("0123456789"[id/10]) + string("0123456789"[id%10])}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: on.Machine.String(), Role: role, DiskID: on.Disk, DiskMode: v1alpha1.DiskModeLUKS}}
	if err := shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unenroll(context.WithoutCancel(t.Context()), name) })
	d := &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: on.Disk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: n.Spec.MachineID, Salt: strings.Repeat("ab", 32), RootVersion: 1}}
	if err := shared.Client.Create(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	if role == v1alpha1.RoleControlPlane {
		node.Labels["node-role.kubernetes.io/control-plane"] = ""
	}
	if err := shared.Client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := shared.Client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	return on
}

// obeys has a machine report the states for its next order.
func (l *lifecycle) obeys(ctx context.Context, t *testing.T, on ownerorder.Addressee, states ...v1alpha1.OrderState) {
	done := make(chan struct{})
	go func() { defer close(done); obey(ctx, t, on.Node, on, l.public, time.Time{}, states) }()
	t.Cleanup(func() { <-done })
}

// next is [lifecycle.obeys] for an order that is yet to be signed, of a machine that has had one.
func (l *lifecycle) next(ctx context.Context, t *testing.T, on ownerorder.Addressee, states ...v1alpha1.OrderState) {
	now, done := time.Now(), make(chan struct{})
	go func() { defer close(done); obey(ctx, t, on.Node, on, l.public, now, states) }()
	t.Cleanup(func() { <-done })
}

// through puts a proxy before the API server that the folder names, which changes requests.
func (l *lifecycle) through(t *testing.T, change func(*http.Request)) {
	t.Helper()
	transport, err := rest.TransportFor(shared.Admin)
	if err != nil {
		t.Fatal(err)
	}
	to, err := url.Parse(shared.Admin.Host)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewTLSServer(&httputil.ReverseProxy{Transport: transport, Rewrite: func(p *httputil.ProxyRequest) {
		p.SetURL(to)
		change(p.Out)
	}})
	t.Cleanup(server.Close)
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}
	conf.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "c"
	text, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Write(ownerdir.AdminConf, text); err != nil {
		t.Fatal(err)
	}
}

// pod makes a pod on a node; no kubelet ends it, so it has no grace period.
func pod(t *testing.T, node, name string, change func(*corev1.Pod)) {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name, Labels: map[string]string{"app": "drained"}},
		Spec:       corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	if change != nil {
		change(p)
	}
	if err := shared.Client.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	p.Status.Phase, p.Status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}} // a pod that waits has no budget
	if err := shared.Client.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shared.Client.Delete(context.WithoutCancel(t.Context()), p, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
}

func podsOn(t *testing.T, node string) (names []string) {
	t.Helper()
	var l corev1.PodList
	if err := shared.Client.List(t.Context(), &l, client.MatchingFields{"spec.nodeName": node}); err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Items {
		names = append(names, p.Name)
	}
	return names
}

func unschedulable(t *testing.T, node string) bool {
	t.Helper()
	n := &corev1.Node{}
	if err := shared.Client.Get(t.Context(), types.NamespacedName{Name: node}, n); err != nil {
		t.Fatal(err)
	}
	return n.Spec.Unschedulable
}

func TestADrainKeepsWhatWouldBeLost(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := newLifecycle(t)
	l.node(t, "drained", 41, v1alpha1.RoleWorker)
	managed := func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "1", Controller: new(true)}}
	}
	pod(t, "drained", "managed", managed)
	pod(t, "drained", "alone", nil)
	pod(t, "drained", "scratch", func(p *corev1.Pod) {
		managed(p)
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	})
	drain := func(ctx context.Context, o clusterapi.DrainOptions) (bool, []string, error) {
		var said []string
		cordoned, err := Drain(ctx, l.Dir, "drained", o, func(s string) { said = append(said, s) })
		return cordoned, said, err
	}
	cordoned, _, err := drain(ctx, clusterapi.DrainOptions{})
	if err == nil || !strings.Contains(err.Error(), "alone") || !strings.Contains(err.Error(), "scratch") || !strings.Contains(remedy(err), "--force") || !cordoned || !unschedulable(t, "drained") || len(podsOn(t, "drained")) != 3 {
		t.Fatalf("%v; %t; left %v", err, cordoned, podsOn(t, "drained"))
	}
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "keep"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(3)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "drained"}},
	}}
	budgets := kubernetes.NewForConfigOrDie(shared.Admin).PolicyV1().PodDisruptionBudgets(metav1.NamespaceDefault)
	if _, err := budgets.Create(ctx, budget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := budgets.Delete(context.WithoutCancel(t.Context()), "keep", metav1.DeleteOptions{}); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	all := clusterapi.DrainOptions{Force: true, EmptyDir: true}
	limited, stop := context.WithCancel(ctx)
	defer stop()
	_, err = Drain(limited, l.Dir, "drained", all, func(s string) {
		if strings.Contains(s, "disruption budget") {
			stop()
		}
	})
	if err == nil || len(podsOn(t, "drained")) != 3 || !strings.Contains(err.Error(), "default/keep") {
		t.Fatalf("against a budget: %v; left %v", err, podsOn(t, "drained"))
	}
	if err := budgets.Delete(ctx, "keep", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	cordoned, said, err := drain(ctx, all)
	if err != nil || cordoned || len(podsOn(t, "drained")) > 0 || !slices.Contains(said, "drained: 3 pods evicted") {
		t.Errorf("%v; %t; %q; left %v", err, cordoned, said, podsOn(t, "drained"))
	}
	if err := Uncordon(ctx, l.Dir, "drained"); err != nil || unschedulable(t, "drained") {
		t.Error(err)
	}
	if _, err := Drain(ctx, l.Dir, "drainde", all, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("a name with a typing error: %v", err)
	}
}

func TestABanRefusesWritesWithoutAJoinservice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := newLifecycle(t)
	l.node(t, "bad", 42, v1alpha1.RoleWorker)
	if err := Ban(ctx, l.Dir, "bda", func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("a name with a typing error: %v", err)
	}
	pod(t, "bad", "on-bad", nil)
	evicted := make(chan struct{})
	err := Ban(ctx, l.Dir, "bad", func(s string) {
		if !strings.HasPrefix(s, "banned") {
			close(evicted)
			return
		}
		if n := enrollmentOf(t, "bad"); !n.Spec.Banned || !listed(t).Entry("bad").Suspended {
			t.Error("it may still write")
		}
		// joinservice, which does not run here, evicts it.
		for _, o := range []client.Object{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bad"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "on-bad"}}} {
			if err := shared.Client.Delete(ctx, o, client.GracePeriodSeconds(0)); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	<-evicted
	if err := Unban(ctx, l.Dir, "bad"); err != nil || enrollmentOf(t, "bad").Spec.Banned || listed(t).Entry("bad").Suspended {
		t.Errorf("after the ban is lifted: %v, %+v", err, listed(t).Entry("bad"))
	}
	t.Run("one that a replace has set is not lifted", func(t *testing.T) {
		n := enrollmentOf(t, "bad")
		n.Spec.Banned, n.Annotations = true, map[string]string{v1alpha1.KeepNode: "true"}
		if err := shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		if err := Unban(ctx, l.Dir, "bad"); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED || !enrollmentOf(t, "bad").Spec.Banned {
			t.Error(err)
		}
	})
}

// The machine's report comes before anything is forgotten, and of a control plane the etcd member goes first.
func TestAResetIsOrderedAndThenForgotten(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := newLifecycle(t)
	worker, first, second := l.node(t, "w1", 43, v1alpha1.RoleWorker), l.node(t, "cp1", 44, v1alpha1.RoleControlPlane), l.node(t, "cp2", 45, v1alpha1.RoleControlPlane)
	run := func(name string) error {
		r, err := PlanReset(ctx, l.Dir, name)
		if err != nil {
			return err
		}
		if err := r.RemoveMember(ctx, func(string) {}); err != nil {
			return err
		}
		if err := r.Order(ctx, func(string) {}); err != nil {
			return err
		}
		_, err = r.Do(ctx, func(string) {})
		return err
	}
	gone := func(on ownerorder.Addressee) {
		t.Helper()
		if err := shared.Client.Get(ctx, types.NamespacedName{Name: on.Node}, &v1alpha1.AttestedNode{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s is still enrolled: %v", on.Node, err)
		}
		d := &v1alpha1.AttestedDisk{}
		if err := shared.Client.Get(ctx, types.NamespacedName{Name: on.Disk}, d); err != nil || !d.Spec.Erased || d.Spec.Salt != "" {
			t.Errorf("its disk still has a key: %v, %+v", err, d.Spec)
		}
	}
	t.Run("one that can't erase keeps its enrollment", func(t *testing.T) {
		l.obeys(ctx, t, worker, v1alpha1.OrderFailed)
		if err := run("w1"); err == nil || !strings.Contains(err.Error(), "reset failed") {
			t.Errorf("%v", err)
		}
		if n := enrollmentOf(t, "w1"); n.Spec.Banned {
			t.Error("it is banned")
		}
	})
	t.Run("a worker, also after an interruption", func(t *testing.T) {
		r, err := PlanReset(ctx, l.Dir, "w1")
		if err != nil || !strings.HasPrefix(r.Plan[0], "have its machine erase its state disk "+worker.Disk) {
			t.Fatalf("%v, %q", err, r.Plan)
		}
		done := make(chan time.Time, 1)
		go func() {
			done <- obey(ctx, t, "w1", worker, l.public, time.Now().Add(-time.Millisecond), []v1alpha1.OrderState{v1alpha1.OrderRunning})
		}()
		if err := r.Order(ctx, func(string) {}); err != nil {
			t.Fatal(err)
		}
		<-done
		// The machine is on its way down and reports nothing any more: a second run does not wait for it.
		if err := run("w1"); err != nil {
			t.Fatal(err)
		}
		gone(worker)
	})
	t.Run("a control plane", func(t *testing.T) {
		r, err := PlanReset(ctx, l.Dir, "cp2")
		if err != nil || !slices.Contains(r.Plan, "have cp1 remove its etcd member, by a signed order: up to five minutes") {
			t.Fatalf("%v, %q", err, r.Plan)
		}
		var removed bool
		l.obeys(ctx, t, second, v1alpha1.OrderDone) // it shows that it takes orders
		l.obeys(ctx, t, first, v1alpha1.OrderRunning, v1alpha1.OrderDone)
		if err := r.RemoveMember(ctx, func(string) { removed = true }); err != nil || !removed {
			t.Fatal(err)
		}
		o, err := ownerorder.ParseMachineNote(enrollmentOf(t, "cp1").Annotations[v1alpha1.OwnerOrder])
		if err != nil || !strings.Contains(o.Text, `"action":"remove-etcd-member","args":{"member":"cp2"}`) {
			t.Fatalf("cp1 has the order %s, %v", o.Text, err)
		}
		l.next(ctx, t, second, v1alpha1.OrderRunning)
		if err := r.Order(ctx, func(string) {}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Do(ctx, func(string) {}); err != nil {
			t.Fatal(err)
		}
		gone(second)
	})
	t.Run("only the machine and disk that its owner has confirmed", func(t *testing.T) {
		on := l.node(t, "swapped", 58, v1alpha1.RoleWorker)
		r, err := PlanReset(ctx, l.Dir, "swapped")
		if err != nil {
			t.Fatal(err)
		}
		edit := func(spec string) {
			t.Helper()
			for _, s := range []string{`"banned":true`, spec, `"banned":false`} {
				n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "swapped"}}
				if err := shared.Client.Patch(ctx, n, client.RawPatch(types.MergePatchType, []byte(`{"spec":{`+s+`}}`))); err != nil {
					t.Fatal(err)
				}
			}
		}
		for mine, theirs := range map[string]string{
			`"machineID":"` + on.Machine.String() + `"`: `"machineID":"` + strings.Repeat("ee", 32) + `"`,
			`"diskID":"` + on.Disk + `"`:                `"diskID":"5f0c95b6-2a3d-4c7e-9f10-0000000000ee"`,
		} {
			edit(theirs)
			if err := r.Order(ctx, func(string) {}); err == nil || !strings.Contains(err.Error(), "was enrolled anew meanwhile") || enrollmentOf(t, "swapped").Annotations[v1alpha1.OwnerOrder] != "" {
				t.Errorf("with %s: %v", theirs, err)
			}
			edit(mine)
		}
		l.obeys(ctx, t, on, v1alpha1.OrderRunning)
		if err := r.Order(ctx, func(string) {}); err != nil {
			t.Error(err)
		}
	})
	t.Run("one that gets no orders, or has another one", func(t *testing.T) {
		on := l.node(t, "busy", 47, v1alpha1.RoleWorker)
		ctx := &expiring{Context: t.Context(), done: make(chan struct{})}
		if _, err := Order(ctx, l.Dir, on.Node, ownerorder.ActionDoctor, nil, ctx.expire); err == nil {
			t.Fatal("a machine answers that is not there")
		}
		if _, err := PlanReset(t.Context(), l.Dir, on.Node); err == nil || !strings.Contains(err.Error(), `has the order "doctor"`) {
			t.Error(err)
		}
		n := enrollmentOf(t, on.Node)
		n.Spec.Banned = true
		if err := shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if _, err := PlanReset(t.Context(), l.Dir, on.Node); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED || !strings.Contains(remedy(err), "muster unban") {
			t.Errorf("%v: %s", err, remedy(err))
		}
	})
	t.Run("a ban after its disk was erased", func(t *testing.T) {
		on := l.node(t, "half", 48, v1alpha1.RoleWorker)
		n := enrollmentOf(t, on.Node)
		n.Spec.Banned = true
		d := &v1alpha1.AttestedDisk{}
		if err := errors.Join(shared.Client.Update(ctx, n), shared.Client.Get(ctx, types.NamespacedName{Name: on.Disk}, d)); err != nil {
			t.Fatal(err)
		}
		d.Spec.Salt, d.Spec.Erased = "", true
		if err := shared.Client.Update(ctx, d); err != nil {
			t.Fatal(err)
		}
		if err := Unban(ctx, l.Dir, on.Node); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_ERASED || !enrollmentOf(t, on.Node).Spec.Banned {
			t.Error(err)
		}
	})
	t.Run("the only control plane", func(t *testing.T) {
		if err := MayRestart(ctx, l.Dir, "cp1"); err == nil || !strings.Contains(err.Error(), "only control plane") {
			t.Error(err)
		}
		if err := MayRestart(ctx, l.Dir, "plain-worker"); err != nil {
			t.Error(err)
		}
		if _, err := PlanReset(ctx, l.Dir, "cp1"); err == nil || !strings.Contains(err.Error(), "only control plane") {
			t.Error(err)
		}
	})
	t.Run("a disk without encryption", func(t *testing.T) {
		l.node(t, "plain", 46, v1alpha1.RoleWorker)
		n := enrollmentOf(t, "plain")
		n.Spec.DiskMode = v1alpha1.DiskModePlain
		if err := shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		if _, err := PlanReset(ctx, l.Dir, "plain"); err == nil || !strings.Contains(err.Error(), "not encrypted") {
			t.Error(err)
		}
	})
}
