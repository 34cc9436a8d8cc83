package owner

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
)

// What is wrong is named before anything is changed; corrected, the same plan has no problem.
func TestAnUpgradeOfKubernetesIsRefusedBeforeAnythingIsChanged(t *testing.T) {
	u := newUpgrading(t, "c1", "w1")
	plan := func(t *testing.T, cfg KubernetesConfig) error {
		t.Helper()
		p, err := PlanKubernetes(t.Context(), cfg)
		if err == nil {
			err = p.Err()
		}
		return err
	}
	long := listOf(after, "3.6.6-0", "2")
	for i := range 30 {
		long.Components = append(long.Components, versions.Component{URL: "https://mirror.example/" + strings.Repeat("x", 500), SHA256: strings.Repeat("4", 64), Path: fmt.Sprintf("/opt/%d", i), Mode: 0o755})
	}
	bare := listOf(after, "3.6.6-0", "2")
	bare.Components = bare.Components[:1]
	olderEtcd, strange := listOf(after, "3.6.4-0", "2"), listOf(after, "latest", "2")
	for name, tt := range map[string]struct {
		cfg   func(*KubernetesConfig)
		wrong func(t *testing.T) (repair func())
		says  string
	}{
		"an unsupported version":    {cfg: func(c *KubernetesConfig) { c.Version = "1.12.1" }, says: "not supported"},
		"no list":                   {cfg: func(c *KubernetesConfig) { c.List = nil }, says: "has no list"},
		"a list without kubelet":    {cfg: func(c *KubernetesConfig) { c.List = &bare }, says: "has no kubelet"},
		"a list without digests":    {cfg: func(c *KubernetesConfig) { l := bare; l.Components, l.Images = u.new.Components, nil; c.List = &l }, says: "not listed"},
		"a list that is too long":   {cfg: func(c *KubernetesConfig) { c.List = &long }, says: "a machine reads at most"},
		"an older etcd":             {cfg: func(c *KubernetesConfig) { c.List = &olderEtcd }, says: "etcd of c1, whose version is the tag of its image: 3.6.4-0 is older"},
		"an etcd without a version": {cfg: func(c *KubernetesConfig) { c.List = &strange }, says: "can't be compared"},
		"another list of the version that runs": {wrong: func(t *testing.T) func() {
			u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = after })
			return func() { u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = before }) }
		}, says: "runs already"},
		"a cluster of two minor versions before": {wrong: func(t *testing.T) func() {
			u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = "1.34.4" })
			return func() { u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = before }) }
		}, says: "Kubernetes: 1.36.1 is more than one minor version after 1.34.4"},
		"an upgrade by another list": {wrong: func(t *testing.T) func() {
			l := listOf(after, "3.6.6-0", "3")
			u.describes(t, func(i *clusterinfo.Info) {
				i.Next = &clusterinfo.Release{KubernetesVersion: after, Components: l.Components, Images: l.Images}
			})
			return func() { u.describes(t, func(i *clusterinfo.Info) { i.Next = nil }) }
		}, says: "by another list"},
		"a cluster without a list": {wrong: func(t *testing.T) func() {
			u.describes(t, func(i *clusterinfo.Info) { i.Components, i.Images, i.Adopted = nil, nil, true })
			return func() {
				u.describes(t, func(i *clusterinfo.Info) { i.Components, i.Images, i.Adopted = u.old.Components, u.old.Images, false })
			}
		}, says: "has no list of the release that it runs"},
		"a version in short": {wrong: func(t *testing.T) func() {
			u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = "1.35" })
			return func() { u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = before }) }
		}, says: "write the full version"},
		"an old kubelet": {wrong: func(t *testing.T) func() {
			u.kubelet(t.Context(), t, "w1", "v1.34.4")
			return func() { u.kubelet(t.Context(), t, "w1", "v"+before) }
		}, says: "the kubelet of w1: 1.36.1 is more than one minor version after v1.34.4"},
		"a newer kubelet": {wrong: func(t *testing.T) func() {
			u.kubelet(t.Context(), t, "w1", "v1.36.2")
			return func() { u.kubelet(t.Context(), t, "w1", "v"+before) }
		}, says: "does not go back"},
		"a kubelet that says nonsense": {wrong: func(t *testing.T) func() {
			u.kubelet(t.Context(), t, "w1", "new\n")
			return func() { u.kubelet(t.Context(), t, "w1", "v"+before) }
		}, says: "is no version"},
		"an old API server": {wrong: func(t *testing.T) func() {
			u.image(t.Context(), t, "c1", versions.APIServer, "registry.example/kube-apiserver:v1.34.4")
			return func() { u.image(t.Context(), t, "c1", versions.APIServer, refIn(t, u.old, versions.APIServer)) }
		}, says: "kube-apiserver of c1"},
		"a control plane that is not Ready": {wrong: func(t *testing.T) func() { nodeIs(t, "c1", false); return func() { nodeIs(t, "c1", true) } }, says: "c1 is not Ready"},
		"a worker that is not Ready":        {wrong: func(t *testing.T) func() { nodeIs(t, "w1", false); return func() { nodeIs(t, "w1", true) } }, says: "w1 is not Ready"},
		"an etcd that is not Ready": {wrong: func(t *testing.T) func() {
			podIs(t, "c1", versions.Etcd, false)
			return func() { podIs(t, "c1", versions.Etcd, true) }
		}, says: "static pods of c1 are not Ready: etcd"},
		"a control plane that joins": {wrong: func(t *testing.T) func() {
			n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "c2"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("05", 32), Role: v1alpha1.RoleControlPlane, DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000055", DiskMode: v1alpha1.DiskModeLUKS}}
			create(t, n)
			return func() { unenroll(t.Context(), "c2") }
		}, says: "c2 is joining"},
		"a control plane that takes no orders": {wrong: func(t *testing.T) func() {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c3", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}}
			create(t, n)
			u.kubelet(t.Context(), t, "c3", "v"+before)
			return func() {
				if err := shared.Client.Delete(t.Context(), n); err != nil {
					t.Error(err)
				}
			}
		}, says: "c3 is a control plane, and it has no AttestedNode"},
		"a banned control plane": {wrong: func(t *testing.T) func() {
			ban := func(is bool) {
				n := &v1alpha1.AttestedNode{}
				change(t.Context(), t, false, types.NamespacedName{Name: "c1"}, n, func() { n.Spec.Banned = is })
			}
			ban(true)
			return func() { ban(false) }
		}, says: "c1 is a control plane, and it is banned"},
		"a pod that can't be drained": {wrong: func(t *testing.T) func() {
			pod(t, "w1", "alone", nil)
			return func() {
				if err := shared.Client.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "alone"}}, client.GracePeriodSeconds(0)); err != nil {
					t.Error(err)
				}
			}
		}, says: "w1 can't be drained"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, repair := u.cfg(&u.new), func() {}
			if tt.cfg != nil {
				tt.cfg(&cfg)
			}
			if tt.wrong != nil {
				repair = tt.wrong(t)
			}
			if err := plan(t, cfg); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v, want %q", err, tt.says)
			}
			repair()
			if err := plan(t, u.cfg(&u.new)); err != nil {
				t.Errorf("corrected: %v", err)
			}
		})
	}
	if _, err := UpgradeKubernetes(t.Context(), KubernetesConfig{Dir: u.Dir, Version: after, List: &olderEtcd, Wait: patience, DrainFor: patience, Report: func(string, string) {}}); err == nil {
		t.Error("a plan with a problem is executed")
	}
	if i := u.info(t.Context(), t); i.Other() != nil || len(u.ordered()) > 0 || u.Cluster().Upgrade != nil {
		t.Errorf("something was changed: %+v", i)
	}
}

// Nodes that take no orders are named and left out; a worker that is joining holds the end up.
func TestNodesThatTakeNoOrdersAreLeftOut(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u := newUpgrading(t, "c1", "w1")
	create(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "x1"}})
	u.kubelet(ctx, t, "x1", "v"+before)
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w2"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("06", 32), Role: v1alpha1.RoleWorker, DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000056", DiskMode: v1alpha1.DiskModeLUKS}}
	create(t, n)
	p, err := PlanKubernetes(ctx, u.cfg(&u.new))
	if err != nil || p.Err() != nil || len(p.Notes) != 2 {
		t.Fatalf("%v; %+v", err, p)
	}
	u.run(t)
	if _, err := UpgradeKubernetes(ctx, u.cfg(&u.new)); err == nil || !strings.Contains(err.Error(), "w2 may still run Kubernetes "+before) || u.info(ctx, t).Previous == nil {
		t.Fatal(err)
	}
	unenroll(ctx, "w2")
	if _, err := UpgradeKubernetes(ctx, u.cfg(nil)); err != nil {
		t.Fatal(err)
	}
	u.done(t)
}

// Of two commands with other lists, one begins.
func TestTwoUpgradesOfKubernetesDoNotMix(t *testing.T) {
	u := newUpgrading(t, "c1")
	other := listOf(after, "3.6.6-0", "3")
	var both []*kubeUpgrade
	for _, l := range []*versions.List{&u.new, &other} {
		k, err := newKubernetes(t.Context(), u.cfg(l))
		if err != nil {
			t.Fatal(err)
		}
		both = append(both, k)
	}
	errs := make([]error, 2)
	var all sync.WaitGroup
	for i, k := range both {
		all.Go(func() {
			errs[i] = k.describe(t.Context(), KubernetesBegins, KubernetesControlPlanes, func(i *clusterinfo.Info) { i.Next = &k.release })
		})
	}
	all.Wait()
	if (errs[0] == nil) == (errs[1] == nil) {
		t.Fatalf("%v; %v", errs[0], errs[1])
	}
	for i, err := range errs {
		if next := u.info(t.Context(), t).Next; err == nil && (next == nil || !same(*next, both[i].release)) {
			t.Errorf("the cluster says %+v", next)
		}
	}
	// Another program has changed the release that runs.
	u.describes(t, func(i *clusterinfo.Info) { i.Next, i.KubernetesVersion = nil, "1.35.3" })
	if err := both[0].begin(t.Context()); err == nil || !strings.Contains(err.Error(), "meanwhile") || u.info(t.Context(), t).Next != nil {
		t.Error(err)
	}
	u.describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = before })
	if err := both[0].begin(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestAPlanForKubernetesChangesNothing(t *testing.T) {
	u := newUpgrading(t, "c1", "w1")
	state := func() (out []string) {
		var nodes corev1.NodeList
		var enrolled v1alpha1.AttestedNodeList
		m := &corev1.ConfigMap{}
		if err := shared.Client.Get(t.Context(), types.NamespacedName{Namespace: clusterinfo.Namespace, Name: clusterinfo.ConfigMap}, m); err != nil {
			t.Fatal(err)
		}
		for _, l := range []client.ObjectList{&nodes, &enrolled} {
			if err := shared.Client.List(t.Context(), l); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range nodes.Items {
			out = append(out, n.Name+n.ResourceVersion)
		}
		for _, n := range enrolled.Items {
			out = append(out, n.Name+n.ResourceVersion)
		}
		folder, err := os.ReadFile(u.File("cluster.json"))
		if err != nil {
			t.Fatal(err)
		}
		return append(out, m.ResourceVersion, string(folder))
	}
	was := state()
	p, err := PlanKubernetes(t.Context(), u.cfg(&u.new))
	if err != nil {
		t.Fatal(err)
	}
	if p.From != before || p.To != after || p.Stage != KubernetesBegins || len(p.Nodes) != 2 || p.Nodes[0].Will != "upgraded (part: only)" || p.Nodes[1].Will != "upgraded" || p.Err() != nil {
		t.Errorf("%+v", p)
	}
	if now := state(); !slices.Equal(was, now) {
		t.Errorf("%q, was %q", now, was)
	}
}

// The order of a machine that has begun in time is waited for also when it has expired.
func TestAnExpiredOrderThatRunsIsNotSignedAgain(t *testing.T) {
	u := newUpgrading(t, "c1", "w1")
	k, err := newKubernetes(t.Context(), u.cfg(&u.new))
	if err != nil {
		t.Fatal(err)
	}
	n := enrollmentOf(t, "w1")
	s, err := newOrder(u.Dir, n, ownerorder.ActionUpgradeKubernetes, k.args(ownerorder.PartNode), time.Now().Add(-2*OrderLife), k.key)
	if err != nil {
		t.Fatal(err)
	}
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, s.Note())
	if err := shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	ask := func() string {
		ctx := &expiring{Context: t.Context(), done: make(chan struct{})}
		if _, err := Order(ctx, u.Dir, "w1", ownerorder.ActionUpgradeKubernetes, k.args(ownerorder.PartNode), ctx.expire); err == nil {
			t.Error("it is over")
		}
		return enrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder]
	}
	change(t.Context(), t, true, types.NamespacedName{Name: "w1"}, n, func() {
		n.Status.Order = &v1alpha1.OrderReport{Digest: s.Digest(), Action: string(ownerorder.ActionUpgradeKubernetes), State: v1alpha1.OrderRunning}
	})
	if ask() != s.Note() {
		t.Error("the order that runs was replaced")
	}
	change(t.Context(), t, true, types.NamespacedName{Name: "w1"}, n, func() { n.Status.Order = nil })
	if ask() == s.Note() {
		t.Error("an expired order that the machine has not begun stays")
	}
}
