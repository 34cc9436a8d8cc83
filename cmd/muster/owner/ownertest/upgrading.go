package ownertest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
)

// The releases from which and to which an [Upgrading] cluster goes.
const (
	Before = "1.35.4"
	After  = "1.36.1"
)

// ListOf returns a release's list; its images have digests of one digit.
func ListOf(version, etcd, digit string) versions.List {
	var l versions.List
	for _, program := range []string{"kubeadm", "kubelet"} {
		l.Components = append(l.Components, versions.Component{URL: "https://mirror.example/" + version + "/" + program, SHA256: strings.Repeat(digit, 64), Path: "/usr/local/bin/" + program, Mode: 0o755})
	}
	l = versions.NewList(l.Components...)
	for _, name := range versions.ImageNames() {
		tag := "v" + version
		if name == versions.Etcd {
			tag = etcd
		}
		l.Images = append(l.Images, "registry.example/"+name+":"+tag+"@sha256:"+strings.Repeat(digit, 64))
	}
	return l
}

// RefIn returns the image of that name in a list.
func RefIn(t *testing.T, l versions.List, name string) string {
	images, err := versions.ParseImages(l.Images)
	if err != nil {
		t.Error(err)
	}
	return images[name].String()
}

// Upgrading is a cluster of the release before, whose machines upgrade themselves by orders.
type Upgrading struct {
	*Lifecycle

	Old, New versions.List

	mu     sync.Mutex
	On     map[string]ownerorder.Addressee
	orders []string // that machines have started: NODE PART
	// act has a machine execute an order, and returns what it reports; nil: upgraded.
	act func(node, part string) v1alpha1.OrderState
}

// NewUpgrading makes a cluster with these control planes and workers: the names of control planes begin with c.
func NewUpgrading(t *testing.T, names ...string) *Upgrading {
	t.Helper()
	u := &Upgrading{Lifecycle: NewLifecycle(t), Old: ListOf(Before, "3.6.5-0", "1"), New: ListOf(After, "3.6.6-0", "2"), On: map[string]ownerorder.Addressee{}}
	u.Services(t)
	info := &clusterinfo.Info{
		ClusterID: u.ID, MeasurementSalt: [32]byte{2}, KubernetesVersion: Before, ControlPlaneEndpoint: "192.0.2.1:6443", Components: u.Old.Components, Images: u.Old.Images,
	}
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: clusterinfo.ConfigMap}}
	if err := Shared.Client.Delete(t.Context(), m); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	text, err := info.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	m.Data = map[string]string{clusterinfo.Key: string(text)}
	Create(t, m)
	c := u.Cluster()
	c.KubernetesVersion, c.Components, c.Images = Before, u.Old.Components, u.Old.Images
	if err := u.Save(c); err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		role := v1alpha1.RoleWorker
		if strings.HasPrefix(name, "c") {
			role = v1alpha1.RoleControlPlane
		}
		u.On[name] = u.Node(t, name, byte(i+1), role)
		u.Kubelet(t.Context(), t, name, "v"+Before)
		if role == v1alpha1.RoleControlPlane {
			for _, p := range []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler} {
				u.static(t, name, p)
			}
		}
	}
	return u
}

// Create makes an object until the test ends.
func Create(t *testing.T, o client.Object) {
	t.Helper()
	if err := Shared.Client.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Shared.Client.Delete(context.WithoutCancel(t.Context()), o, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
}

// static makes a static pod's mirror.
func (u *Upgrading) static(t *testing.T, node, name string) {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name + "-" + node, Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: name, Image: RefIn(t, u.Old, name)}}},
	}
	Create(t, p)
	PodIs(t, node, name, true)
}

// PodIs has a static pod be Ready, or not.
func PodIs(t *testing.T, node, name string, ready bool) {
	t.Helper()
	p := &corev1.Pod{}
	Change(t.Context(), t, true, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: name + "-" + node}, p, func() {
		p.Status.Phase, p.Status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: truth(ready)}}
	})
}

// NodeIs has a node be Ready, or not.
func NodeIs(t *testing.T, name string, ready bool) {
	t.Helper()
	n := &corev1.Node{}
	Change(t.Context(), t, true, types.NamespacedName{Name: name}, n, func() {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: truth(ready)}}
	})
}

func truth(b bool) corev1.ConditionStatus {
	if b {
		return corev1.ConditionTrue
	}
	return corev1.ConditionFalse
}

// Change updates an object, or its status, as it is there.
func Change(ctx context.Context, t *testing.T, status bool, key types.NamespacedName, o client.Object, how func()) {
	err := Shared.Client.Get(ctx, key, o)
	if err == nil {
		how()
		if status {
			err = Shared.Client.Status().Update(ctx, o)
		} else {
			err = Shared.Client.Update(ctx, o)
		}
	}
	if err != nil && ctx.Err() == nil {
		t.Errorf("%s: %v", key, err)
	}
}

// Kubelet sets the version of a node's kubelet.
func (u *Upgrading) Kubelet(ctx context.Context, t *testing.T, node, version string) {
	n := &corev1.Node{}
	Change(ctx, t, true, types.NamespacedName{Name: node}, n, func() { n.Status.NodeInfo.KubeletVersion = version })
}

// Image sets the image of a static pod.
func (u *Upgrading) Image(ctx context.Context, t *testing.T, node, name, image string) {
	p := &corev1.Pod{}
	Change(ctx, t, false, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: name + "-" + node}, p, func() { p.Spec.Containers[0].Image = image })
}

// Becomes has a node run the new release.
func (u *Upgrading) Becomes(ctx context.Context, t *testing.T, node string) {
	if strings.HasPrefix(node, "c") {
		for _, p := range []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler} {
			u.Image(ctx, t, node, p, RefIn(t, u.New, p))
		}
	}
	u.Kubelet(ctx, t, node, "v"+After)
}

// Run has the machines execute orders until the test ends.
func (u *Upgrading) Run(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for name, on := range u.On {
		all.Go(func() {
			decided := ""
			for range Changes(ctx, &v1alpha1.AttestedNodeList{}, name) {
				n := &v1alpha1.AttestedNode{}
				if err := Shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil || n.Annotations[v1alpha1.OwnerOrder] == "" {
					continue
				}
				s, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
				if err != nil {
					t.Error(err)
					return
				}
				o, err := s.Genuine(attest.OwnerKeys{u.Public}, on)
				if err != nil || o.Action != ownerorder.ActionUpgradeKubernetes || o.Args[ownerorder.ArgVersion] != After {
					t.Errorf("%s: %s: %v", name, s.Text, err)
					return
				}
				if l, err := versions.Parse([]byte(o.Args[ownerorder.ArgList])); err != nil || !slices.Equal(l.Components, u.New.Components) || !slices.Equal(l.Images, u.New.Images) {
					t.Errorf("%s has the list %+v: %v", name, l, err)
				}
				if r := n.Status.Order; decided == s.Digest() && r != nil && r.State != v1alpha1.OrderRunning {
					continue
				}
				part := o.Args[ownerorder.ArgPart]
				u.mu.Lock()
				act := u.act
				if decided != s.Digest() {
					u.orders = append(u.orders, name+" "+part)
				}
				u.mu.Unlock()
				decided = s.Digest()
				state := v1alpha1.OrderDone
				if act != nil {
					state = act(name, part)
				}
				if state == v1alpha1.OrderDone {
					u.Becomes(ctx, t, name)
				}
				if r := n.Status.Order; r != nil && r.Digest == s.Digest() && r.State == state {
					continue
				}
				Change(ctx, t, true, types.NamespacedName{Name: name}, n, func() {
					n.Status.Order = &v1alpha1.OrderReport{Digest: s.Digest(), Action: string(o.Action), State: state, Message: "because", Output: `{"version":"` + After + `"}`}
				})
			}
		})
	}
	t.Cleanup(func() { cancel(); all.Wait() })
}

// Acts sets what a machine does with an order; nil: it is upgraded.
func (u *Upgrading) Acts(f func(node, part string) v1alpha1.OrderState) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.act = f
}

// Ordered returns the orders that machines have started: NODE PART.
func (u *Upgrading) Ordered() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.orders)
}

// Info reads the cluster's description.
func (u *Upgrading) Info(ctx context.Context, t *testing.T) *clusterinfo.Info {
	m := &corev1.ConfigMap{}
	if err := Shared.Client.Get(ctx, types.NamespacedName{Namespace: clusterinfo.Namespace, Name: clusterinfo.ConfigMap}, m); err != nil {
		t.Error(err)
		return &clusterinfo.Info{}
	}
	i, err := clusterinfo.Parse([]byte(m.Data[clusterinfo.Key]))
	if err != nil {
		t.Error(err)
		return &clusterinfo.Info{}
	}
	return i
}

// Describes writes the cluster's description.
func (u *Upgrading) Describes(t *testing.T, how func(*clusterinfo.Info)) {
	t.Helper()
	i := u.Info(t.Context(), t)
	how(i)
	text, err := i.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	m := &corev1.ConfigMap{}
	Change(t.Context(), t, false, types.NamespacedName{Namespace: clusterinfo.Namespace, Name: clusterinfo.ConfigMap}, m, func() { m.Data[clusterinfo.Key] = string(text) })
}

// Addons makes kube-proxy and CoreDNS with the old images.
func (u *Upgrading) Addons(t *testing.T) {
	t.Helper()
	apps := kubernetes.NewForConfigOrDie(Shared.Admin).AppsV1()
	labels := map[string]string{"app": "addon"}
	pod := func(name string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: name, Image: RefIn(t, u.Old, name)}}}}
	}
	proxy := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: versions.Proxy}, Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod(versions.Proxy)}}
	if _, err := apps.DaemonSets(metav1.NamespaceSystem).Create(t.Context(), proxy, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	dns := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: versions.CoreDNS}, Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod(versions.CoreDNS)}}
	if _, err := apps.Deployments(metav1.NamespaceSystem).Create(t.Context(), dns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(apps.DaemonSets(metav1.NamespaceSystem).Delete(ctx, versions.Proxy, metav1.DeleteOptions{}), apps.Deployments(metav1.NamespaceSystem).Delete(ctx, versions.CoreDNS, metav1.DeleteOptions{})); err != nil {
			t.Error(err)
		}
	})
}

// SetAddons sets their images as the last control plane does, and what their controllers report.
func (u *Upgrading) SetAddons(ctx context.Context, t *testing.T) {
	apps := kubernetes.NewForConfigOrDie(Shared.Admin).AppsV1()
	sets, deployments := apps.DaemonSets(metav1.NamespaceSystem), apps.Deployments(metav1.NamespaceSystem)
	ds, err := sets.Get(ctx, versions.Proxy, metav1.GetOptions{})
	if err == nil {
		ds.Spec.Template.Spec.Containers[0].Image = RefIn(t, u.New, versions.Proxy)
		ds, err = sets.Update(ctx, ds, metav1.UpdateOptions{})
	}
	if err == nil {
		ds.Status.ObservedGeneration = ds.Generation
		_, err = sets.UpdateStatus(ctx, ds, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Error(err)
	}
	d, err := deployments.Get(ctx, versions.CoreDNS, metav1.GetOptions{})
	if err == nil {
		d.Spec.Template.Spec.Containers[0].Image = RefIn(t, u.New, versions.CoreDNS)
		d, err = deployments.Update(ctx, d, metav1.UpdateOptions{})
	}
	if err == nil {
		d.Status.ObservedGeneration = d.Generation
		_, err = deployments.UpdateStatus(ctx, d, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Error(err)
	}
}
