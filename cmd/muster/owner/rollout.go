package owner

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// Rollout says which image each node runs.
type Rollout struct {
	// Nodes are those that have attested, by name.
	Nodes []Runs `json:"nodes"`
	// Images counts the nodes of each image of the policy in force; with 0, the image can be removed from the policy.
	Images map[string]int `json:"images"`
}

// Runs is what a node's machine booted, by its last evidence and the names of the policy in force.
type Runs struct {
	Node string        `json:"node"`
	Role v1alpha1.Role `json:"role"`
	// Image and Class are empty if the policy has none with these PCR values.
	Image string `json:"image,omitempty"`
	Class string `json:"class,omitempty"`
	// Since is when this boot's first evidence was verified; zero if it is not known.
	Since time.Time `json:"since,omitzero"`
	// Attested is the time of the last evidence, Accepted whether the policy accepted it.
	Attested time.Time `json:"attested"`
	Accepted bool      `json:"accepted"`
}

// RolloutStatus reads which image each node runs.
func RolloutStatus(ctx context.Context, d *ownerdir.Dir) (*Rollout, error) {
	kube, err := Connect(d)
	if err != nil {
		return nil, err
	}
	have, err := kube.Policy(ctx)
	if err != nil {
		return nil, err
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return nil, err
	}
	p, err := openPolicy(have, public) // it names the images by which nodes are chosen
	if err != nil {
		return nil, fmt.Errorf("the cluster's policy: %w", err)
	}
	all, err := kube.Enrollments(ctx)
	if err != nil {
		return nil, err
	}
	out := &Rollout{Nodes: []Runs{}, Images: map[string]int{}}
	for _, name := range p.Images() {
		out.Images[name] = 0
	}
	for i := range all {
		n := &all[i]
		if n.Status.LastVerdict == nil {
			continue
		}
		values, err := storedPCRs(n)
		if err != nil {
			return nil, fmt.Errorf("AttestedNode %s: %w", n.Name, err)
		}
		r := Runs{Node: n.Name, Role: n.Spec.Role, Attested: n.Status.LastVerdict.Time.Time, Accepted: n.Status.LastVerdict.Accepted}
		r.Image, r.Class = p.Names(values)
		if n.Status.Boot != nil {
			r.Since = n.Status.Boot.Since.Time
		}
		out.Nodes = append(out.Nodes, r)
		out.Images[r.Image]++
	}
	slices.SortFunc(out.Nodes, func(a, b Runs) int { return cmp.Compare(a.Node, b.Node) })
	return out, nil
}

// RebootInTurn drains and restarts nodes one after another. Each must be Ready, and Muster's services on all control planes, before
// the next. It ends at the first node that fails; a repeated call with the nodes that are left continues. A node that was unschedulable
// before stays so.
//
// Unless unchecked, a control plane is not restarted while another one is not well; see [MayRestart].
func RebootInTurn(ctx context.Context, d *ownerdir.Dir, nodes []string, o clusterapi.DrainOptions, drainFor time.Duration, unchecked bool, report func(node, step string)) error {
	kube, err := Connect(d)
	if err != nil {
		return err
	}
	for i, name := range nodes {
		var err error
		if !unchecked {
			err = MayRestart(ctx, d, name)
		}
		if err == nil {
			err = rebootOne(ctx, d, kube, name, o, drainFor, func(s string) { report(name, s) })
		}
		if err != nil {
			return withRemedy(fmt.Errorf("%s: %w", name, err), fmt.Sprintf("%d of %d nodes have restarted; the others were not touched. %s", i, len(nodes), remedy(err)))
		}
	}
	return nil
}

// MayRestart returns an error if a node is a control plane and another one is not well, or there is none: without a majority of etcd's members no machine
// gets the key of its disk, not even the one that has restarted.
func MayRestart(ctx context.Context, d *ownerdir.Dir, name string) error {
	kube, err := Connect(d)
	if err != nil {
		return err
	}
	p, err := kube.Presence(ctx, name)
	if err != nil || !p.ControlPlane {
		return err
	}
	others, problems, err := kube.OtherControlPlanes(ctx, name)
	switch {
	case err != nil:
		return err
	case others == 0:
		return withRemedy(fmt.Errorf("%s is the only control plane", name), "While it restarts there is no API server, and if its disk is encrypted, it waits until you run muster recover. With --unchecked it is restarted.")
	case len(problems) > 0:
		return withRemedy(fmt.Errorf("other control planes are not well: %s", strings.Join(problems, "; ")), "Wait until they are, or repair them: if "+name+" restarts as well, etcd may lose its majority, and encrypted control planes wait for muster recover. With --unchecked it is restarted.")
	}
	return nil
}

func rebootOne(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, name string, o clusterapi.DrainOptions, drainFor time.Duration, report func(string)) error {
	boot, err := kube.BootID(ctx, name)
	if err != nil {
		return err
	}
	return outage{
		drain: o, drainFor: drainFor, wait: OrderTimeout, action: ownerorder.ActionReboot, done: "restarted",
		ready: func(ctx context.Context) error { return kube.AwaitReady(ctx, name, boot) },
	}.of(ctx, d, kube, name, report)
}

// outage is an order for which a node is drained, and after which it must be Ready before it takes pods again.
type outage struct {
	drain    clusterapi.DrainOptions
	drainFor time.Duration
	// undrained leaves the pods on the node; returns says that it is unschedulable by an earlier outage that was interrupted.
	undrained, returns bool

	action ownerorder.Action // empty: it has been executed already
	args   map[string]string
	// wait is how long the machine has for the order, and again until ready returns nil.
	wait  time.Duration
	ready func(context.Context) error
	// done is what the order has done to the node, as in "restarted".
	done string
}

// of executes an outage of a node.
func (u outage) of(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, name string, report func(string)) error {
	cordoned := u.returns
	if !u.undrained {
		u.drain.Returns = true
		drain, cancel := context.WithTimeout(ctx, u.drainFor)
		defer cancel()
		var err error
		if cordoned, err = Drain(drain, d, name, u.drain, report); err != nil {
			return err
		}
	}
	if u.action != "" {
		ordered, cancel := context.WithTimeout(ctx, u.wait)
		defer cancel()
		r, err := Order(ordered, d, name, u.action, u.args, report)
		if err != nil {
			return err
		}
		report(strings.TrimSpace(u.done + " " + r.Output))
	}
	waiting, cancel := context.WithTimeout(ctx, u.wait)
	defer cancel()
	if err := u.ready(waiting); err != nil {
		return withRemedy(fmt.Errorf("it has %s and is not Ready: %w", u.done, err), "muster doctor --node "+name+" shows what is wrong. It takes no pods until kubectl uncordon "+name+".")
	}
	if err := kube.ServicesReady(waiting, func(string) {}); err != nil {
		return err
	}
	if cordoned {
		if err := kube.Uncordon(ctx, name); err != nil {
			return withRemedy(err, "It has "+u.done+", and takes no pods until kubectl uncordon "+name+".")
		}
	}
	report("Ready")
	return nil
}
