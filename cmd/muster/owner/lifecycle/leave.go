package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
)

// Removal is the plan to take a node's name from its machine. It is shown before it is executed.
type Removal struct {
	// Plan has the steps in their order, one line each.
	Plan []string
	// Warnings are shown to the owner before the steps.
	Warnings []string
	// Nothing is true if there is no step.
	Nothing bool

	dir     *ownerdir.Dir
	kube    *clusterapi.Client
	found   *clusterapi.Presence
	listed  policies.Listing        // the change of the owner's policy
	to      *clusterapi.Replacement // nil: forget
	resets  bool                    // the same machine with a cleared TPM: only the reset counter changes
	erase   string                  // the disk whose salt is deleted (K4); empty if none
	deleted string                  // the warning that its pods are deleted
	member  string                  // the control plane that is ordered to remove its etcd member; empty if there is nothing to remove
}

// Removed is the result.
type Removed struct {
	Name      string `json:"name"`
	MachineID string `json:"machineID,omitempty"`
	// Done are the finished steps, in their order.
	Done []string `json:"done"`
	// CertificatesEnd is when the last certificate that the machine may hold has expired.
	CertificatesEnd *time.Time `json:"certificatesEnd,omitempty"`
	// Erased is the disk whose key cannot be derived any more, and Left are the files and places that may still have
	// its salt.
	Erased string   `json:"erased,omitempty"`
	Left   []string `json:"left,omitempty"`
}

// PlanForget plans to forget a node, and changes nothing. A control plane's etcd member has to be removed before, by
// [Removal.RemoveMember]; memberGone is the owner's statement that this was done. With erase, the salt of its disk is deleted
// (K4).
func PlanForget(ctx context.Context, d *ownerdir.Dir, name string, memberGone, erase bool) (*Removal, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	p, err := kube.Presence(ctx, name)
	if err != nil {
		return nil, err
	}
	_, recorded := d.Cluster().ControlPlanes[name]
	out := &Removal{dir: d, kube: kube, found: p, Nothing: p.Nothing() && !recorded}
	if out.listed, err = policies.LeaveListing(d, name, p.Enrollment, nil); err != nil {
		return nil, err
	}
	if erase {
		if out.erase, err = diskToErase(ctx, d, kube, p); err != nil {
			return nil, err
		}
	}
	if out.Nothing {
		if out.erase != "" {
			out.planErase()
			return out, nil
		}
		return out, wasForgotten(ctx, d, kube, p)
	}
	if (p.ControlPlane || recorded) && p.Joined() {
		if len(p.OtherControlPlanes) == 0 {
			return nil, problem.WithRemedy(fmt.Errorf("%s is the only control plane: without it there is no cluster", name), "Add another control plane first.")
		}
		if !memberGone {
			if out.member, err = remover(ctx, kube, p); err != nil {
				return nil, err
			}
			if out.member == "" {
				return nil, problem.WithRemedy(fmt.Errorf("%s is a control plane, and its etcd member would stay and count for the quorum: no other control plane is ready and accepts orders", name), removeMember(name, p.OtherControlPlanes[0]))
			}
			out.Plan = append(out.Plan, fmt.Sprintf("have %s remove its etcd member, by a signed order: up to five minutes", out.member))
		}
	}
	if recorded && p.Nothing() {
		out.Warnings = append(out.Warnings, "the cluster has no node of this name, but your folder records it as a control plane: check whether etcd still has its member (docs/control-planes.md)")
	}
	if err := out.planListing(ctx); err != nil {
		return nil, err
	}
	out.shutOut()
	if p.Node != nil {
		out.Plan = append(out.Plan, "delete its Node, and the pods that are bound to it: their tokens end")
		if p.Ready() {
			out.Warnings = append(out.Warnings, "its Node is Ready: the machine runs, and keeps running its pods until it is powered off")
			if p.Enrollment != nil && p.Enrollment.Spec.DiskMode == v1alpha1.DiskModeLUKS && !erase {
				out.Warnings = append(out.Warnings, "to have the machine join anew, without a login there: muster reset "+name)
			}
		}
		if n := len(p.Pods); n > 0 {
			out.deleted = fmt.Sprintf("it has %s that a drain would move (%s): deleted at once, unless --drain evicts them first", problem.Count(n, "pod"), problem.Some(p.Pods))
			out.Warnings = append(out.Warnings, out.deleted)
		}
	}
	if p.Enrollment != nil {
		out.Plan = append(out.Plan, "delete its enrollment: name and machine can be enrolled again, also together if the policy accepts the machine")
		if disk := p.Enrollment.Spec.DiskID; disk != "" && !erase {
			out.Plan = append(out.Plan, fmt.Sprintf("disk %s stays its machine's, with its key, until `muster forget --erase --disk %s`", disk, disk))
		}
		if p.Enrollment.Spec.Banned {
			out.Warnings = append(out.Warnings, "it is banned, and the ban ends with the enrollment. To keep the machine out, leave it banned, or first add its ID to tpm2.revoked.keys of the policy and run muster policy apply")
		}
	}
	if out.erase != "" {
		out.planErase()
	}
	out.certificates()
	return out, nil
}

// Drains adds a drain of the node as the plan's first step.
func (d *Removal) Drains() {
	if d.Nothing {
		return
	}
	d.Plan = slices.Insert(d.Plan, 0, fmt.Sprintf("drain it: no new pods, and %s evicted within their PodDisruptionBudgets", problem.Count(len(d.found.Pods), "pod")))
	d.Warnings = slices.DeleteFunc(d.Warnings, func(s string) bool { return s == d.deleted })
}

// wasForgotten returns NOT_ENROLLED for a name that neither cluster nor folder has ever had, probably a misspelled one.
func wasForgotten(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, p *clusterapi.Presence) error {
	known, err := d.Known()
	if err != nil {
		return err
	}
	if _, recorded := known.Nodes[p.Name]; recorded || p.Listed || slices.ContainsFunc(known.Gone, func(g ownerdir.KnownGone) bool { return g.Name == p.Name }) {
		return nil
	}
	names, err := kube.NodeNames(ctx)
	if err != nil {
		return err
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "there is no node %s, and no node of this name was forgotten", p.Name), "Nothing was changed. The cluster has: "+strings.Join(names[:min(len(names), problem.MaxNamed)], ", ")+".")
}

func removeMember(name, other string) string {
	etcdctl := "kubectl -n kube-system exec etcd-" + other + " -- etcdctl --cacert=/etc/kubernetes/pki/etcd/ca.crt --cert=/etc/kubernetes/pki/etcd/server.crt --key=/etc/kubernetes/pki/etcd/server.key"
	return strings.Join([]string{
		"Remove the member first, then repeat the command with --etcd-member-removed:",
		"  " + etcdctl + " member list",
		"  " + etcdctl + " member remove ID   (the one that is named " + name + ")",
		"  muster forget " + name + " --etcd-member-removed",
		"It had the cluster's keys. If you don't trust it any more: docs/control-planes.md#ban-one.",
	}, "\n")
}

// PlanReplace plans to give a node another machine or disk, and changes nothing. Empty values of to stay unchanged.
func PlanReplace(ctx context.Context, d *ownerdir.Dir, name string, to clusterapi.Replacement) (*Removal, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	p, err := kube.Presence(ctx, name)
	if err != nil {
		return nil, err
	}
	if p.Enrollment == nil {
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "%s is not enrolled", name), "muster status shows which nodes are.")
	}
	if p.Enrollment.Leaving() {
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "the enrollment of %s is being deleted, which can't be undone", name),
			"Wait until joinservice has completed that, or run muster forget "+name+"; then another machine can join with this name.")
	}
	have := p.Enrollment.Spec
	_, recorded := d.Cluster().ControlPlanes[name]
	if (have.Role == v1alpha1.RoleControlPlane || recorded) && to.DiskID != "" && to.DiskID != have.DiskID {
		return nil, problem.WithRemedy(fmt.Errorf("%s is a control plane, and its etcd member was on the disk", name),
			"Forget it, and let it join as new: muster forget "+name+", then muster enroll "+name+" --role control-plane --machine-id ID.")
	}
	if err := kube.FreeFor(ctx, p, to); err != nil {
		return nil, err
	}
	out := &Removal{dir: d, kube: kube, found: p, to: &to}
	if out.listed, err = policies.LeaveListing(d, name, p.Enrollment, &to); err != nil {
		return nil, err
	}
	sameMachine := to.MachineID == "" || to.MachineID == have.MachineID
	sameDisk := to.DiskID == "" || to.DiskID == have.DiskID
	if sameMachine && sameDisk && have.Banned && p.Enrollment.Annotations[v1alpha1.KeepNode] == "" { // otherwise an earlier replace is unfinished
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "%s is banned, and already has this machine and disk", name),
			fmt.Sprintf("If you trust the machine again, lift the ban: muster unban %s. If its TPM was cleared, or two machines have presented it, switch off the copy, and run this command after that.", name))
	}
	if sameMachine && sameDisk && !have.Banned {
		if out.resets = to.MachineID != "" && clusterapi.HasBoots(&p.Enrollment.Status); out.resets {
			out.Plan = append(out.Plan, "accept its TPM's reset counter from the start, as after the TPM was cleared; machine, disk, certificates and Node stay unchanged")
			if c := meta.FindStatusCondition(p.Enrollment.Status.Conditions, v1alpha1.ConditionCloned); c != nil {
				out.Warnings = append(out.Warnings, "two machines have presented this TPM, and the next one that attests is accepted: switch off the copy first. "+problem.Printable(c.Message))
			}
		}
		out.Nothing = !out.resets
		return out, nil
	}
	var seen bool
	if !sameDisk {
		if seen, err = seenDisk(ctx, kube, p, to, sameMachine); err != nil {
			return nil, err
		}
	}
	if err := out.planListing(ctx); err != nil {
		return nil, err
	}
	out.shutOut()
	if !sameMachine {
		out.Plan = append(out.Plan, fmt.Sprintf("enroll machine %s with this name", to.MachineID))
	}
	if !sameDisk {
		out.Plan = append(out.Plan, fmt.Sprintf("enroll disk %s with it; the previous disk stays encrypted, and stays assigned to its machine", to.DiskID))
		if have.DiskID != "" {
			out.Warnings = append(out.Warnings, fmt.Sprintf("the key of the previous disk, %s, can be derived until you run `muster forget --erase --disk %s`", have.DiskID, have.DiskID))
		}
	} else if have.DiskID != "" {
		out.Plan = append(out.Plan, fmt.Sprintf("keep disk %s, and so its key", have.DiskID))
	}
	if seen && sameMachine {
		out.Warnings = append(out.Warnings, fmt.Sprintf("if the machine already was this node with disk %s, it does not join as new, and its certificates are revoked: the node is not Ready until the machine gets new ones, within a day (docs/leaving.md#replace)", to.DiskID))
	}
	out.Plan = append(out.Plan, "delete the pods that are bound to it: their tokens end")
	if p.Node != nil {
		out.Plan = append(out.Plan, "keep its Node, with labels and taints, for the next machine that joins with this name")
	}
	out.Plan = append(out.Plan, fmt.Sprintf("lift the ban: machine %s may join with this name from then on", cmp.Or(to.MachineID, have.MachineID)))
	if have.Banned {
		out.Warnings = append(out.Warnings, "it is banned, by you or by an earlier unfinished run; this command lifts the ban")
	}
	if p.Ready() {
		out.Warnings = append(out.Warnings, "its Node is Ready: the machine runs, and keeps running its pods until it is powered off")
	}
	out.certificates()
	return out, nil
}

// seenDisk reports whether the cluster has a record of the node's new disk. For a running machine it refuses a disk without a record: the machine
// still has its old disk, so the UUID is mistyped and the node would be shut out. It allows an interrupted replace to continue.
func seenDisk(ctx context.Context, kube *clusterapi.Client, p *clusterapi.Presence, to clusterapi.Replacement, sameMachine bool) (bool, error) {
	d, err := kube.Disk(ctx, to.DiskID)
	if err != nil || d != nil {
		return d != nil, err
	}
	if sameMachine && p.Ready() && !p.Enrollment.Spec.Banned {
		return false, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "%s is Ready, so its machine runs with the disk %s, and the cluster has no record of a disk %s", p.Name, cmp.Or(p.Enrollment.Spec.DiskID, "that it has"), to.DiskID),
			"Nothing was changed. If the disk was exchanged, start the machine with it. When the Node is NotReady, run this command again with the UUID on the machine's console. To let the machine of a running node join as new: muster reset "+p.Name+".")
	}
	return false, nil
}

// planListing plans the change of the owner's policy.
func (d *Removal) planListing(ctx context.Context) error {
	if len(d.listed.Add)+len(d.listed.Remove) == 0 {
		return nil
	}
	line, err := d.listed.Plan(ctx, d.dir, d.kube)
	if line != "" {
		d.Plan = append(d.Plan, line)
	}
	return err
}

func (d *Removal) shutOut() {
	if n := d.found.Enrollment; n != nil {
		what := "ban machine"
		if n.Spec.Banned {
			what = "keep the ban of machine"
		}
		d.Plan = append(d.Plan, fmt.Sprintf("%s %s: no ticket, no disk key, no renewed certificate", what, n.Spec.MachineID))
	}
	d.Plan = append(d.Plan, "refuse its writes at once, and revoke every certificate that was issued for the name until now")
	if n := len(d.found.Requests); n > 0 {
		d.Plan = append(d.Plan, fmt.Sprintf("delete its %d certificate requests", n))
	}
}

func (d *Removal) certificates() {
	d.Warnings = append(d.Warnings, fmt.Sprintf("reads are not revoked: until its certificates have expired, at the latest in %s, a holder of the old machine's key can read what every node may read, "+
		"and the Secrets of pods that run on this node name from now on. If you don't trust the machine, wait that long before the node gets pods again", nodeaccess.CertificateLife))
}

// Do executes the plan, and reports each step to report. After an interruption, the same command completes it.
func (d *Removal) Do(ctx context.Context, report func(string)) (*Removed, error) {
	out := &Removed{Name: d.found.Name, Done: []string{}}
	if d.found.Enrollment != nil {
		out.MachineID = d.found.Enrollment.Spec.MachineID
	}
	if d.Nothing && d.erase == "" {
		return out, nil
	}
	note := func(s string) {
		out.Done = append(out.Done, s)
		report(s)
	}
	if d.Nothing {
		return out, d.doErase(ctx, out, note)
	}
	if d.resets {
		return out, d.kube.ForgetResets(ctx, d.found, note)
	}
	// The policy comes first: from then on no machine trusts the old one. The enrollment names the old machine until
	// the end, so that the same command can resume.
	if err := d.listed.Apply(ctx, d.dir, d.kube, note); err != nil {
		return nil, err
	}
	for _, c := range d.listed.Add {
		if err := d.dir.RecordControlPlane(d.found.Name, &c.Machine); err != nil { // A7: before the enrollment changes
			return nil, err
		}
	}
	var end time.Time
	var err error
	if d.to == nil && d.erase != "" && d.found.Enrollment != nil {
		// Before the enrollment is deleted. After that, the name is free, and a repeated command could affect another machine.
		if err := d.kube.BanPlanned(ctx, d.found); err != nil && !clusterapi.Absent(err) {
			return nil, problem.WithRemedy(err, "The salt of disk "+d.erase+" was not deleted. Run the same command again, and read its plan.")
		}
		if err := d.doErase(ctx, out, note); err != nil {
			return nil, err
		}
		d.erase = ""
	}
	if d.to == nil {
		if end, err = d.kube.Forget(ctx, d.found, time.Now(), note); err == nil {
			err = d.dir.RecordControlPlane(d.found.Name, nil) // last, because a repeated command needs the machine's ID
		}
	} else {
		end, err = d.kube.Replace(ctx, d.found, *d.to, time.Now(), note)
		if d.to.MachineID != "" {
			out.MachineID = d.to.MachineID
		}
	}
	if errors.Is(err, clusterapi.ErrOtherDisk) {
		return nil, problem.WithRemedy(err, "The enrollment was not changed. Run the same command again, and read its plan.")
	}
	if errors.Is(err, clusterapi.ErrUnbanned) {
		return nil, problem.WithRemedy(err, "The machine is not shut out. Find out who lifted the ban (audit log: writes of the AttestedNode). Then run the same command again, and read its plan.")
	}
	if err != nil {
		return nil, problem.WithRemedy(err, "The machine is shut out. Run the same command again to continue where it stopped.")
	}
	out.CertificatesEnd = &end
	if d.erase != "" {
		err = d.doErase(ctx, out, note)
	}
	return out, err
}
