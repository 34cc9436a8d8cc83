// Package lifecycle changes one node (drain, ban, reset, forget, replace, erase), and verifies a node by an order.
package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
)

// OrderTimeout is how long a machine has for an order: the order's validity, plus the time for the action.
const OrderTimeout = orders.Validity + 10*time.Minute

// enrolled returns the state of a name if it has an enrollment that is not being deleted.
func enrolled(ctx context.Context, kube *clusterapi.Client, name string) (*clusterapi.Presence, error) {
	p, err := kube.Presence(ctx, name)
	switch {
	case err != nil:
		return nil, err
	case p.Enrollment == nil:
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "%s is not enrolled", name), "muster status shows which nodes are.")
	case p.Enrollment.Leaving():
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "the enrollment of %s is being deleted, which can't be undone", name), "The machine is shut out. muster forget "+name+" completes it.")
	}
	return p, nil
}

// MayBan returns why a node's machine can't be banned, or nil.
func MayBan(ctx context.Context, d *ownerdir.Dir, name string) error {
	_, _, err := mayBan(ctx, d, name)
	return err
}

func mayBan(ctx context.Context, d *ownerdir.Dir, name string) (*clusterapi.Client, *clusterapi.Presence, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, nil, err
	}
	p, err := enrolled(ctx, kube, name)
	if err != nil {
		return nil, nil, err
	}
	if p.ControlPlane && len(p.OtherControlPlanes) == 0 {
		return nil, nil, problem.WithRemedy(fmt.Errorf("%s is the only control plane: without it there is no cluster, and none could be added", name), "Nothing was changed. Add another control plane first. If you don't trust the machine, power it off, and restore the cluster on another one (docs/backup.md#restore).")
	}
	return kube, p, nil
}

// Ban bans a node's machine, and waits until its Node and its pods are deleted. A repeated call continues waiting. Ban calls banned as soon as the
// ban is in force, also if the wait fails.
func Ban(ctx context.Context, d *ownerdir.Dir, name string, report func(string), banned func()) error {
	kube, p, err := mayBan(ctx, d, name)
	if err != nil {
		return err
	}
	if err := kube.SetBanned(ctx, p, true); err != nil {
		return err
	}
	report("banned: its machine gets no ticket, no disk key and no certificate, and its writes are refused")
	banned()
	if err := kube.AwaitEviction(ctx, name); err != nil {
		return problem.WithRemedy(fmt.Errorf("%s is banned, but the end of its Node and its pods was not seen: %w", name, err), "joinservice deletes them: muster status shows whether one runs. An event of the AttestedNode names what keeps a pod: kubectl -n default get events --field-selector involvedObject.name="+name+".")
	}
	report("Node and pods deleted")
	return nil
}

// Unban lifts the ban of a node's machine.
func Unban(ctx context.Context, d *ownerdir.Dir, name string) error {
	kube, err := access.Connect(d)
	if err != nil {
		return err
	}
	p, err := enrolled(ctx, kube, name)
	if err != nil {
		return err
	}
	if p.Enrollment.Annotations[v1alpha1.KeepNode] != "" {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "muster replace %s was interrupted, and lifting the ban would admit the old machine", name), "Run muster replace "+name+" with the same flags again: it lifts the ban when it completes. If you don't trust the machine any more: muster ban "+name+" cancels the replacement.")
	}
	if p.Revoked && enrollment.Certified(p.Enrollment) {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "the certificates of %s are revoked, and its machine has no newer ones: muster forget or replace was interrupted", name),
			"Also without the ban, all its writes would be refused. Run muster forget "+name+": it completes the removal. Then the name is free, also for this machine.")
	}
	if disk := p.Enrollment.Spec.DiskID; disk != "" {
		have, err := kube.Disk(ctx, disk)
		if err != nil {
			return err
		}
		if have != nil && have.Spec.Erased {
			return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "the disk %s of %s was erased: muster forget or reset was interrupted", disk, name), "Run muster forget "+name+": it completes the removal. Then the name is free.")
		}
	}
	err = kube.SetBanned(ctx, p, false)
	if errors.Is(err, clusterapi.ErrOwnBan) {
		err = problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "%s: %w", name, clusterapi.ErrOwnBan),
			"To complete the removal: muster forget "+name+", with --erase if the disk was to be erased. To keep the machine: muster ban "+name+" cancels the removal; then run muster unban "+name+" again.")
	}
	return err
}

// BudgetRemedy is the remedy if a PodDisruptionBudget prevents an eviction.
const BudgetRemedy = "Ask the owner of the pods to change the budget (kubectl -n NAMESPACE edit poddisruptionbudget NAME: maxUnavailable above 0, or minAvailable below the number of pods), add replicas, or delete the pod that is named; then run the same command again."

// Drain evicts a node's pods; see [clusterapi.Client.Drain]. cordoned reports that the node was schedulable before.
func Drain(ctx context.Context, d *ownerdir.Dir, name string, o clusterapi.DrainOptions, report func(string)) (cordoned bool, err error) {
	kube, err := access.Connect(d)
	if err != nil {
		return false, err
	}
	cordoned, err = kube.Drain(ctx, name, o, report)
	budget, is := errors.AsType[*clusterapi.BudgetError](err)
	switch {
	case attest.ReasonOf(err) == attestv1.Reason_REASON_NOT_ENROLLED:
		err = problem.WithRemedy(err, "Nothing was changed. muster status shows which nodes there are.")
	case is && budget.Never:
		err = problem.WithRemedy(err, "Nothing was changed. "+BudgetRemedy)
	case is:
		err = problem.WithRemedy(err, "The node takes no new pods until kubectl uncordon "+name+". Wait until the pods are Ready elsewhere (kubectl get poddisruptionbudgets -A shows ALLOWED DISRUPTIONS), and run the same command again. If they don't become Ready: "+BudgetRemedy)
	case err != nil:
		err = problem.WithRemedy(err, "The node may be unschedulable (kubectl get node "+name+"): until kubectl uncordon "+name+", it then takes no new pods. Pods without a controller need --force, pods with emptyDir volumes --delete-emptydir-data: what the error names is lost. A PodDisruptionBudget has to allow each eviction.")
	}
	return cordoned, err
}

// Uncordon makes a node schedulable again.
func Uncordon(ctx context.Context, d *ownerdir.Dir, name string) error {
	kube, err := access.Connect(d)
	if err != nil {
		return err
	}
	return kube.Uncordon(ctx, name)
}

// RemoveMember orders another control plane to remove a node's etcd member.
func (d *Removal) RemoveMember(ctx context.Context, report func(string)) error {
	if d.member == "" {
		return nil
	}
	r, err := orders.Execute(ctx, d.dir, d.member, ownerorder.ActionRemoveEtcdMember, map[string]string{ownerorder.ArgMember: d.found.Name}, func(s string) { report(d.member + ": " + s) })
	if err != nil {
		return problem.WithRemedy(fmt.Errorf("the etcd member of %s was not removed: %w", d.found.Name, err), problem.Remedy(err)+"\n"+removeMember(d.found.Name, d.member))
	}
	report("etcd: " + r.Output)
	d.member = ""
	return nil
}

// remover returns a control plane that can remove another one's etcd member; "" if there is none.
func remover(ctx context.Context, kube *clusterapi.Client, p *clusterapi.Presence) (string, error) {
	for _, name := range slices.Sorted(slices.Values(p.OtherControlPlanes)) {
		o, err := kube.Presence(ctx, name)
		if err != nil {
			return "", err
		}
		if o.Ready() && o.Enrollment != nil && o.Enrollment.Spec.Role == v1alpha1.RoleControlPlane && !o.Enrollment.ShutOut() && o.Enrollment.Spec.DiskID != "" {
			return name, nil
		}
	}
	return "", nil
}

// Reset is the plan to erase a machine's disk, so that it joins as new.
type Reset struct {
	*Removal
	begun bool // by an earlier run
}

// PlanReset plans the reset of a node's machine, and changes nothing.
func PlanReset(ctx context.Context, d *ownerdir.Dir, name string) (*Reset, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	p, err := enrolled(ctx, kube, name)
	if err != nil {
		return nil, err
	}
	if p.Enrollment.Spec.DiskMode == v1alpha1.DiskModePlain {
		return nil, problem.WithRemedy(fmt.Errorf("the state disk of %s is not encrypted, so its machine can't erase it", name), "Power the machine off, erase its disk from a rescue system, and run muster forget "+name+".")
	}
	out := &Reset{begun: resetBegun(d, p.Enrollment, time.Now())}
	if !out.begun {
		if err := mayOrderReset(d, p.Enrollment); err != nil {
			return nil, err
		}
		if p.Enrollment.Spec.DiskMode == "" { // the first machine, before it first requests its disk's key
			return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "it is not recorded whether the state disk of %s is encrypted; its machine can erase only an encrypted disk", name),
				"If stateDisk.mode of its image is luks, muster reboot "+name+" first: it is recorded when the machine requests its disk's key. Otherwise power the machine off, erase its disk from a rescue system, and run muster forget "+name+".")
		}
	}
	if out.Removal, err = PlanForget(ctx, d, name, false, true); err != nil {
		return nil, err
	}
	if _, err := out.confirmed(p.Enrollment); err != nil {
		return nil, err
	}
	if !out.begun {
		if out.member != "" {
			out.Plan = slices.Insert(out.Plan, 0, "check with a signed order that its machine accepts orders: up to five minutes")
		}
		out.Plan = slices.Insert(out.Plan, 0, fmt.Sprintf("order its machine to erase its state disk %s and restart: up to five minutes", p.Enrollment.Spec.DiskID))
	}
	return out, nil
}

// mayOrderReset returns an error if a node is banned or has another unfinished order, because the reset could not be completed.
func mayOrderReset(d *ownerdir.Dir, n *v1alpha1.AttestedNode) error {
	public, err := d.OwnerKeys()
	if err != nil {
		return err
	}
	before, err := orders.PendingOrder(d, public, n, time.Now())
	if attest.ReasonOf(err) == attestv1.Reason_REASON_BANNED {
		return problem.WithRemedy(err, "If you trust the machine, lift the ban first: muster unban "+n.Name+" (after an interrupted reset, first muster ban "+n.Name+"). Otherwise power it off, erase its disk, and run muster forget "+n.Name+" --erase.")
	}
	if err != nil || before == nil {
		return err
	}
	o, err := ownerorder.ParseMachineOrder(before.Text)
	if err == nil && o.Action != ownerorder.ActionReset {
		return orders.UnfinishedError(n.Name, o)
	}
	return err
}

// RemoveMember is [Removal.RemoveMember] after the machine has executed a test order. Otherwise the cluster could lose a
// control plane whose machine then does not execute the reset.
func (r *Reset) RemoveMember(ctx context.Context, report func(string)) error {
	if r.member == "" || r.begun {
		return r.Removal.RemoveMember(ctx, report)
	}
	if _, err := orders.Execute(ctx, r.dir, r.found.Name, ownerorder.ActionDoctor, nil, report); err != nil {
		return problem.WithRemedy(fmt.Errorf("%s did not execute a test order, so nothing was changed: %w", r.found.Name, err), problem.Remedy(err))
	}
	return r.Removal.RemoveMember(ctx, report)
}

// resetBegun reports whether the machine reports our reset order as running, because an earlier run was interrupted.
func resetBegun(d *ownerdir.Dir, n *v1alpha1.AttestedNode, now time.Time) bool {
	public, err := d.OwnerKeys()
	if err != nil {
		return false
	}
	_, o := orders.RunningOrder(d, public, n, now)
	return o.Action == ownerorder.ActionReset
}

// confirmed returns an error unless the enrollment still has the machine and the disk that the owner has confirmed: no order is signed for others. A
// reset order has no arguments.
func (r *Reset) confirmed(n *v1alpha1.AttestedNode) (map[string]string, error) {
	if f := r.found.Enrollment; f == nil || n.UID != f.UID || n.Spec.MachineID != f.Spec.MachineID || n.Spec.DiskID != f.Spec.DiskID {
		return nil, problem.WithRemedy(fmt.Errorf("the enrollment of %s has changed meanwhile, to machine %s with disk %s", r.found.Name, n.Spec.MachineID, cmp.Or(n.Spec.DiskID, "none")), "No order was signed. If you did not change the enrollment, find out who did. Then run the same command again and read its plan.")
	}
	return nil, nil //nolint:nilnil // an order without arguments
}

// Order signs the order, and returns when the machine reports its start.
func (r *Reset) Order(ctx context.Context, report func(string)) error {
	if r.begun {
		return nil
	}
	if _, _, err := orders.Send(ctx, r.dir, r.found.Name, orders.Request{Action: ownerorder.ActionReset, Args: r.confirmed, UntilStarted: true}, report); err != nil {
		return problem.WithRemedy(err, problem.Remedy(err)+" If the machine has restarted already, muster forget "+r.found.Name+" --erase completes it.")
	}
	return nil
}
