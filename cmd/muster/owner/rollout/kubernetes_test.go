package rollout

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
)

func TestKubernetesIsUpgradedNodeByNode(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	u := ownertest.NewUpgrading(t, "c1", "c2", "c3", "w1", "w2")
	u.Addons(t)
	u.Acts(func(node, part string) v1alpha1.OrderState {
		i := u.Info(ctx, t)
		if control := strings.HasPrefix(node, "c"); control != (i.Next != nil && i.KubernetesVersion == ownertest.Before) || control == (i.Previous != nil && i.KubernetesVersion == ownertest.After) {
			t.Errorf("when %s is upgraded, the cluster says %+v", node, i)
		}
		n := &corev1.Node{}
		if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: node}, n); err != nil || !n.Spec.Unschedulable {
			t.Errorf("%s is not drained: %v", node, err)
		}
		if part == ownerorder.PartLast {
			u.SetAddons(ctx, t)
		}
		return v1alpha1.OrderDone
	})
	u.Run(t)
	p, err := UpgradeKubernetes(ctx, kubernetesConfig(u, &u.New))
	if err != nil || p.Stage != KubernetesDone {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if got, want := u.Ordered(), []string{"c1 first", "c2 node", "c3 last", "w1 node", "w2 node"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	done(t, u)
	// Repeated without the list, it has nothing to do.
	if p, err := UpgradeKubernetes(ctx, kubernetesConfig(u, nil)); err != nil || p.Stage != KubernetesDone || len(u.Ordered()) != 5 {
		t.Errorf("%v; %q", err, u.Ordered())
	}
}

// A run that ends at a node is continued by the list in the folder; the orders that are there are waited for.
func TestAnUpgradeOfKubernetesContinues(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	u := ownertest.NewUpgrading(t, "c1", "c2", "w1", "w2")
	u.Addons(t)
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, nil)); err == nil || !strings.Contains(problem.Remedy(err), "--components") {
		t.Errorf("without a list: %v", err)
	}
	u.Acts(func(node, _ string) v1alpha1.OrderState {
		if node == "c2" {
			return v1alpha1.OrderFailed
		}
		return v1alpha1.OrderDone
	})
	u.Run(t)
	_, err := UpgradeKubernetes(ctx, kubernetesConfig(u, &u.New))
	if err == nil || !strings.Contains(err.Error(), "c2: c2: upgrade-kubernetes failed: because") || !strings.Contains(problem.Remedy(err), "muster doctor --node c2") || !strings.Contains(problem.Remedy(err), "muster upgrade kubernetes "+ownertest.After) {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if ownertest.Unschedulable(t, "c1") || !ownertest.Unschedulable(t, "c2") {
		t.Error("which nodes take pods is wrong")
	}
	kube, err := access.Connect(u.Dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := kube.Status(ctx, slog.New(slog.DiscardHandler))
	if err != nil || s.Upgrade == nil || *s.Upgrade != (clusterapi.KubernetesUpgrade{From: ownertest.Before, To: ownertest.After, Stage: "control planes", Since: s.Upgrade.Since, Upgraded: 1, Nodes: 4}) || time.Since(s.Upgrade.Since).Abs() > ownertest.Patience {
		t.Errorf("%v; %+v", err, s.Upgrade)
	}
	other := ownertest.ListOf(ownertest.After, "3.6.6-0", "3")
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, &other)); err == nil || !strings.Contains(err.Error(), "with another list") {
		t.Errorf("another list: %v", err)
	}

	// An upgraded control plane that is not well stops it.
	ownertest.PodIs(t, "c1", versions.Etcd, false)
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, nil)); err == nil || !strings.Contains(err.Error(), "static pods of c1 are not Ready: etcd") || len(u.Ordered()) != 2 {
		t.Errorf("%v; %q", err, u.Ordered())
	}
	ownertest.PodIs(t, "c1", versions.Etcd, true)

	// The machine of w1 is in the middle when the command is interrupted. The add-ons stayed old at first.
	lasts := 0
	u.Acts(func(node, part string) v1alpha1.OrderState {
		if part == ownerorder.PartLast {
			if lasts++; lasts == 2 {
				u.SetAddons(ctx, t)
			}
		}
		if node == "w1" {
			return v1alpha1.OrderRunning
		}
		return v1alpha1.OrderDone
	})
	interrupted, interrupt := context.WithCancel(ctx)
	defer interrupt()
	cfg := kubernetesConfig(u, nil)
	cfg.Report = func(node, step string) {
		if node == "w1" && step == string(v1alpha1.OrderRunning) {
			interrupt()
		}
	}
	if _, err := UpgradeKubernetes(interrupted, cfg); err == nil {
		t.Fatal("it was not interrupted")
	}
	want := []string{"c1 first", "c2 last", "c2 last", "c2 last", "w1 node"} // c2: failed, upgraded, add-ons
	if got := u.Ordered(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if c := u.Cluster(); c.KubernetesVersion != ownertest.After || c.Upgrade == nil {
		t.Errorf("the folder says %+v", c)
	}
	cfg = kubernetesConfig(u, nil)
	cfg.Report = func(node, step string) {
		if node == "w1" && step == string(v1alpha1.OrderRunning) { // the resumed run waits for the order of the first one
			u.Acts(nil)
		}
	}
	if _, err := UpgradeKubernetes(ctx, cfg); err != nil {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if got := u.Ordered(); !slices.Equal(got, append(want, "w2 node")) {
		t.Errorf("%q", got)
	}
	done(t, u)
}

// With --max-unavailable 2, the machine of one worker ends only when the other one has begun.
func TestWorkersAreUpgradedTogether(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	u := ownertest.NewUpgrading(t, "c1", "w1", "w2", "w3")
	u.Acts(func(node, _ string) v1alpha1.OrderState {
		if node == "w1" && !slices.Contains(u.Ordered(), "w2 node") {
			return v1alpha1.OrderRunning
		}
		if node == "w3" && !strings.Contains(strings.Join(u.Ordered(), " "), "w1") {
			t.Error("three at once")
		}
		return v1alpha1.OrderDone
	})
	u.Run(t)
	cfg := kubernetesConfig(u, &u.New)
	cfg.MaxUnavailable = 2
	if _, err := UpgradeKubernetes(ctx, cfg); err != nil {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if got := u.Ordered(); got[0] != "c1 only" || len(got) != 4 {
		t.Errorf("%q", got)
	}
	done(t, u)
}

// A machine can fail when its kubelet is new already: its order is given again.
func TestANodeThatFailedAtTheEndOfItsUpgradeIsOrderedAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	u := ownertest.NewUpgrading(t, "c1", "w1")
	u.Acts(func(node, _ string) v1alpha1.OrderState {
		if node == "w1" {
			u.Becomes(ctx, t, node)
			return v1alpha1.OrderFailed
		}
		return v1alpha1.OrderDone
	})
	u.Run(t)
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, &u.New)); err == nil || !strings.Contains(err.Error(), "w1: upgrade-kubernetes failed") {
		t.Fatal(err)
	}
	u.Acts(nil)
	if _, err := UpgradeKubernetes(ctx, kubernetesConfig(u, nil)); err != nil {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if got, want := u.Ordered(), []string{"c1 only", "w1 node", "w1 node"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	done(t, u)
}

// restart restarts nodes in turn.
func restartInTurn(ctx context.Context, l *ownertest.Lifecycle, change func(*Restarts), nodes ...string) error {
	r := Restarts{Nodes: nodes, DrainFor: ownertest.Patience, Report: func(string, string) {}}
	if change != nil {
		change(&r)
	}
	return RebootInTurn(ctx, l.Dir, r)
}

func kubernetesConfig(u *ownertest.Upgrading, list *versions.List) KubernetesConfig {
	return KubernetesConfig{Dir: u.Dir, Version: ownertest.After, List: list, DrainFor: ownertest.Patience, Wait: ownertest.Patience, MaxUnavailable: 1, Report: func(string, string) {}}
}

// done checks the state after the upgrade.
func done(t *testing.T, u *ownertest.Upgrading) {
	t.Helper()
	i := u.Info(t.Context(), t)
	if i.KubernetesVersion != ownertest.After || i.Other() != nil || !slices.Equal(i.Components, u.New.Components) || !slices.Equal(i.Images, u.New.Images) {
		t.Errorf("the cluster says %+v", i)
	}
	if c := u.Cluster(); c.KubernetesVersion != ownertest.After || c.Upgrade != nil || !slices.Equal(c.Images, u.New.Images) || len(backups.Differences(c, i)) > 1 { // the endpoint of the fixture
		t.Errorf("the folder says %+v", c)
	}
	for name := range u.On {
		if ownertest.Unschedulable(t, name) {
			t.Errorf("%s takes no pods", name)
		}
	}
}
