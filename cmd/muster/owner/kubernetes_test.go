package owner

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
)

func TestKubernetesIsUpgradedNodeByNode(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u := newUpgrading(t, "c1", "c2", "c3", "w1", "w2")
	u.addons(t)
	u.acts(func(node, part string) v1alpha1.OrderState {
		i := u.info(ctx, t)
		if control := strings.HasPrefix(node, "c"); control != (i.Next != nil && i.KubernetesVersion == before) || control == (i.Previous != nil && i.KubernetesVersion == after) {
			t.Errorf("when %s is upgraded, the cluster says %+v", node, i)
		}
		n := &corev1.Node{}
		if err := shared.Client.Get(ctx, types.NamespacedName{Name: node}, n); err != nil || !n.Spec.Unschedulable {
			t.Errorf("%s is not drained: %v", node, err)
		}
		if part == ownerorder.PartLast {
			u.setAddons(ctx, t)
		}
		return v1alpha1.OrderDone
	})
	u.run(t)
	p, err := UpgradeKubernetes(ctx, u.cfg(&u.new))
	if err != nil || p.Stage != KubernetesDone {
		t.Fatalf("%v: %s", err, remedy(err))
	}
	if got, want := u.ordered(), []string{"c1 first", "c2 node", "c3 last", "w1 node", "w2 node"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	u.done(t)
	// Repeated without the list, it has nothing to do.
	if p, err := UpgradeKubernetes(ctx, u.cfg(nil)); err != nil || p.Stage != KubernetesDone || len(u.ordered()) != 5 {
		t.Errorf("%v; %q", err, u.ordered())
	}
}

// A run that ends at a node is continued by the list in the folder; the orders that are there are waited for.
func TestAnUpgradeOfKubernetesContinues(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	u := newUpgrading(t, "c1", "c2", "w1", "w2")
	u.addons(t)
	if _, err := UpgradeKubernetes(ctx, u.cfg(nil)); err == nil || !strings.Contains(remedy(err), "--components") {
		t.Errorf("without a list: %v", err)
	}
	u.acts(func(node, _ string) v1alpha1.OrderState {
		if node == "c2" {
			return v1alpha1.OrderFailed
		}
		return v1alpha1.OrderDone
	})
	u.run(t)
	_, err := UpgradeKubernetes(ctx, u.cfg(&u.new))
	if err == nil || !strings.Contains(err.Error(), "c2: c2: upgrade-kubernetes failed: because") || !strings.Contains(remedy(err), "muster doctor --node c2") || !strings.Contains(remedy(err), "muster upgrade kubernetes "+after) {
		t.Fatalf("%v: %s", err, remedy(err))
	}
	if unschedulable(t, "c1") || !unschedulable(t, "c2") {
		t.Error("which nodes take pods is wrong")
	}
	kube, err := Connect(u.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := kube.Status(ctx, slog.New(slog.DiscardHandler)); err != nil || s.Upgrade == nil || *s.Upgrade != (clusterapi.KubernetesUpgrade{From: before, To: after, Stage: "control planes", Upgraded: 1, Nodes: 4}) {
		t.Errorf("%v; %+v", err, s.Upgrade)
	}
	other := listOf(after, "3.6.6-0", "3")
	if _, err := UpgradeKubernetes(ctx, u.cfg(&other)); err == nil || !strings.Contains(err.Error(), "by another list") {
		t.Errorf("another list: %v", err)
	}

	// An upgraded control plane that is not well stops it.
	podIs(t, "c1", versions.Etcd, false)
	if _, err := UpgradeKubernetes(ctx, u.cfg(nil)); err == nil || !strings.Contains(err.Error(), "static pods of c1 are not Ready: etcd") || len(u.ordered()) != 2 {
		t.Errorf("%v; %q", err, u.ordered())
	}
	podIs(t, "c1", versions.Etcd, true)

	// The machine of w1 is in the middle when the command is interrupted. The add-ons stayed old at first.
	lasts := 0
	u.acts(func(node, part string) v1alpha1.OrderState {
		if part == ownerorder.PartLast {
			if lasts++; lasts == 2 {
				u.setAddons(ctx, t)
			}
		}
		if node == "w1" {
			return v1alpha1.OrderRunning
		}
		return v1alpha1.OrderDone
	})
	interrupted, interrupt := context.WithCancel(ctx)
	defer interrupt()
	cfg := u.cfg(nil)
	cfg.Report = func(node, step string) {
		if node == "w1" && step == string(v1alpha1.OrderRunning) {
			interrupt()
		}
	}
	if _, err := UpgradeKubernetes(interrupted, cfg); err == nil {
		t.Fatal("it was not interrupted")
	}
	want := []string{"c1 first", "c2 last", "c2 last", "c2 last", "w1 node"} // c2: failed, upgraded, add-ons
	if got := u.ordered(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if c := u.Cluster(); c.KubernetesVersion != after || c.Upgrade == nil {
		t.Errorf("the folder says %+v", c)
	}
	u.acts(nil)
	if _, err := UpgradeKubernetes(ctx, u.cfg(nil)); err != nil {
		t.Fatalf("%v: %s", err, remedy(err))
	}
	if got := u.ordered(); !slices.Equal(got, append(want, "w2 node")) {
		t.Errorf("%q", got)
	}
	u.done(t)
}

// With --max-unavailable 2, the machine of one worker ends only when the other one has begun.
func TestWorkersAreUpgradedTogether(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u := newUpgrading(t, "c1", "w1", "w2", "w3")
	u.acts(func(node, _ string) v1alpha1.OrderState {
		if node == "w1" && !slices.Contains(u.ordered(), "w2 node") {
			return v1alpha1.OrderRunning
		}
		if node == "w3" && !strings.Contains(strings.Join(u.ordered(), " "), "w1") {
			t.Error("three at once")
		}
		return v1alpha1.OrderDone
	})
	u.run(t)
	cfg := u.cfg(&u.new)
	cfg.MaxUnavailable = 2
	if _, err := UpgradeKubernetes(ctx, cfg); err != nil {
		t.Fatalf("%v: %s", err, remedy(err))
	}
	if got := u.ordered(); got[0] != "c1 only" || len(got) != 4 {
		t.Errorf("%q", got)
	}
	u.done(t)
}

// A machine can fail when its kubelet is new already: its order is given again.
func TestANodeThatFailedAtTheEndOfItsUpgradeIsOrderedAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u := newUpgrading(t, "c1", "w1")
	u.acts(func(node, _ string) v1alpha1.OrderState {
		if node == "w1" {
			u.becomes(ctx, t, node)
			return v1alpha1.OrderFailed
		}
		return v1alpha1.OrderDone
	})
	u.run(t)
	if _, err := UpgradeKubernetes(ctx, u.cfg(&u.new)); err == nil || !strings.Contains(err.Error(), "w1: upgrade-kubernetes failed") {
		t.Fatal(err)
	}
	u.acts(nil)
	if _, err := UpgradeKubernetes(ctx, u.cfg(nil)); err != nil {
		t.Fatalf("%v: %s", err, remedy(err))
	}
	if got, want := u.ordered(), []string{"c1 only", "w1 node", "w1 node"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	u.done(t)
}
