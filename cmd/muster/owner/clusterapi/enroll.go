package clusterapi

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Enroll assigns a name to a machine (J4), and the disk, if spec names one (J2). salt is the disk's, if the disk
// already has a key; with a zero salt, a disk without one gets a new one. An existing equal enrollment stays; an
// existing different one stays too, and is an error.
func (c *Client) Enroll(ctx context.Context, name string, spec v1alpha1.AttestedNodeSpec, salt keys.DiskSalt) (created bool, err error) {
	err = once(ctx, func(ctx context.Context) error {
		if spec.DiskID != "" { // before any write
			d, err := c.diskOf(ctx, spec.DiskID)
			if err == nil {
				err = mayTake(d, spec.MachineID)
			}
			if err != nil {
				return err
			}
		}
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{v1alpha1.RevokeCertificates}}, Spec: spec}
		err := c.client.Create(ctx, n)
		if err == nil {
			created = true
			return nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		var have v1alpha1.AttestedNode
		if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &have); err != nil {
			return err
		}
		if have.Leaving() {
			return leaving(name)
		}
		return same(name, have.Spec, spec)
	})
	if err != nil {
		return created, err
	}
	return created, c.claimDisk(ctx, spec.DiskID, spec.MachineID, salt)
}

// leaving returns the error for an enrollment that is being deleted.
func leaving(name string) error {
	return attest.Refuse(attestv1.Reason_REASON_BANNED, "the enrollment of %s is being deleted: joinservice completes that, or `muster forget %s` if none runs", name, name)
}

// same returns an error if an enrollment differs from want. An empty disk or empty addresses in want match any.
func same(name string, have, want v1alpha1.AttestedNodeSpec) error {
	switch {
	case have.MachineID != want.MachineID:
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "%s is enrolled to machine %s", name, have.MachineID)
	case have.Role != want.Role:
		return attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "%s is enrolled as a %s", name, have.Role)
	case want.DiskID != "" && have.DiskID != want.DiskID:
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "%s is enrolled with disk %s", name, have.DiskID)
	case len(want.Addresses) > 0 && !slices.Equal(slices.Sorted(slices.Values(have.Addresses)), slices.Sorted(slices.Values(want.Addresses))):
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "%s is enrolled with the addresses %v", name, have.Addresses)
	}
	return nil
}

// Free returns an error if name, machine or disk of an enrollment is enrolled otherwise. It is called before any
// write: a conflict that is found later would refuse the machine when it is already in the rack.
func (c *Client) Free(ctx context.Context, name string, spec v1alpha1.AttestedNodeSpec) error {
	return once(ctx, func(ctx context.Context) error {
		if spec.DiskID != "" {
			d, err := c.diskOf(ctx, spec.DiskID)
			if err == nil {
				err = mayTake(d, spec.MachineID)
			}
			if err != nil {
				return err
			}
		}
		var all v1alpha1.AttestedNodeList
		if err := c.client.List(ctx, &all); err != nil {
			return err
		}
		for _, n := range all.Items {
			if n.Spec.MachineID == spec.MachineID && n.Name != name {
				return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "the machine is already enrolled as %s", n.Name)
			}
			if n.Name == name {
				if n.Leaving() {
					return leaving(name)
				}
				if err := same(name, n.Spec, spec); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Present returns the names of all existing Nodes, sorted.
func (c *Client) Present(ctx context.Context) ([]string, error) {
	names := []string{}
	err := once(ctx, func(ctx context.Context) error {
		var nodes corev1.NodeList
		if err := c.client.List(ctx, &nodes); err != nil {
			return err
		}
		names = names[:0]
		for _, n := range nodes.Items {
			names = append(names, n.Name)
		}
		return nil
	})
	slices.Sort(names)
	return names, err
}

// Unattested returns the nodes that may write without attestation: those that are listed as such, and those in
// before that are still Nodes, unless their name was enrolled or forgotten since.
func (c *Client) Unattested(ctx context.Context, before []string) ([]string, error) {
	present, err := c.Present(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	err = once(ctx, func(ctx context.Context) error {
		out = nil
		list, err := c.access(ctx)
		if err != nil {
			return err
		}
		var attested v1alpha1.AttestedNodeList
		if err := c.client.List(ctx, &attested); err != nil {
			return err
		}
		for _, name := range list.Nodes() {
			if list.Entry(name).Unattested {
				out = append(out, name)
			}
		}
		for _, name := range before {
			e := list.Entry(name)
			known := slices.ContainsFunc(attested.Items, func(n v1alpha1.AttestedNode) bool { return n.Name == name })
			if slices.Contains(present, name) && !e.Unattested && e.Revoked == nil && !known { // J4
				out = append(out, name)
			}
		}
		return nil
	})
	slices.Sort(out)
	return out, err
}

// Verdict is the result of the owner's appraisal of a machine.
type Verdict struct {
	Time           time.Time
	PolicySerial   uint64
	EvidenceDigest string
	PCRs           map[string]string
	AKName         string
	ResetCount     uint32
}

// RecordVerdict writes the owner's verdict on the first machine, unless the object has a newer one.
func (c *Client) RecordVerdict(ctx context.Context, name string, v Verdict) error {
	return once(ctx, func(ctx context.Context) error {
		var n v1alpha1.AttestedNode
		if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &n); err != nil {
			return err
		}
		if last := n.Status.LastVerdict; last != nil && !last.Time.Time.Before(v.Time) {
			return nil
		}
		count := int64(v.ResetCount)
		n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: attest.ReasonName(attestv1.Reason_REASON_ACCEPTED), Time: metav1.NewTime(v.Time)}
		n.Status.PolicyGeneration = 0 // the cluster's services have not appraised it yet; it attests to them before a renewal
		n.Status.PolicySerial = serial(v.PolicySerial)
		n.Status.EvidenceDigest = v.EvidenceDigest
		n.Status.PCRs = v.PCRs
		n.Status.AKName = v.AKName
		n.Status.ResetCount = &count
		enrollment.SetConditions(&n, nodeaccess.Entry{})
		return c.client.Status().Update(ctx, &n)
	})
}

// serial converts a policy's serial to the API's integer.
func serial(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// ErrPolicyChanged is returned if the cluster's policy is no longer the one that a command has compared its own with, or that it has set.
var ErrPolicyChanged = errors.New("another administrator or program changed the cluster's policy while this command ran")

// PutPolicy replaces a policy of the cluster by a signed one, byte for byte as it was signed. instead is the replaced one, empty if there is none: the
// caller compared the new policy with it, so that any other there is [ErrPolicyChanged].
func (c *Client) PutPolicy(ctx context.Context, instead v1alpha1.AttestationPolicySpec, signed *attestv1.SignedPolicy) error {
	want := v1alpha1.AttestationPolicySpec{Policy: string(signed.GetPolicy()), Signature: base64.StdEncoding.EncodeToString(signed.GetSignature())}
	return once(ctx, func(ctx context.Context) error {
		var p v1alpha1.AttestationPolicy
		err := c.client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, &p)
		if apierrors.IsNotFound(err) && instead != (v1alpha1.AttestationPolicySpec{}) {
			return ErrPolicyChanged
		}
		if apierrors.IsNotFound(err) {
			p = v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}, Spec: want}
			if err = c.client.Create(ctx, &p); apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("policy: %w", errPending) // compared in the next try
			}
			return err
		}
		if err != nil || p.Spec == want {
			return err
		}
		if p.Spec != instead {
			return ErrPolicyChanged
		}
		p.Spec = want
		return c.client.Update(ctx, &p) // a conflict is tried again: the status changes at any time
	})
}

// SetCandidate sets the annotation [v1alpha1.PolicyCandidate] of the cluster's policy.
func (c *Client) SetCandidate(ctx context.Context, note string) error {
	return c.changePolicy(ctx, func(p *v1alpha1.AttestationPolicy) {
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, v1alpha1.PolicyCandidate, note)
	})
}

// DropCandidate removes the annotation of [Client.SetCandidate], unless another program has replaced it.
func (c *Client) DropCandidate(ctx context.Context, note string) error {
	return c.changePolicy(ctx, func(p *v1alpha1.AttestationPolicy) {
		if p.Annotations[v1alpha1.PolicyCandidate] == note {
			delete(p.Annotations, v1alpha1.PolicyCandidate)
		}
	})
}

func (c *Client) changePolicy(ctx context.Context, change func(*v1alpha1.AttestationPolicy)) error {
	return once(ctx, func(ctx context.Context) error {
		p := &v1alpha1.AttestationPolicy{}
		if err := c.client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
			return err
		}
		change(p)
		return c.client.Update(ctx, p) // a conflict is tried again
	})
}

// Enrollments returns all AttestedNodes.
func (c *Client) Enrollments(ctx context.Context) ([]v1alpha1.AttestedNode, error) {
	var l v1alpha1.AttestedNodeList
	err := once(ctx, func(ctx context.Context) error { return c.client.List(ctx, &l) })
	return l.Items, err
}

// Policy returns the cluster's policy object.
func (c *Client) Policy(ctx context.Context) (*v1alpha1.AttestationPolicy, error) {
	var p v1alpha1.AttestationPolicy
	err := once(ctx, func(ctx context.Context) error {
		return c.client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, &p)
	})
	if err != nil {
		return nil, err
	}
	return &p, nil
}

// PolicyIfDefined is [Client.Policy] before Muster's objects are defined: where their kind is unknown, it does not wait for it. [Absent] reports that.
func (c *Client) PolicyIfDefined(ctx context.Context) (*v1alpha1.AttestationPolicy, error) {
	var p v1alpha1.AttestationPolicy
	var unknown error
	err := once(ctx, func(ctx context.Context) error {
		err := c.client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, &p)
		if meta.IsNoMatchError(err) {
			unknown = err
			return nil
		}
		return err
	})
	if err == nil {
		err = unknown
	}
	if err != nil {
		return nil, err
	}
	return &p, nil
}

// UnknownSwitches is the entry of [Insecure] for a policy that this program refuses.
const UnknownSwitches = "unknown (this version of muster cannot read the policy)"

// Insecure returns the insecure switches that may be in force: those of the policy in the object, and those that the services report, which may be of the
// policy before, if they refuse this one. Neither is verified here. Who can write the status can only add switches, not hide those of a signed policy: if this
// program cannot read that policy, the status alone would say which are on, so that the last entry is [UnknownSwitches].
func Insecure(p *v1alpha1.AttestationPolicy) []string {
	out := slices.Clone(p.Status.Insecure)
	policy, err := attest.ParsePolicy([]byte(p.Spec.Policy))
	if err != nil {
		return append(out, UnknownSwitches)
	}
	for _, s := range policy.Insecure() {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// PolicyInForce waits until the services have checked the policy of that text. A refused one is an error with their reason; the previous policy stays in
// force. If the cluster has another one, the error is [ErrPolicyChanged].
func (c *Client) PolicyInForce(ctx context.Context, text string) (*v1alpha1.AttestationPolicy, error) {
	var p v1alpha1.AttestationPolicy
	err := until(ctx, func(ctx context.Context) (bool, error) {
		if err := c.client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, &p); err != nil {
			return false, err
		}
		if p.Spec.Policy != text {
			return false, ErrPolicyChanged
		}
		if p.Status.ObservedGeneration < p.Generation {
			return false, nil
		}
		if !p.Status.Accepted {
			reason := attestv1.Reason(attestv1.Reason_value["REASON_"+p.Status.Reason])
			return false, attest.Refuse(reason, "the cluster refuses the policy: %s; the one of serial %d stays in force, but a restarted joinservice has no policy", p.Status.Message, p.Status.Serial)
		}
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return &p, nil
}
