package rollout

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// Restarts are nodes that [RebootInTurn] restarts, and how.
type Restarts struct {
	// Nodes are restarted in this order. Held nodes were restarted by an earlier run, and are only made schedulable, before
	// the others.
	Nodes, Held []string
	// Again is the command that continues after a failure; empty for muster rollout reboot with the remaining nodes.
	Again string
	// Drain and DrainFor configure how a node is drained, and the timeout.
	Drain    clusterapi.DrainOptions
	DrainFor time.Duration
	// Unchecked restarts nodes without checking the health of control planes and Muster's services before and afterwards.
	Unchecked bool
	// Report is called for each step.
	Report func(node, step string)
}

// RebootInTurn drains and restarts nodes one after another. Before the next one, each must be Ready, and all control planes and Muster's services
// must be healthy. It stops at the first node that fails. It restarts none if a control plane is unhealthy, or if one of the nodes can't be drained.
// A node that was unschedulable before stays so. A second concurrent run is refused.
func RebootInTurn(ctx context.Context, d *ownerdir.Dir, r Restarts) error {
	kube, err := access.Connect(d)
	if err != nil {
		return err
	}
	ctx, end, err := kube.Hold(ctx, whoami())
	if held, is := errors.AsType[*clusterapi.HeldError](err); is {
		return problem.WithRemedy(err, fmt.Sprintf("Nothing was changed. Wait until that run is done. If it was killed or its computer is off, its lease expires at %s. Then run this command again.", held.Until.Local().Format(time.TimeOnly)))
	} else if err != nil {
		return fmt.Errorf("take the lease %s/%s: %w", clusterapi.Namespace, clusterapi.RolloutLease, err)
	}
	defer end()
	if err := r.drainable(ctx, kube); err != nil {
		return err
	}
	for _, name := range r.Held {
		if _, err := r.one(ctx, d, kube, name, true); err != nil {
			return problem.WithRemedy(fmt.Errorf("%s: %w", name, err), "No node was restarted. "+problem.Remedy(err))
		}
	}
	done := 0
	for i, name := range r.Nodes {
		var restarted bool
		err := context.Cause(ctx)
		if err == nil && !r.Unchecked {
			err = mayBegin(ctx, kube, name)
		}
		if err == nil {
			restarted, err = r.one(ctx, d, kube, name, false)
		}
		left := r.Nodes[i:]
		if restarted {
			done, left = done+1, left[1:]
		}
		if err == nil {
			continue
		}
		if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
			err = errors.Join(cause, err)
		}
		text := fmt.Sprintf("%d of %d nodes have restarted; the others were not restarted. %s", done, len(r.Nodes), problem.Remedy(err))
		switch {
		case len(left) > 0 && r.Again != "":
			text += "\nTo continue: " + r.Again
		case len(left) > 0:
			text += "\nTo continue: muster rollout reboot " + strings.Join(left, " ")
		}
		return problem.WithRemedy(fmt.Errorf("%s: %w", name, err), text)
	}
	return nil
}

// whoami describes this run for the users of other workstations.
func whoami() string {
	who, where := "unknown user", "unknown host"
	if u, err := user.Current(); err == nil {
		who = u.Username
	}
	if name, err := os.Hostname(); err == nil {
		where = name
	}
	return fmt.Sprintf("%s on %s (process %d, %s)", who, where, os.Getpid(), rand.Text()[:8]) // random, since two containers may agree in all other fields
}

// drainable returns an error that names all nodes that can't be drained.
func (r *Restarts) drainable(ctx context.Context, kube *clusterapi.Client) error {
	var problems []error
	how := ""
	for _, name := range r.Nodes {
		err := kube.Undrainable(ctx, name, r.Drain)
		if err == nil {
			continue
		}
		problems = append(problems, fmt.Errorf("%s can't be drained: %w", name, err))
		if _, is := errors.AsType[*clusterapi.BudgetError](err); is {
			how = lifecycle.BudgetRemedy
		}
	}
	if len(problems) == 0 {
		return nil
	}
	if how == "" {
		how = "--force also drains pods without a controller, --delete-emptydir-data pods with emptyDir volumes. What the error names is lost."
	}
	return problem.WithRemedy(errors.Join(problems...), "Nothing was changed. "+how)
}

// MayRestart returns an error if a node is a control plane and another one is unhealthy, or if it is the only one. Without a majority of etcd's
// members no machine gets the key of its disk, not even the restarted one.
func MayRestart(ctx context.Context, d *ownerdir.Dir, name string) error {
	kube, err := access.Connect(d)
	if err != nil {
		return err
	}
	p, err := kube.Presence(ctx, name)
	if err != nil || !p.ControlPlane {
		return err
	}
	return othersWell(ctx, kube, name, true)
}

// mayBegin is [MayRestart] for one node of several. It also returns an error for a worker if a control plane or Muster's services are unhealthy.
// Otherwise each repeated run would restart one more node, and then fail in the wait for them.
func mayBegin(ctx context.Context, kube *clusterapi.Client, name string) error {
	p, err := kube.Presence(ctx, name)
	if err != nil {
		return err
	}
	if err := othersWell(ctx, kube, name, p.ControlPlane); err != nil {
		return err
	}
	problems, err := kube.ServicesElsewhere(ctx, name)
	if err == nil && len(problems) > 0 {
		return problem.WithRemedy(fmt.Errorf("services of Muster are not healthy: %s", strings.Join(problems, "; ")), repairFirst)
	}
	return err
}

const repairFirst = "Wait until they are healthy, or repair them (muster status, muster doctor). Remove a control plane that will not return: muster forget NAME. With --unchecked the node is restarted anyway."

// othersWell returns an error if other control planes than this node are unhealthy.
func othersWell(ctx context.Context, kube *clusterapi.Client, name string, controlPlane bool) error {
	others, problems, err := kube.OtherControlPlanes(ctx, name)
	switch {
	case err != nil:
		return err
	case controlPlane && others == 0:
		return problem.WithRemedy(fmt.Errorf("%s is the only control plane", name), "While it restarts there is no API server, and if its disk is encrypted, it waits until you run muster recover. With --unchecked it is restarted.")
	case len(problems) > 0 && controlPlane:
		return problem.WithRemedy(fmt.Errorf("other control planes are not healthy: %s", strings.Join(problems, "; ")), "Wait until they are healthy, or repair them: if "+name+" restarts now, etcd may lose its majority, and encrypted control planes wait for muster recover. With --unchecked it is restarted.")
	case len(problems) > 0:
		return problem.WithRemedy(fmt.Errorf("control planes are not healthy: %s", strings.Join(problems, "; ")), repairFirst)
	}
	return nil
}

// one restarts a node, or with held, completes the restart of an interrupted run. restarted reports that its machine has executed the order.
func (r *Restarts) one(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, name string, held bool) (restarted bool, err error) {
	report := func(s string) { r.Report(name, s) }
	boot, err := kube.Boot(ctx, name)
	if err != nil {
		return false, err
	}
	not := boot.ID
	u := outage{drain: r.Drain, drainFor: r.DrainFor, wait: lifecycle.OrderTimeout, action: ownerorder.ActionReboot, done: "restarted"}
	if held {
		u.action, u.undrained, u.returns, not = "", true, true, boot.In
	} else {
		n, err := kube.Enrollment(ctx, name)
		if err != nil {
			return false, err
		}
		public, err := d.OwnerKeys()
		if err != nil {
			return false, err
		}
		now, err := kube.ServerTime(ctx)
		if err != nil {
			return false, err
		}
		if s, o := orders.ActiveOrder(d, public, n, now); s != nil && o.Action == u.action && boot.In != "" {
			// An earlier run has ordered this, and the machine may have restarted since: compare with the boot ID from before that order.
			u.joins, not = s, boot.In
			u.undrained, u.returns = boot.Restarted() || !boot.Ready, true
		} else if why := unordered(n, now); why != "" {
			return false, problem.WithRemedy(fmt.Errorf("its machine gets no orders: %s", why), "Nothing was changed on it. muster doctor and its console show what is wrong. Leave it out, or remove it if it will not return: muster forget "+name+".")
		}
	}
	u.ready = func(ctx context.Context) error { return kube.AwaitReady(ctx, name, not) }
	if !r.Unchecked {
		if !u.undrained { // the drain can take long
			u.may = func() error { return mayBegin(ctx, kube, name) }
		}
		u.others = func(ctx context.Context, report func(string)) error {
			if err := kube.ServicesReady(ctx, report); err != nil {
				return err
			}
			return kube.ControlPlanesReady(ctx, report)
		}
	}
	err = u.of(ctx, d, kube, name, report)
	return u.executed, err
}

// outage is an order with a drain before it. After it, the node must be Ready before it is made schedulable again.
type outage struct {
	drain    clusterapi.DrainOptions
	drainFor time.Duration
	// undrained: do not drain. returns: an interrupted run has already cordoned the node.
	undrained, returns bool

	action ownerorder.Action // empty if it was executed already
	args   map[string]string
	// joins: wait for this existing order instead of signing one.
	joins *ownerorder.SignedMachineOrder
	// wait bounds the order, and then again the time until ready returns nil.
	wait  time.Duration
	ready func(context.Context) error
	// may (optional) returns an error if the order must not be sent now.
	may func() error
	// others (optional) waits until the rest of the cluster is healthy.
	others func(context.Context, func(string)) error
	// done is what the order has done to the node, as in "restarted".
	done string

	executed bool // set by of: the machine has executed the order
}

// of executes an outage of a node.
func (u *outage) of(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, name string, report func(string)) error {
	cordoned := u.returns
	if !u.undrained {
		u.drain.Returns = true
		drain, cancel := context.WithTimeout(ctx, u.drainFor)
		defer cancel()
		var err error
		if cordoned, err = lifecycle.Drain(drain, d, name, u.drain, report); err != nil {
			return err
		}
	}
	if u.may != nil {
		if err := u.may(); err != nil {
			return problem.WithRemedy(err, problem.Remedy(err)+" "+name+" is drained and stays unschedulable until kubectl uncordon "+name+", or until you run the same command again.")
		}
	}
	if u.action != "" {
		output, err := u.order(ctx, d, kube, name, report)
		if err != nil {
			return err
		}
		report(strings.TrimSpace(u.done + " " + output))
	}
	u.executed = true
	waiting, cancel := context.WithTimeout(ctx, u.wait)
	defer cancel()
	if err := u.ready(waiting); err != nil {
		return problem.WithRemedy(fmt.Errorf("it has %s but is not Ready: %w", u.done, err), "muster doctor --node "+name+" shows what is wrong. It takes no pods until kubectl uncordon "+name+".")
	}
	if cordoned { // before the wait for others: this node is healthy
		if err := kube.Uncordon(ctx, name); err != nil {
			return problem.WithRemedy(err, "It has "+u.done+", and takes no pods until kubectl uncordon "+name+".")
		}
	}
	report("Ready")
	if u.others == nil {
		return nil
	}
	last := ""
	if err := u.others(waiting, func(s string) {
		if s != last {
			last = s
			report("waits: " + s)
		}
	}); err != nil {
		return problem.WithRemedy(fmt.Errorf("it has %s and is Ready, but the cluster is not healthy: %w", u.done, err), "muster status and muster doctor show what is wrong. Repair that, or remove a control plane that will not return: muster forget NAME.")
	}
	return nil
}

// order signs the order and waits for its end, or waits for the order that the machine already has.
func (u *outage) order(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, name string, report func(string)) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, u.wait)
	defer cancel()
	if u.joins == nil {
		r, err := orders.Execute(ctx, d, name, u.action, u.args, report)
		if err != nil {
			return "", err
		}
		return r.Output, nil
	}
	r, err := orders.Wait(ctx, kube, name, orders.Request{Action: u.action}, *u.joins, report)
	if err != nil {
		return "", err
	}
	return r.Output, nil
}
