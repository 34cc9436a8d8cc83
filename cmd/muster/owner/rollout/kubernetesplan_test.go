package rollout

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
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
)

// What is wrong is named before anything is changed; corrected, the same plan has no problem.
func TestAnUpgradeOfKubernetesIsRefusedBeforeAnythingIsChanged(t *testing.T) {
	u := ownertest.NewUpgrading(t, "c1", "w1")
	plan := func(t *testing.T, cfg KubernetesConfig) error {
		t.Helper()
		p, err := PlanKubernetes(t.Context(), cfg)
		if err == nil {
			err = p.Err()
		}
		return err
	}
	long := ownertest.ListOf(ownertest.After, "3.6.6-0", "2")
	for i := range 30 {
		long.Components = append(long.Components, versions.Component{URL: "https://mirror.example/" + strings.Repeat("x", 500), SHA256: strings.Repeat("4", 64), Path: fmt.Sprintf("/opt/%d", i), Mode: 0o755})
	}
	bare := ownertest.ListOf(ownertest.After, "3.6.6-0", "2")
	bare.Components = bare.Components[:1]
	olderEtcd, strange := ownertest.ListOf(ownertest.After, "3.6.4-0", "2"), ownertest.ListOf(ownertest.After, "latest", "2")
	// with returns the new release's list with another image or component.
	with := func(change func(*versions.List)) func(*KubernetesConfig) {
		l := ownertest.ListOf(ownertest.After, "3.6.6-0", "2")
		change(&l)
		return func(c *KubernetesConfig) { c.List = &l }
	}
	image := func(name, is string) func(*versions.List) {
		return func(l *versions.List) {
			i := slices.IndexFunc(l.Images, func(r string) bool { return strings.Contains(r, "/"+name+":") })
			l.Images[i] = "registry.example/" + name + is
		}
	}
	for name, tt := range map[string]struct {
		cfg   func(*KubernetesConfig)
		wrong func(t *testing.T) (repair func())
		says  string
	}{
		"an unsupported version":       {cfg: func(c *KubernetesConfig) { c.Version = "1.12.1" }, says: "not supported"},
		"no list":                      {cfg: func(c *KubernetesConfig) { c.List = nil }, says: "has no list"},
		"a list without kubelet":       {cfg: func(c *KubernetesConfig) { c.List = &bare }, says: "has no kubelet"},
		"a list without digests":       {cfg: func(c *KubernetesConfig) { l := bare; l.Components, l.Images = u.New.Components, nil; c.List = &l }, says: "not listed"},
		"a list that is too long":      {cfg: func(c *KubernetesConfig) { c.List = &long }, says: "a machine reads at most"},
		"an older etcd":                {cfg: func(c *KubernetesConfig) { c.List = &olderEtcd }, says: "etcd on c1 (version from the image's tag): 3.6.4-0 is older"},
		"an etcd without a version":    {cfg: func(c *KubernetesConfig) { c.List = &strange }, says: "can't be compared"},
		"an image of another version":  {cfg: with(image(versions.Proxy, ":v1.36.0@sha256:"+strings.Repeat("2", 64))), says: "the list has kube-proxy with the tag v1.36.0: use the list of Kubernetes 1.36.1"},
		"an image without a version":   {cfg: with(image(versions.Scheduler, ":stable@sha256:"+strings.Repeat("2", 64))), says: "kube-scheduler with the tag stable"},
		"a new tag of the same image":  {cfg: with(image(versions.APIServer, ":v1.36.1@sha256:"+strings.Repeat("1", 64))), says: "kube-apiserver with the digest of Kubernetes " + ownertest.Before},
		"a program of another version": {cfg: with(func(l *versions.List) { l.Components[1].URL = "https://mirror.example/v1.36.0/bin/kubelet" }), says: "kubelet from https://mirror.example/v1.36.0/bin/kubelet"},
		"the program that runs":        {cfg: with(func(l *versions.List) { l.Components[0].SHA256 = strings.Repeat("1", 64) }), says: "the same file kubeadm as that of"},
		"another list of the version that runs": {wrong: func(t *testing.T) func() {
			u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = ownertest.After })
			return func() { u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = ownertest.Before }) }
		}, says: "already runs"},
		"a cluster of two minor versions before": {wrong: func(t *testing.T) func() {
			u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = "1.34.4" })
			return func() { u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = ownertest.Before }) }
		}, says: "Kubernetes: 1.36.1 is more than one minor version after 1.34.4"},
		"an upgrade by another list": {wrong: func(t *testing.T) func() {
			l := ownertest.ListOf(ownertest.After, "3.6.6-0", "3")
			u.Describes(t, func(i *clusterinfo.Info) {
				i.Next = &clusterinfo.Release{KubernetesVersion: ownertest.After, Components: l.Components, Images: l.Images}
			})
			return func() { u.Describes(t, func(i *clusterinfo.Info) { i.Next = nil }) }
		}, says: "with another list"},
		"a cluster without a list": {wrong: func(t *testing.T) func() {
			u.Describes(t, func(i *clusterinfo.Info) { i.Components, i.Images, i.Adopted = nil, nil, true })
			return func() {
				u.Describes(t, func(i *clusterinfo.Info) { i.Components, i.Images, i.Adopted = u.Old.Components, u.Old.Images, false })
			}
		}, says: "has no list of its current release"},
		"a version in short": {wrong: func(t *testing.T) func() {
			u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = "1.35" })
			return func() { u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = ownertest.Before }) }
		}, says: "write the full version"},
		"an old kubelet": {wrong: func(t *testing.T) func() {
			u.Kubelet(t.Context(), t, "w1", "v1.34.4")
			return func() { u.Kubelet(t.Context(), t, "w1", "v"+ownertest.Before) }
		}, says: "the kubelet of w1: 1.36.1 is more than one minor version after v1.34.4"},
		"a newer kubelet": {wrong: func(t *testing.T) func() {
			u.Kubelet(t.Context(), t, "w1", "v1.36.2")
			return func() { u.Kubelet(t.Context(), t, "w1", "v"+ownertest.Before) }
		}, says: "cannot be downgraded"},
		"a kubelet that says nonsense": {wrong: func(t *testing.T) func() {
			u.Kubelet(t.Context(), t, "w1", "new\n")
			return func() { u.Kubelet(t.Context(), t, "w1", "v"+ownertest.Before) }
		}, says: "is no version"},
		"an old API server": {wrong: func(t *testing.T) func() {
			u.Image(t.Context(), t, "c1", versions.APIServer, "registry.example/kube-apiserver:v1.34.4")
			return func() {
				u.Image(t.Context(), t, "c1", versions.APIServer, ownertest.RefIn(t, u.Old, versions.APIServer))
			}
		}, says: "kube-apiserver on c1"},
		"a control plane that is not Ready": {wrong: func(t *testing.T) func() {
			ownertest.NodeIs(t, "c1", false)
			return func() { ownertest.NodeIs(t, "c1", true) }
		}, says: "c1 is not Ready"},
		"a worker that is not Ready": {wrong: func(t *testing.T) func() {
			ownertest.NodeIs(t, "w1", false)
			return func() { ownertest.NodeIs(t, "w1", true) }
		}, says: "w1 is not Ready"},
		"an etcd that is not Ready": {wrong: func(t *testing.T) func() {
			ownertest.PodIs(t, "c1", versions.Etcd, false)
			return func() { ownertest.PodIs(t, "c1", versions.Etcd, true) }
		}, says: "static pods of c1 are not Ready: etcd"},
		"a control plane that joins": {wrong: func(t *testing.T) func() {
			n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "c2"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("05", 32), Role: v1alpha1.RoleControlPlane, DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000055", DiskMode: v1alpha1.DiskModeLUKS}}
			ownertest.Create(t, n)
			return func() { ownertest.Unenroll(t.Context(), "c2") }
		}, says: "c2 is joining"},
		"a control plane that takes no orders": {wrong: func(t *testing.T) func() {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c3", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}}
			ownertest.Create(t, n)
			u.Kubelet(t.Context(), t, "c3", "v"+ownertest.Before)
			return func() {
				if err := ownertest.Shared.Client.Delete(t.Context(), n); err != nil {
					t.Error(err)
				}
			}
		}, says: "c3 is a control plane, and it has no AttestedNode"},
		"a banned control plane": {wrong: func(t *testing.T) func() {
			ban := func(is bool) {
				n := &v1alpha1.AttestedNode{}
				ownertest.Change(t.Context(), t, false, types.NamespacedName{Name: "c1"}, n, func() { n.Spec.Banned = is })
			}
			ban(true)
			return func() { ban(false) }
		}, says: "c1 is a control plane, and it is banned"},
		"a pod that can't be drained": {wrong: func(t *testing.T) func() {
			ownertest.Pod(t, "w1", "alone", nil)
			return func() {
				if err := ownertest.Shared.Client.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "alone"}}, client.GracePeriodSeconds(0)); err != nil {
					t.Error(err)
				}
			}
		}, says: "w1 can't be drained"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, repair := kubernetesConfig(u, &u.New), func() {}
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
			if err := plan(t, kubernetesConfig(u, &u.New)); err != nil {
				t.Errorf("corrected: %v", err)
			}
		})
	}
	if _, err := UpgradeKubernetes(t.Context(), KubernetesConfig{Dir: u.Dir, Version: ownertest.After, List: &olderEtcd, Wait: ownertest.Patience, DrainFor: ownertest.Patience, Report: func(string, string) {}}); err == nil {
		t.Error("a plan with a problem is executed")
	}
	if i := u.Info(t.Context(), t); i.Other() != nil || len(u.Ordered()) > 0 || u.Cluster().Upgrade != nil {
		t.Errorf("something was changed: %+v", i)
	}
}

// Nodes that take no orders are named and left out; a worker that is joining holds the end up.
func TestNodesThatTakeNoOrdersAreLeftOut(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	u := ownertest.NewUpgrading(t, "c1", "w1")
	ownertest.Create(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "x1"}})
	u.Kubelet(ctx, t, "x1", "v"+ownertest.Before)
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w2"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("06", 32), Role: v1alpha1.RoleWorker, DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000056", DiskMode: v1alpha1.DiskModeLUKS}}
	ownertest.Create(t, n)
	p, err := PlanKubernetes(ctx, kubernetesConfig(u, &u.New))
	if err != nil || p.Err() != nil || len(p.Notes) != 2 {
		t.Fatalf("%v; %+v", err, p)
	}
	u.Run(t)
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, &u.New)); err == nil || !strings.Contains(err.Error(), "w2 may still run Kubernetes "+ownertest.Before) || u.Info(ctx, t).Previous == nil {
		t.Fatal(err)
	}
	ownertest.Unenroll(ctx, "w2")
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, nil)); err != nil {
		t.Fatal(err)
	}
	done(t, u)
}

// Of two commands with other lists, one begins.
func TestTwoUpgradesOfKubernetesDoNotMix(t *testing.T) {
	u := ownertest.NewUpgrading(t, "c1")
	other := ownertest.ListOf(ownertest.After, "3.6.6-0", "3")
	var both []*kubeUpgrade
	for _, l := range []*versions.List{&u.New, &other} {
		k, err := newKubernetes(t.Context(), kubernetesConfig(u, l))
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
		if next := u.Info(t.Context(), t).Next; err == nil && (next == nil || !same(*next, both[i].release)) {
			t.Errorf("the cluster says %+v", next)
		}
	}
	// Another program has changed the release that runs.
	u.Describes(t, func(i *clusterinfo.Info) { i.Next, i.KubernetesVersion = nil, "1.35.3" })
	if err := both[0].begin(t.Context()); err == nil || !strings.Contains(err.Error(), "meanwhile") || u.Info(t.Context(), t).Next != nil {
		t.Error(err)
	}
	u.Describes(t, func(i *clusterinfo.Info) { i.KubernetesVersion = ownertest.Before })
	if err := both[0].begin(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestAPlanForKubernetesChangesNothing(t *testing.T) {
	u := ownertest.NewUpgrading(t, "c1", "w1")
	state := func() (out []string) {
		var nodes corev1.NodeList
		var enrolled v1alpha1.AttestedNodeList
		m := &corev1.ConfigMap{}
		if err := ownertest.Shared.Client.Get(t.Context(), types.NamespacedName{Namespace: clusterinfo.Namespace, Name: clusterinfo.ConfigMap}, m); err != nil {
			t.Fatal(err)
		}
		for _, l := range []client.ObjectList{&nodes, &enrolled} {
			if err := ownertest.Shared.Client.List(t.Context(), l); err != nil {
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
	p, err := PlanKubernetes(t.Context(), kubernetesConfig(u, &u.New))
	if err != nil {
		t.Fatal(err)
	}
	if p.From != ownertest.Before || p.To != ownertest.After || p.Stage != KubernetesBegins || len(p.Nodes) != 2 || p.Nodes[0].Will != "upgraded (part: only)" || p.Nodes[1].Will != "upgraded" || p.Err() != nil {
		t.Errorf("%+v", p)
	}
	if now := state(); !slices.Equal(was, now) {
		t.Errorf("%q, was %q", now, was)
	}
}

// The order of a machine that has begun in time is waited for also when it has expired.
func TestAnExpiredOrderThatRunsIsNotSignedAgain(t *testing.T) {
	u := ownertest.NewUpgrading(t, "c1", "w1")
	k, err := newKubernetes(t.Context(), kubernetesConfig(u, &u.New))
	if err != nil {
		t.Fatal(err)
	}
	n := ownertest.EnrollmentOf(t, "w1")
	s, err := orders.Sign(u.Dir, n, ownerorder.ActionUpgradeKubernetes, k.args(ownerorder.PartNode), time.Now().Add(-2*orders.Validity), k.key)
	if err != nil {
		t.Fatal(err)
	}
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, s.Note())
	if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	ask := func() string {
		ctx := &ownertest.Expiring{Context: t.Context(), Over: make(chan struct{})}
		if _, err := orders.Execute(ctx, u.Dir, "w1", ownerorder.ActionUpgradeKubernetes, k.args(ownerorder.PartNode), ctx.Expire); err == nil {
			t.Error("it is over")
		}
		return ownertest.EnrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder]
	}
	ownertest.Change(t.Context(), t, true, types.NamespacedName{Name: "w1"}, n, func() {
		n.Status.Order = &v1alpha1.OrderReport{Digest: s.Digest(), Action: string(ownerorder.ActionUpgradeKubernetes), State: v1alpha1.OrderRunning}
	})
	if ask() != s.Note() {
		t.Error("the order that runs was replaced")
	}
	ownertest.Change(t.Context(), t, true, types.NamespacedName{Name: "w1"}, n, func() { n.Status.Order = nil })
	if ask() == s.Note() {
		t.Error("an expired order that the machine has not begun stays")
	}
}
