package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// UpgradeKubernetes upgrades the control planes one after another, then the workers. It stops at the first node that fails or is unhealthy. A
// repeated call continues: the progress is stored in the cluster, the list in the folder.
func UpgradeKubernetes(ctx context.Context, cfg KubernetesConfig) (*KubernetesPlan, error) {
	k, err := newKubernetes(ctx, cfg)
	if err != nil {
		return nil, err
	}
	p, err := k.plan(ctx)
	if err != nil {
		return nil, err
	}
	if p.Stage == KubernetesDone {
		return p, k.save(true, nil)
	}
	if err := p.Err(); err != nil {
		return nil, err
	}
	for p.Stage != KubernetesDone {
		do, next := k.begin, KubernetesControlPlanes
		switch p.Stage {
		case KubernetesBegins, KubernetesDone:
		case KubernetesControlPlanes:
			do, next = k.controlPlanes, KubernetesWorkers
		case KubernetesWorkers:
			do, next = k.workers, KubernetesDone
		}
		if err := do(ctx); err != nil {
			return nil, problem.WithRemedy(err, strings.TrimSpace(problem.Remedy(err)+" The upgrade continues when the same command is repeated: muster upgrade kubernetes "+p.To+"."))
		}
		p.Stage = next
	}
	return p, nil
}

// describe changes the cluster's description if the upgrade is in stage in. If two commands run at once, the second sees the
// first one's change and does nothing.
func (k *kubeUpgrade) describe(ctx context.Context, in, next KubernetesStage, change func(*clusterinfo.Info)) error {
	ctx, cancel := context.WithTimeout(ctx, k.Wait)
	defer cancel()
	return k.kube.Describe(ctx, func(i *clusterinfo.Info) error {
		stage, err := k.stage(i)
		switch {
		case err != nil || stage == next:
			return err
		case stage != in || !same(*cmp.Or(i.Previous, new(i.Current())), k.from()):
			return problem.WithRemedy(errors.New("another program has changed the cluster's description meanwhile"), "This command changed nothing. Compare cluster.json in the ConfigMap muster-cluster with what you expect.")
		case in == KubernetesBegins && !i.Rotation.Joins():
			return problem.WithRemedy(fmt.Errorf("the %s is being rotated", i.Rotation.Key), "No node was upgraded. Complete that first: "+i.Rotation.Command()+".")
		}
		change(i)
		return nil
	})
}

// from returns the previous release.
func (k *kubeUpgrade) from() clusterinfo.Release {
	return *cmp.Or(k.was.Previous, new(k.was.Current()))
}

// save stores in the folder the list with which the command can continue; nil removes it. With main, the release also becomes the folder's release.
func (k *kubeUpgrade) save(main bool, upgrade *clusterinfo.Release) error {
	c := k.Dir.Cluster()
	if main {
		c.KubernetesVersion, c.Components, c.Images = k.release.KubernetesVersion, k.release.Components, k.release.Images
	}
	c.Upgrade = upgrade
	return k.Dir.Save(c)
}

func (k *kubeUpgrade) begin(ctx context.Context) error {
	if err := k.save(false, &k.release); err != nil { // before the cluster has it: without the list, the command could not be continued
		return err
	}
	return k.describe(ctx, KubernetesBegins, KubernetesControlPlanes, func(i *clusterinfo.Info) { i.Next = &k.release })
}

func (k *kubeUpgrade) controlPlanes(ctx context.Context) error {
	if err := k.save(false, &k.release); err != nil { // the folder may be an older copy
		return err
	}
	if err := k.inTurn(ctx, 1, func(n *clusterapi.NodeRelease) bool { return n.ControlPlane }); err != nil {
		return err
	}
	if err := k.addons(ctx); err != nil {
		return err
	}
	k.Report("cluster", "the control planes run Kubernetes "+k.release.KubernetesVersion+": from now on machines join with it")
	return k.describe(ctx, KubernetesControlPlanes, KubernetesWorkers, func(i *clusterinfo.Info) {
		i.Previous = new(i.Current())
		i.KubernetesVersion, i.Components, i.Images, i.Next = k.release.KubernetesVersion, k.release.Components, k.release.Images, nil
	})
}

// addons lets the last control plane set the new images of kube-proxy and CoreDNS.
func (k *kubeUpgrade) addons(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, k.Wait)
	defer cancel()
	old, _, err := k.kube.Addons(ctx, k.images)
	if err != nil {
		return err
	}
	if len(old) > 0 {
		nodes, err := k.nodes(ctx)
		if err != nil {
			return err
		}
		nodes = slices.DeleteFunc(nodes, func(n clusterapi.NodeRelease) bool { return !n.ControlPlane || !n.Takes() || n.Problem() != "" })
		if len(nodes) == 0 {
			return errors.New("no healthy control plane can set the images of kube-proxy and CoreDNS; muster status shows what is wrong with them")
		}
		last := nodes[len(nodes)-1].Name
		if _, err := orders.Execute(ctx, k.Dir, last, ownerorder.ActionUpgradeKubernetes, k.args(ownerorder.PartLast), func(s string) { k.Report(last, s) }); err != nil {
			return fmt.Errorf("%s: %w", last, err)
		}
		if old, _, err = k.kube.Addons(ctx, k.images); err != nil {
			return err
		} else if len(old) > 0 {
			return problem.WithRemedy(fmt.Errorf("%s has not set the images of %s", last, strings.Join(old, ", ")), "kubectl -n kube-system describe daemonset,deployment "+strings.Join(old, " ")+" shows them.")
		}
	}
	k.Report("cluster", "kube-proxy and CoreDNS get the new images")
	if err := k.kube.AwaitAddons(ctx, k.images); err != nil {
		return problem.WithRemedy(err, "kubectl -n kube-system get pods -o wide shows which pods are not Ready, and where.")
	}
	return nil
}

func (k *kubeUpgrade) workers(ctx context.Context) error {
	if err := k.save(true, &k.release); err != nil {
		return err
	}
	if err := k.inTurn(ctx, max(1, k.MaxUnavailable), func(*clusterapi.NodeRelease) bool { return true }); err != nil {
		return err
	}
	nodes, err := k.nodes(ctx)
	if err != nil {
		return err
	}
	for i := range nodes {
		if n := &nodes[i]; ExcludedReason(n) == "" && (!n.Joined || !k.runs(n)) {
			return problem.WithRemedy(fmt.Errorf("%s may still run Kubernetes %s", n.Name, k.from().KubernetesVersion), "Wait until muster status shows it Ready, or remove it: muster forget "+n.Name+".")
		}
	}
	if err := k.describe(ctx, KubernetesWorkers, KubernetesDone, func(i *clusterinfo.Info) { i.Previous = nil }); err != nil {
		return err
	}
	return k.save(true, nil)
}

// nodes returns the nodes in the order of [kubeUpgrade.sort].
func (k *kubeUpgrade) nodes(ctx context.Context) ([]clusterapi.NodeRelease, error) {
	ctx, cancel := context.WithTimeout(ctx, k.Wait)
	defer cancel()
	nodes, err := k.kube.Releases(ctx)
	k.sort(nodes)
	return nodes, err
}

// inTurn upgrades the nodes for which of returns true, at most most at a time, until none is left. It starts none while a
// control plane or an upgraded node is unhealthy.
func (k *kubeUpgrade) inTurn(ctx context.Context, most int, of func(*clusterapi.NodeRelease) bool) error {
	type result struct {
		name string
		err  error
	}
	busy, results := map[string]bool{}, make(chan result)
	var failed error
	for {
		var nodes []clusterapi.NodeRelease
		if failed == nil {
			nodes, failed = k.nodes(ctx)
		}
		for i := range nodes {
			n := &nodes[i]
			if failed != nil || len(busy) == most {
				break
			}
			if busy[n.Name] || !of(n) || !k.incomplete(n) {
				continue
			}
			busy[n.Name] = true
			if failed = k.well(nodes, busy); failed != nil {
				delete(busy, n.Name)
				break
			}
			part := k.part(n, nodes)
			go func() { results <- result{n.Name, k.node(ctx, n, part)} }()
		}
		if len(busy) == 0 {
			if failed == nil {
				failed = k.well(nodes, busy)
			}
			return failed
		}
		r := <-results
		delete(busy, r.name)
		if r.err != nil {
			failed = errors.Join(failed, problem.WithRemedy(fmt.Errorf("%s: %w", r.name, r.err), strings.TrimSpace("The remaining nodes were not changed. muster doctor --node "+r.name+" shows what is wrong with it. "+problem.Remedy(r.err))))
		}
	}
}

// well returns an error if a control plane or an upgraded node is unhealthy, except nodes that are being upgraded.
func (k *kubeUpgrade) well(nodes []clusterapi.NodeRelease, except map[string]bool) error {
	for i := range nodes {
		n := &nodes[i]
		if except[n.Name] || ExcludedReason(n) != "" || !n.ControlPlane && !k.runs(n) {
			continue
		}
		if bad := n.Problem(); bad != "" {
			return problem.WithRemedy(errors.New(bad), "No further node is upgraded. muster doctor --node "+n.Name+" shows what is wrong. Repair it, or remove it: muster forget "+n.Name+".")
		}
	}
	return nil
}

// node upgrades one node, or waits for an upgrade order that the node already has.
func (k *kubeUpgrade) node(ctx context.Context, n *clusterapi.NodeRelease, part string) error {
	u := outage{
		drain: k.Drain, drainFor: k.DrainFor, wait: k.Wait, action: ownerorder.ActionUpgradeKubernetes, args: k.unfinished(n), done: "upgraded", others: k.kube.ServicesReady,
		ready: func(ctx context.Context) error {
			return k.kube.AwaitRelease(ctx, n.Name, k.release.KubernetesVersion, k.images, k.Stable)
		},
	}
	switch {
	case u.args == nil && k.runs(n) && !k.failed(n):
		u.action = ""
	case u.args == nil:
		u.args = k.args(part)
	}
	// The pods of a node that is not Ready can't be evicted: its kubelet ends them.
	u.undrained, u.returns = !n.Ready || u.action == "" || k.unfinished(n) != nil, n.Returns
	return u.of(ctx, k.Dir, k.kube, n.Name, func(s string) { k.Report(n.Name, s) })
}
