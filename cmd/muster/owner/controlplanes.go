package owner

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// inForceTimeout limits the wait until the services apply a policy with another list of control planes.
const inForceTimeout = 20 * time.Second

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

// folderPolicy reads the policy of an owner's folder.
func folderPolicy(d *ownerdir.Dir) (text []byte, p *attest.Policy, json []byte, err error) {
	if text, err = d.Read(ownerdir.PolicyFile); err != nil {
		return nil, nil, nil, err
	}
	if p, json, err = policyfile.Parse(text); err != nil {
		return nil, nil, nil, fmt.Errorf("%s: %w", d.File(ownerdir.PolicyFile), err)
	}
	return text, p, json, nil
}

// apply changes the policy in the owner's folder, then in the cluster: one signature, one serial. After an
// interruption between the two, the same call finishes: the folder's policy then has the change, and is put into the
// cluster unchanged.
func (l listing) apply(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, report func(string)) error {
	if len(l.add)+len(l.remove) == 0 {
		return nil
	}
	text, p, json, err := folderPolicy(d)
	if err != nil {
		return err
	}
	have, err := kube.Policy(ctx)
	if clusterapi.Absent(err) {
		have, err = &v1alpha1.AttestationPolicy{}, nil
	}
	if err != nil {
		return err
	}
	theirs := &attest.Policy{} // lists no control plane
	if have.Spec.Policy != "" {
		if theirs, err = attest.ParsePolicy([]byte(have.Spec.Policy)); err != nil {
			return fmt.Errorf("the cluster's policy: %w", err)
		}
	}
	if l.done(p) && l.done(theirs) {
		return nil
	}
	if !l.done(p) {
		if have.Spec.Policy != string(json) && have.Spec.Policy != "" {
			return withRemedy(fmt.Errorf("%s is not the policy that the cluster has, so it can't be changed along with the control planes", d.File(ownerdir.PolicyFile)),
				"Run muster policy apply first, if you have finished editing it, or undo what you have edited.")
		}
		signed, err := signedSerial(d, have)
		if err != nil {
			return err
		}
		serial := max(p.Serial(), signed) + 1
		if text, err = policyfile.ListControlPlanes(text, serial, l.add, l.remove); err != nil {
			return err
		}
		if err := d.Write(ownerdir.PolicyFile, text); err != nil { // B3: before it is sent
			return err
		}
	}
	p, signed, err := SignedPolicy(d)
	if err != nil {
		return err
	}
	if err := higher(d, have, p, string(signed.GetPolicy())); err != nil {
		return err
	}
	if err := kube.PutPolicy(ctx, signed); err != nil {
		return err
	}
	report(fmt.Sprintf("policy of serial %d signed: it lists %d control planes", p.Serial(), len(p.ControlPlanes())))
	if have.Status.ObservedGeneration == 0 {
		return nil // no service checks policies yet
	}
	waiting, cancel := context.WithTimeout(ctx, inForceTimeout)
	defer cancel()
	if _, err := kube.PolicyInForce(waiting); err != nil && (waiting.Err() == nil || ctx.Err() != nil) {
		return err
	} else if err != nil {
		report("no joinservice applies it yet: muster status shows when one does")
	}
	return nil
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

// higher refuses a policy whose serial the services would refuse.
func higher(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy, p *attest.Policy, json string) error {
	if have.Spec.Policy == json {
		return nil
	}
	signed, err := signedSerial(d, have)
	if err != nil || signed < p.Serial() {
		return err
	}
	err = attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "its serial is %d, and the cluster's policy of serial %d says something else", p.Serial(), signed)
	return withRemedy(err, fmt.Sprintf("Set serial to %d or more in %s: a cluster never goes back to an older policy.", signed+1, d.File(ownerdir.PolicyFile)))
}

// signedSerial returns the serial of the newest policy that the owner has signed, as far as the cluster and known.json have it; 0: none. The status of the
// cluster's policy is not signed: if a serial from there were signed, it could be the highest of all, and no policy could follow.
func signedSerial(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy) (uint64, error) {
	key, err := d.OwnerKey()
	if err != nil {
		return 0, err
	}
	var serial uint64
	if p, err := openPolicy(have, publicOf(key)); err == nil {
		serial = p.Serial()
	}
	known, err := d.Known()
	if err != nil {
		return 0, err
	}
	if p, err := known.Policy.Open(publicOf(key)); err == nil {
		serial = max(serial, p.Serial())
	}
	if status := have.Status.Serial; status > 0 && uint64(status) > serial {
		return 0, withRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the cluster's status says that a policy of serial %d was in force, and the newest with the owner's signature, in the cluster and in %s, has %d", status, d.File(ownerdir.KnownFile), serial),
			fmt.Sprintf("If there is a newer copy of this folder, use that one. Otherwise somebody has written the status: correct it (kubectl edit attestationpolicy default --subresource status, serial: %d), and restart the services: kubectl -n muster-system rollout restart daemonset muster-joinservice muster-kms.", serial))
	}
	return serial, nil
}

// openPolicy verifies the owner's signature of the cluster's policy.
func openPolicy(have *v1alpha1.AttestationPolicy, owner ed25519.PublicKey) (*attest.Policy, error) {
	signature, err := base64.StdEncoding.DecodeString(have.Spec.Signature)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "spec.signature of the cluster's policy is no base64: %w", err)
	}
	return attest.OpenPolicy(owner, &attestv1.SignedPolicy{Policy: []byte(have.Spec.Policy), Signature: signature})
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
