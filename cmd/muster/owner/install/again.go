package install

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// compare reports whether the cluster has the folder's policy already. It refuses a folder whose policy or owner's keys are not those of the cluster: an old
// copy of the folder would bring back what was revoked since, and an edited policy is put in force by muster policy apply, which compares it with the nodes.
// read reads the cluster's policy.
func (i *initializer) compare(ctx context.Context, kube *clusterapi.Client, read func(context.Context) (*v1alpha1.AttestationPolicy, error)) (bool, error) {
	if err := i.listFirst(); err != nil { // A7
		return false, err
	}
	have, err := read(ctx)
	gone := clusterapi.Absent(err)
	if err != nil && !gone {
		return false, err
	}
	if !gone || i.dir().Stage == ownerdir.StageInstalled {
		if err := i.compareKeys(kube); err != nil {
			return false, err
		}
	}
	if gone {
		known, err := i.Dir.Known()
		if err != nil {
			return false, err
		}
		return false, policies.Current(i.Dir, known, i.policy, i.json)
	}
	owner, err := i.Dir.OwnerKeys()
	if err != nil {
		return false, err
	}
	if _, err := policies.OpenPolicy(have, owner); err != nil || have.Spec.Policy != string(i.json) {
		err := attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "%s, of serial %d, is not the policy that the cluster has", i.Dir.File(ownerdir.PolicyFile), i.policy.Serial())
		return false, problem.WithRemedy(err, "The cluster's policy and Muster's services were not changed. If this folder is an older copy, use the newest. If you have edited the policy: muster policy apply --directory "+i.Dir.Path()+", then run this command again.")
	}
	return true, nil
}

// putBack puts the last policy of an installed cluster back, as known.json has it with the owner's signature, and reports whether it has one. The folder's
// policy may have edits, and what was signed after that may never have been sent: only muster policy apply compares these with the running nodes.
func (i *initializer) putBack(ctx context.Context, kube *clusterapi.Client) (is bool, err error) {
	known, err := i.Dir.Known()
	if err != nil || known.Policy.JSON == "" {
		return false, err
	}
	serial, newest, err := policies.NewestSigned(i.Dir, &v1alpha1.AttestationPolicy{})
	if err != nil {
		return false, err
	}
	if newest != known.Policy.JSON { // B7
		i.Report.Update(fmt.Sprintf("a policy of serial %d was signed in %s after the one in %s, which is not set again", serial, i.Dir.Path(), ownerdir.KnownFile))
		return false, nil
	}
	owner, err := i.Dir.OwnerKeys()
	if err != nil {
		return false, err
	}
	last := &attestv1.SignedPolicy{Policy: []byte(known.Policy.JSON), Signature: known.Policy.Signature}
	p, err := attest.OpenPolicy(owner, last)
	if err != nil {
		return false, problem.WithRemedy(fmt.Errorf("the cluster's last policy, in %s: %w", i.Dir.File(ownerdir.KnownFile), err), "No policy was set. Correct policy.yaml of the owner's folder, increase serial, and run muster policy apply; then run this command again.")
	}
	nodes, err := kube.Enrollments(ctx)
	if err != nil {
		return false, err
	}
	for _, n := range nodes { // B7: another copy of the folder may have a later one
		if by := n.Status.PolicySerial; by > 0 && uint64(by) > p.Serial() {
			i.Report.Update(fmt.Sprintf("the cluster's last policy had at least serial %d, by which node %s was examined; %s has serial %d, which is not set again", by, n.Name, i.Dir.Path(), p.Serial()))
			return false, nil
		}
	}
	if string(i.json) != newest {
		i.Report.Update(fmt.Sprintf("%s, of serial %d, differs from the cluster's last policy, which is set again: muster policy apply puts yours in force", i.Dir.File(ownerdir.PolicyFile), i.policy.Serial()))
	}
	i.policy, i.json = p, last.GetPolicy() // the joinservice has this one
	return true, policies.Put(ctx, i.Dir, kube, &v1alpha1.AttestationPolicy{}, last)
}

// noPolicy is returned at the end for an installed cluster that has no policy.
func (i *initializer) noPolicy() error {
	return problem.WithRemedy(fmt.Errorf("the cluster has no policy, and %s does not have its last one: Muster's objects are restored, the policy is not", i.Dir.Path()),
		"If there is a newer copy of this folder, use that one. Otherwise put "+i.Dir.File(ownerdir.PolicyFile)+" in force, which compares it with the running nodes: muster policy apply --directory "+i.Dir.Path()+". Then run this command again.")
}

// compareKeys refuses a folder whose owner's keys are not those that the cluster's services accept.
func (i *initializer) compareKeys(kube *clusterapi.Client) error {
	r, err := kube.Release(i.Log)
	if err != nil || r == nil {
		return err
	}
	owner, err := i.Dir.OwnerKeys()
	if err != nil {
		return err
	}
	have, own := slices.Sorted(slices.Values(clusterapi.OwnerKeys(r))), slices.Sorted(slices.Values(owner.Strings()))
	if slices.Equal(have, own) {
		return nil
	}
	err = attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "the services of this cluster accept the owner's keys %s, and %s has %s", strings.Join(have, ", "), i.Dir.Path(), strings.Join(own, ", "))
	return problem.WithRemedy(err, "The cluster's policy and Muster's services were not changed. If this folder is an older copy, use the newest: the services would accept a key again that was replaced. If muster rotate owner-key was interrupted, run it again.")
}

// hasFirst reports whether the first machine is still enrolled as a control plane: it may have been banned, forgotten or replaced.
func (i *initializer) hasFirst(ctx context.Context, kube *clusterapi.Client) (bool, error) {
	m := i.dir().FirstMachine
	all, err := kube.Enrollments(ctx)
	return slices.ContainsFunc(all, func(n v1alpha1.AttestedNode) bool {
		return n.Name == m.NodeName && n.Spec.MachineID == m.ID.String() && n.Spec.Role == v1alpha1.RoleControlPlane && !n.ShutOut()
	}), err
}

// keepFirst says so if the first machine is not enrolled any more, and changes nothing: an enrollment gives a machine its disk's key (J2), so that a machine
// that was banned or forgotten would come back.
func (i *initializer) keepFirst(ctx context.Context, kube *clusterapi.Client) error {
	has, err := i.hasFirst(ctx, kube)
	if err != nil || has {
		return err
	}
	c := i.dir()
	i.Report.Update(c.FirstMachine.NodeName + " is banned, or not enrolled with the first machine any more: it stays so")
	if c.ControlPlanes[c.FirstMachine.NodeName] == c.FirstMachine.ID {
		i.Report.Update(fmt.Sprintf("your folder records it as a control plane: if its enrollment was lost, muster enroll %s --role control-plane --machine-id %s", c.FirstMachine.NodeName, c.FirstMachine.ID))
	}
	return nil
}

// anyJoinservice waits until the joinservice of a control plane answers, as [initializer.joinservice] does for the first machine, which may be gone. Only
// control planes that the owner's policy lists are asked (A7).
func (i *initializer) anyJoinservice(ctx context.Context, kube *clusterapi.Client) (string, error) {
	has, err := i.hasFirst(ctx, kube)
	if err != nil {
		return "", err
	}
	var at []server
	if first := i.dir().FirstMachine; has && i.policy.MayServe(first.ID) == nil {
		at = i.servers(first.ID, first.Addresses)
	}
	planes, err := kube.ControlPlanes(ctx)
	if err != nil && len(at) == 0 {
		return "", err
	}
	for _, p := range planes {
		id, err := attest.ParseMachineID(p.MachineID)
		if err != nil {
			return "", fmt.Errorf("enrollment of %s: %w", p.Name, err)
		}
		if i.policy.MayServe(id) == nil {
			for _, s := range i.servers(id, p.Addresses) {
				if !slices.Contains(at, s) { // the first machine's
					at = append(at, s)
				}
			}
		}
	}
	if len(at) == 0 {
		return "", attest.Refuse(attestv1.Reason_REASON_SERVER_NOT_LISTED, "the policy lists no control plane of the cluster")
	}
	return i.askAny(ctx, at)
}

// server is where a machine's joinservice should answer.
type server struct {
	addr    string
	machine attest.MachineID
}

func (i *initializer) servers(id attest.MachineID, addresses []string) (out []server) {
	for _, a := range addresses {
		out = append(out, server{net.JoinHostPort(a, strconv.Itoa(i.Values.JoinPort())), id})
	}
	return out
}
