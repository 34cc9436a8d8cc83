package policies

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// ControlPlanesOf returns the control planes that the policy of an owner's folder lists, with the names that the folder records; none if the policy
// is not valid.
func ControlPlanesOf(d *ownerdir.Dir) ([]policyfile.ControlPlane, error) {
	text, err := d.Read(ownerdir.PolicyFile)
	if err != nil {
		return nil, err
	}
	p, _, err := policyfile.Parse(text)
	if err != nil {
		return nil, nil //nolint:nilerr // it is about to be replaced
	}
	var out []policyfile.ControlPlane
	for _, id := range p.ControlPlanes() {
		out = append(out, policyfile.ControlPlane{Machine: id, Name: d.Cluster().ControlPlane(id)})
	}
	return out, nil
}

// Listing is a change of the control planes that the owner's policy lists (A7).
type Listing struct {
	Add    []policyfile.ControlPlane
	Remove []attest.MachineID
}

// done reports whether p already has the change.
func (l Listing) done(p *attest.Policy) bool {
	for _, c := range l.Add {
		if p.MayServe(c.Machine) != nil {
			return false
		}
	}
	for _, m := range l.Remove {
		if p.MayServe(m) == nil {
			return false
		}
	}
	return true
}

// Plan describes what [Listing.Apply] would do, and returns the same errors; empty if there is nothing to do.
func (l Listing) Plan(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client) (string, error) {
	if due, err := l.change().due(ctx, d, kube); err != nil || due == nil {
		return "", err
	}
	var parts []string
	for _, c := range l.Add {
		parts = append(parts, "lists machine "+c.Machine.String())
	}
	for _, m := range l.Remove {
		parts = append(parts, "does not list machine "+m.String())
	}
	return "sign a policy with the next serial that " + strings.Join(parts, " and ") + " as a control plane: machines trust joinservice and kms only on listed control planes", nil
}

// Apply lists and removes control planes; see [policyChange.apply].
func (l Listing) Apply(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, report func(string)) error {
	if len(l.Add)+len(l.Remove) == 0 {
		return nil
	}
	return l.change().apply(ctx, d, kube, report)
}

func (l Listing) change() policyChange {
	return policyChange{
		done: func(_ []byte, p *attest.Policy) (bool, error) { return l.done(p), nil },
		edit: func(text []byte, serial uint64) ([]byte, error) {
			return policyfile.ListControlPlanes(text, serial, l.Add, l.Remove)
		},
		what: func(p *attest.Policy) string {
			return fmt.Sprintf("it lists %d control planes", len(p.ControlPlanes()))
		},
	}
}

// missingFrom returns the enrolled control planes that are not banned and that p does not list.
func missingFrom(ctx context.Context, kube *clusterapi.Client, p *attest.Policy) ([]policyfile.ControlPlane, error) {
	var nodes v1alpha1.AttestedNodeList
	if err := kube.Reader().List(ctx, &nodes); err != nil {
		return nil, err
	}
	var out []policyfile.ControlPlane
	for _, n := range nodes.Items {
		if n.Spec.Role != v1alpha1.RoleControlPlane || n.Spec.Banned {
			continue
		}
		id, err := attest.ParseMachineID(n.Spec.MachineID)
		if err != nil {
			return nil, fmt.Errorf("enrollment of %s: %w", n.Name, err)
		}
		if p.MayServe(id) != nil {
			out = append(out, policyfile.ControlPlane{Machine: id, Name: n.Name})
		}
	}
	return out, nil
}

// MustList refuses a policy that leaves out a control plane of the cluster, with SERVER_NOT_LISTED: no machine would trust its joinservice and kms.
// leaveOut are names that the owner states are not theirs: every writer of enrollments can create one. The remedy shows as lines to add only entries
// that the folder records.
func MustList(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, p *attest.Policy, leaveOut []string) error {
	recorded := d.Cluster().ControlPlanes
	for _, name := range leaveOut {
		if id, ok := recorded[name]; ok {
			return problem.WithRemedy(fmt.Errorf("%s can't be left out: your folder records it as a control plane, with machine %s", name, id), "Nothing was changed. If it is no longer one: muster forget "+name+".")
		}
	}
	missing, err := missingFrom(ctx, kube, p)
	if err != nil {
		return err
	}
	missing = slices.DeleteFunc(missing, func(c policyfile.ControlPlane) bool { return slices.Contains(leaveOut, c.Name) })
	if len(missing) == 0 {
		return nil
	}
	var names, lines []string
	for _, c := range missing {
		names = append(names, c.Name)
		if recorded[c.Name] == c.Machine {
			lines = append(lines, fmt.Sprintf("  - %q # %s", c.Machine.String(), c.Name))
		} else {
			lines = append(lines, fmt.Sprintf("  # not in the folder, only in the cluster: %s is machine %s", c.Name, c.Machine))
		}
	}
	err = attest.Refuse(attestv1.Reason_REASON_SERVER_NOT_LISTED, "the policy does not list the control planes %s", strings.Join(names, ", "))
	return problem.WithRemedy(err, strings.Join(append([]string{
		"Add those that are yours to " + d.File(ownerdir.PolicyFile) + ", increase serial, and run the same command again. If your folder does not record one, compare its ID with the machine's console, because every writer of enrollments could have chosen it. Remove one that is no longer yours with muster forget. Leave out one that never was yours with --leave-out NAME.",
		"controlPlanes:",
	}, lines...), "\n"))
}

// enrollListing returns the change for the enrollment of a machine: it lists a control plane. It refuses an enrollment that
// contradicts the folder's record.
func enrollListing(d *ownerdir.Dir, name string, spec v1alpha1.AttestedNodeSpec) (Listing, error) {
	id, err := attest.ParseMachineID(spec.MachineID)
	if err != nil {
		return Listing{}, err
	}
	if err := freeInFolder(d, name, id); err != nil {
		return Listing{}, err
	}
	had, recorded := d.Cluster().ControlPlanes[name]
	if spec.Role != v1alpha1.RoleControlPlane {
		if recorded {
			return Listing{}, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "your folder records %s as a control plane, with machine %s", name, had), "Nothing was changed. Forget it first: muster forget "+name+".")
		}
		return Listing{}, nil
	}
	if recorded && had != id {
		_, p, _, err := FolderPolicy(d)
		if err != nil {
			return Listing{}, err
		}
		if p.MayServe(had) == nil { // it would stay listed, and no enrollment would have its ID
			return Listing{}, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "your folder records %s as machine %s, and its policy lists that machine as a control plane", name, had),
				fmt.Sprintf("Nothing was changed. If its TPM was exchanged: muster replace %s --tpm %s. Otherwise forget it first: muster forget %s.", name, id, name))
		}
	}
	return Listing{Add: []policyfile.ControlPlane{{Machine: id, Name: name}}}, nil
}

// freeInFolder refuses a machine that the folder records as a control plane with another name.
func freeInFolder(d *ownerdir.Dir, name string, id attest.MachineID) error {
	other := d.Cluster().ControlPlane(id)
	if other == "" || other == name {
		return nil
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "your folder records machine %s as the control plane %s", id, other), "Nothing was changed. Forget it first: muster forget "+other+".")
}

// LeaveListing returns the change when an enrollment is deleted, or gets the machine of to. The folder's record decides which machine is removed, and
// the owner's argument which one is added (A7). Otherwise a writer of enrollments, such as root on a control plane, could remove another control
// plane or list a machine of their own. It refuses an enrollment n that contradicts the record; n is nil if there is none.
func LeaveListing(d *ownerdir.Dir, name string, n *v1alpha1.AttestedNode, to *clusterapi.Replacement) (Listing, error) {
	var next *attest.MachineID
	if to != nil && to.MachineID != "" {
		id, err := attest.ParseMachineID(to.MachineID)
		if err != nil {
			return Listing{}, err
		}
		if err := freeInFolder(d, name, id); err != nil {
			return Listing{}, err
		}
		next = &id
	}
	had, recorded := d.Cluster().ControlPlanes[name]
	if !recorded {
		return Listing{}, notRecorded(d, n, to)
	}
	resumes := next != nil && *next == had // an interrupted run has recorded the new machine, and the enrollment still has the previous one
	if err := sameAsRecorded(n, had, resumes); err != nil {
		return Listing{}, err
	}
	switch {
	case to == nil:
		return Listing{Remove: []attest.MachineID{had}}, nil
	case next == nil:
		return Listing{}, nil // only the disk changes
	}
	l := Listing{Add: []policyfile.ControlPlane{{Machine: *next, Name: name}}}
	if !resumes {
		l.Remove = []attest.MachineID{had}
	}
	return l, nil
}

// sameAsRecorded refuses an enrollment that differs from the control plane in the folder's record. An enrollment that is
// being deleted is not compared.
func sameAsRecorded(n *v1alpha1.AttestedNode, had attest.MachineID, resumes bool) error {
	if n == nil || n.Leaving() {
		return nil
	}
	const first = "Nothing was changed. If another copy of this folder is newer, use that one. Otherwise the enrollment was changed without this folder: find out by whom, and see docs/control-planes.md#an-enrollment-that-is-not-yours. "
	if n.Spec.Role != v1alpha1.RoleControlPlane {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "in the cluster %s is a %s, but your folder records it as a control plane, with machine %s", n.Name, n.Spec.Role, had),
			first+"To continue without that enrollment: kubectl delete attestednode "+n.Name+" --wait=false, then the same command.")
	}
	if n.Spec.MachineID != had.String() && !resumes {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "in the cluster %s is machine %s, but your folder records machine %s", n.Name, n.Spec.MachineID, had),
			first+fmt.Sprintf(`To continue with your folder's record: kubectl patch attestednode %s --type merge -p '{"spec":{"banned":true}}', then the same with '{"spec":{"machineID":"%s"}}', then the same command.`, n.Name, had))
	}
	return nil
}

// notRecorded refuses an enrollment that may be a control plane's, by its role or by the policy, if the folder does not record it. An earlier
// version, another copy of the folder, or another writer of enrollments may have made it.
func notRecorded(d *ownerdir.Dir, n *v1alpha1.AttestedNode, to *clusterapi.Replacement) error {
	if n == nil {
		return nil
	}
	machine, err := attest.ParseMachineID(n.Spec.MachineID)
	if err != nil {
		return fmt.Errorf("enrollment of %s: %w", n.Name, err)
	}
	_, p, _, err := FolderPolicy(d)
	if err != nil {
		return err
	}
	control := n.Spec.Role == v1alpha1.RoleControlPlane
	// A worker's enrollment with the machine of a recorded control plane changes no list. Neither does the removal of a
	// control plane's enrollment that is not listed.
	listed := p.MayServe(machine) == nil && d.Cluster().ControlPlane(machine) == ""
	if !listed && (!control || to == nil) {
		return nil
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "in the cluster %s is a %s with machine %s, but your folder records no control plane %s", n.Name, n.Spec.Role, machine, n.Name),
		"Nothing was changed. If another copy of this folder is newer, use that one. "+RecordIt(n.Name)+" If it is not yours, the enrollment was made or changed without you: see docs/control-planes.md#an-enrollment-that-is-not-yours.")
}

// RecordIt is the remedy for a control plane that the folder does not record.
func RecordIt(name string) string {
	return "If it is a control plane of yours, read its machine ID from its console or from your own records, not from the cluster, and record it: muster enroll " + name + " --role control-plane --machine-id ID."
}

// ErrNoFirst is returned for a folder that does not record its first machine.
var ErrNoFirst = errors.New("cluster.json names no first machine")
