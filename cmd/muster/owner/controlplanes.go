package owner

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// ControlPlanesOf returns the control planes that the policy of an owner's folder lists; none if it is not a valid
// policy.
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
		out = append(out, policyfile.ControlPlane{Machine: id})
	}
	return out, nil
}

// listing is a change of the control planes that the owner's policy lists (A7).
type listing struct {
	add    []policyfile.ControlPlane
	remove []attest.MachineID
}

// done reports whether p already has the change.
func (l listing) done(p *attest.Policy) bool {
	for _, c := range l.add {
		if p.MayServe(c.Machine) != nil {
			return false
		}
	}
	for _, m := range l.remove {
		if p.MayServe(m) == nil {
			return false
		}
	}
	return true
}

// plan describes what apply would do; empty: nothing.
func (l listing) plan(p *attest.Policy) string {
	if l.done(p) {
		return ""
	}
	var parts []string
	for _, c := range l.add {
		parts = append(parts, "lists machine "+c.Machine.String())
	}
	for _, m := range l.remove {
		parts = append(parts, "does not list machine "+m.String())
	}
	return "sign a policy with the next serial that " + strings.Join(parts, " and ") + " as a control plane: no machine believes a joinservice or kms on one that is not listed"
}

// apply lists and removes control planes; see [policyChange.apply].
func (l listing) apply(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, report func(string)) error {
	if len(l.add)+len(l.remove) == 0 {
		return nil
	}
	return policyChange{
		done: func(_ []byte, p *attest.Policy) (bool, error) { return l.done(p), nil },
		edit: func(text []byte, serial uint64) ([]byte, error) {
			return policyfile.ListControlPlanes(text, serial, l.add, l.remove)
		},
		what: func(p *attest.Policy) string {
			return fmt.Sprintf("it lists %d control planes", len(p.ControlPlanes()))
		},
	}.apply(ctx, d, kube, report)
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

// mustList refuses a policy that leaves out a control plane of the cluster, with SERVER_NOT_LISTED: no machine would
// trust its joinservice and kms. The remedy shows the cluster's entry, for the owner to compare.
func mustList(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, p *attest.Policy) error {
	missing, err := missingFrom(ctx, kube, p)
	if err != nil || len(missing) == 0 {
		return err
	}
	var names, lines []string
	for _, c := range missing {
		names = append(names, c.Name)
		lines = append(lines, fmt.Sprintf("  - %q # %s", c.Machine.String(), c.Name))
	}
	err = attest.Refuse(attestv1.Reason_REASON_SERVER_NOT_LISTED, "the policy does not list the control planes %s", strings.Join(names, ", "))
	return withRemedy(err, strings.Join(append([]string{
		"Compare each machine with what muster verify shows of it, add those that are yours to " + d.File(ownerdir.PolicyFile) + ", increase serial, and run the same command again. One that is no longer yours is let go by muster forget.",
		"controlPlanes:",
	}, lines...), "\n"))
}

// enrollListing is the change for the enrollment of a machine: a control plane is listed.
func enrollListing(name string, spec v1alpha1.AttestedNodeSpec) (listing, error) {
	if spec.Role != v1alpha1.RoleControlPlane {
		return listing{}, nil
	}
	id, err := attest.ParseMachineID(spec.MachineID)
	return listing{add: []policyfile.ControlPlane{{Machine: id, Name: name}}}, err
}

// leaveListing is the change when an enrollment is deleted, or gets the machine of to: the old machine is removed
// from the list, and the new one of a control plane is added.
func leaveListing(n *v1alpha1.AttestedNode, to *clusterapi.Replacement) (listing, error) {
	if n == nil || n.Spec.Role != v1alpha1.RoleControlPlane { // the API says which machine a worker is: it could name a control plane's
		return listing{}, nil
	}
	old, err := attest.ParseMachineID(n.Spec.MachineID)
	if err != nil {
		return listing{}, fmt.Errorf("enrollment of %s: %w", n.Name, err)
	}
	if to == nil {
		return listing{remove: []attest.MachineID{old}}, nil
	}
	next := old
	if to.MachineID != "" {
		if next, err = attest.ParseMachineID(to.MachineID); err != nil {
			return listing{}, err
		}
	}
	var l listing
	if next != old {
		l.remove = []attest.MachineID{old}
	}
	l.add = []policyfile.ControlPlane{{Machine: next, Name: n.Name}}
	return l, nil
}

var errNoFirst = errors.New("cluster.json names no first machine")

// listFirst lists the first machine in the folder's policy, which is not signed yet: its serial stays.
func (i *initializer) listFirst() error {
	m := i.dir().FirstMachine
	if m == nil {
		return errNoFirst
	}
	if i.policy.MayServe(m.ID) == nil || i.dir().Stage == ownerdir.StageInstalled {
		return nil
	}
	text, err := i.Dir.Read(ownerdir.PolicyFile)
	if err != nil {
		return err
	}
	if text, err = policyfile.ListControlPlanes(text, i.policy.Serial(), []policyfile.ControlPlane{{Machine: m.ID, Name: m.NodeName}}, nil); err != nil {
		return err
	}
	if err := i.Dir.Write(ownerdir.PolicyFile, text); err != nil {
		return err
	}
	return i.load()
}
