package clusterapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Presence is the cluster's state of one node name. Each part may be missing.
type Presence struct {
	Name       string
	Node       *corev1.Node
	Enrollment *v1alpha1.AttestedNode
	// Unattested reports that the node was in the cluster before Muster, and is allowed without attestation.
	Unattested bool
	// Listed reports that it is in the list of nodes that may not write.
	Listed bool
	// Revoked reports that the writes of its certificates are refused, and that no certificate was issued since.
	Revoked bool
	// Requests are certificate requests that were filed under the name.
	Requests []string
	// Pods are the node's pods that a drain would evict: without pods of DaemonSets and static pods.
	Pods []string
	// ControlPlane is the role of its enrollment, or of its Node if there is none.
	ControlPlane bool
	// OtherControlPlanes are the Nodes of that role with other names.
	OtherControlPlanes []string
}

// Nothing reports whether the cluster has no object with the name.
func (p *Presence) Nothing() bool {
	return p.Node == nil && p.Enrollment == nil && !p.Unattested && len(p.Requests) == 0
}

// Joined reports whether its machine ever received a node's credentials: such a control plane is a member of etcd,
// also when a ban has deleted its Node.
func (p *Presence) Joined() bool {
	return p.Node != nil || p.Enrollment != nil && (p.Enrollment.Status.Ticket != nil || p.Enrollment.Status.AKName != "")
}

// Ready reports whether the Node is ready.
func (p *Presence) Ready() bool { return p.Node != nil && IsReady(p.Node) }

// IsReady reports whether a Node is ready.
func IsReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// Presence reads the state of a name.
func (c *Client) Presence(ctx context.Context, name string) (*Presence, error) {
	var p *Presence
	err := once(ctx, func(ctx context.Context) (err error) {
		p, err = c.presence(ctx, name)
		return err
	})
	return p, err
}

func (c *Client) presence(ctx context.Context, name string) (*Presence, error) {
	p := &Presence{Name: name}
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return nil, err
	}
	for _, n := range nodes.Items {
		_, control := n.Labels[clusterinfo.ControlPlaneLabel]
		if n.Name == name {
			p.Node, p.ControlPlane = &n, control
		} else if control {
			p.OtherControlPlanes = append(p.OtherControlPlanes, n.Name)
		}
	}
	var own v1alpha1.AttestedNode
	if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &own); err == nil {
		p.Enrollment, p.ControlPlane = &own, own.Spec.Role == v1alpha1.RoleControlPlane
	} else if !Absent(err) {
		return nil, err
	}
	if p.Enrollment != nil && own.Name != name {
		return nil, fmt.Errorf("the API server answers with the enrollment of %s instead of that of %s: do not trust it", printable.ASCII(own.Name, maxWhy), name)
	}
	list, err := c.access(ctx)
	if err != nil {
		return nil, err
	}
	e := list.Entry(name)
	p.Unattested, p.Listed = e.Unattested, !e.Equal(nodeaccess.Entry{})
	p.Revoked = e.Revoked != nil && len(e.Revoked.Allowed) == 0
	if p.Requests, err = c.requestsOf(ctx, name); err != nil {
		return nil, err
	}
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.MatchingFields{"spec.nodeName": name}); err != nil {
		return nil, err
	}
	for _, pod := range pods.Items {
		own := metav1.GetControllerOf(&pod)
		done := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
		if !done && (own == nil || own.Kind != "DaemonSet" && own.Kind != "Node") {
			p.Pods = append(p.Pods, pod.Namespace+"/"+pod.Name)
		}
	}
	return p, nil
}

// access reads the list of nodes that may not write; a missing list is empty.
func (c *Client) access(ctx context.Context) (*nodeaccess.List, error) {
	m := &corev1.ConfigMap{}
	if err := c.client.Get(ctx, enrollment.Key(), m); err != nil && !Absent(err) {
		return nil, err
	}
	return nodeaccess.Parse(m.Data)
}

func (c *Client) requestsOf(ctx context.Context, node string) ([]string, error) {
	var all certificatesv1.CertificateSigningRequestList
	if err := c.client.List(ctx, &all); err != nil {
		return nil, err
	}
	var out []string
	for _, o := range all.Items {
		if o.Spec.Username == clusterinfo.NodeUserPrefix+node {
			out = append(out, o.Name)
		}
	}
	return out, nil
}

// FreeFor returns an error if machine or disk of a change is enrolled under another name, or if the name's new disk
// belongs to a third machine.
func (c *Client) FreeFor(ctx context.Context, p *Presence, to Replacement) error {
	name := p.Name
	return once(ctx, func(ctx context.Context) error {
		disk, machine := to.of(p)
		if disk != "" {
			d, err := c.diskOf(ctx, disk)
			if err != nil {
				return err
			}
			if err := mayTake(d, machine, p.Enrollment.Spec.MachineID); err != nil {
				return err
			}
		}
		var all v1alpha1.AttestedNodeList
		if err := c.client.List(ctx, &all); err != nil {
			return err
		}
		for _, n := range all.Items {
			switch {
			case n.Name == name:
			case to.MachineID != "" && n.Spec.MachineID == to.MachineID:
				return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "the machine is already enrolled as %s; `muster forget %s` frees it", n.Name, n.Name)
			case to.DiskID != "" && n.Spec.DiskID == to.DiskID:
				return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the disk is already enrolled to %s; `muster forget %s` frees it", n.Name, n.Name)
			}
		}
		return nil
	})
}

// Forget removes from the cluster everything that p has found under its name, so that the name is free. It reports
// its progress to report; now is the time of the owner's clock; retired is when the last certificate of the machine
// has expired.
//
// An interruption is safe at every point, and another call completes the removal, because of the order. First the
// enrollment is banned, which no service undoes: its machine gets no new credentials, and no other machine gets the
// name. The enrollment itself is deleted last. The disk stays assigned to the machine (J2).
func (c *Client) Forget(ctx context.Context, p *Presence, now time.Time, report func(string)) (retired time.Time, err error) {
	if retired, err = c.shutOut(ctx, p, false, now, report); err != nil {
		return retired, err
	}
	if p.Node != nil {
		if err := once(ctx, func(ctx context.Context) error {
			return client.IgnoreNotFound(c.client.Delete(ctx, p.Node, client.Preconditions{UID: &p.Node.UID}, background))
		}); err != nil {
			return retired, fmt.Errorf("delete Node %s: %w", p.Name, err)
		}
		report("Node deleted")
	}
	if err := c.deletePods(ctx, p.Name, report); err != nil {
		return retired, err
	}
	if p.Enrollment != nil {
		if err := c.deleteEnrollment(ctx, p); err != nil {
			return retired, fmt.Errorf("delete AttestedNode %s: %w", p.Name, err)
		}
		report("enrollment deleted")
	}
	return retired, nil
}

// deleteEnrollment deletes the enrollment that p has found, if its ban is still that of this command. The finalizer's work is done, and perhaps no joinservice
// runs that would remove it.
func (c *Client) deleteEnrollment(ctx context.Context, p *Presence) error {
	return client.IgnoreNotFound(c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) (bool, error) {
		return true, stillOwn(n, v1alpha1.Removing)
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error {
		if n.Revokes() {
			n.Finalizers = slices.DeleteFunc(n.Finalizers, func(f string) bool { return f == v1alpha1.RevokeCertificates })
			if err := c.client.Update(ctx, n); err != nil {
				return err
			}
		}
		return c.client.Delete(ctx, n, client.Preconditions{UID: &n.UID, ResourceVersion: &n.ResourceVersion})
	}))
}

// Replacement is the new machine and disk of a name that stays in the cluster.
type Replacement struct {
	MachineID string // empty if unchanged
	DiskID    string // empty if unchanged
}

// of returns disk and machine of the name after the change; the disk may be empty.
func (r Replacement) of(p *Presence) (disk, machine string) {
	return cmp.Or(r.DiskID, p.Enrollment.Spec.DiskID), cmp.Or(r.MachineID, p.Enrollment.Spec.MachineID)
}

// Replace sets another machine or disk in the name's enrollment in place, so that no other machine can take the name
// meanwhile (J4). The Node stays, with its labels and taints, for the new machine. now and retired are as with
// Forget.
//
// The enrollment is banned until the last write. After an interruption it stays banned, and another call completes
// the change. So the new disk is assigned to its machine while no machine gets its key (J2).
func (c *Client) Replace(ctx context.Context, p *Presence, to Replacement, now time.Time, report func(string)) (retired time.Time, err error) {
	if retired, err = c.shutOut(ctx, p, true, now, report); err != nil {
		return retired, err
	}
	if err := c.deletePods(ctx, p.Name, report); err != nil {
		return retired, err
	}
	err = c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) (bool, error) {
		n.Status = v1alpha1.AttestedNodeStatus{} // it describes the old machine, and its reset counter would refuse the new one
		return true, stillOwn(n, v1alpha1.KeepNode)
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error { return c.client.Status().Update(ctx, n) })
	if err != nil {
		return retired, fmt.Errorf("clear the status of AttestedNode %s: %w", p.Name, err)
	}
	disk, machine := to.of(p)
	if err := c.claimDisk(ctx, disk, machine, keys.DiskSalt{}, p.Enrollment.Spec.MachineID); err != nil {
		return retired, err
	}
	err = c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) (bool, error) {
		if err := stillOwn(n, v1alpha1.KeepNode); err != nil {
			return false, err
		}
		n.Spec.Banned = false
		delete(n.Annotations, v1alpha1.KeepNode)
		delete(n.Annotations, v1alpha1.AttestationKey)   // the next machine has another TPM
		delete(n.Annotations, v1alpha1.EnrolledByTicket) // approved by the owner, so no cleanup rule removes it
		if to.MachineID != "" {
			n.Spec.MachineID = to.MachineID
		}
		if to.DiskID != "" {
			n.Spec.DiskID = to.DiskID
		}
		return true, nil
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error { return c.client.Update(ctx, n) })
	if err != nil {
		return retired, fmt.Errorf("change AttestedNode %s: %w", p.Name, err)
	}
	report("enrollment changed")
	return retired, nil
}

// HasBoots reports whether boots of the enrollment's machine, or of a copy of it, are recorded.
func HasBoots(s *v1alpha1.AttestedNodeStatus) bool {
	return s.ResetCount != nil || s.Boot != nil || meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionCloned) != nil
}

// ForgetResets clears the recorded counter of TPM resets of the name's machine, so that the next boot that attests is
// accepted (J11). Nothing else changes: it is the same machine.
func (c *Client) ForgetResets(ctx context.Context, p *Presence, report func(string)) error {
	if err := c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) (bool, error) {
		was := HasBoots(&n.Status)
		n.Status.ResetCount, n.Status.Boot = nil, nil
		meta.RemoveStatusCondition(&n.Status.Conditions, v1alpha1.ConditionCloned)
		return was, nil
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error { return c.client.Status().Update(ctx, n) }); err != nil {
		return fmt.Errorf("change the status of AttestedNode %s: %w", p.Name, err)
	}
	report("the recorded counter of its TPM's resets is cleared: the machine may attest again")
	return nil
}

// shutOut ends all access of the name's machine except the reads that its certificates allow. With keep, joinservice
// does not delete the Node.
func (c *Client) shutOut(ctx context.Context, p *Presence, keep bool, now time.Time, report func(string)) (retired time.Time, err error) {
	if p.Enrollment != nil {
		own := v1alpha1.Removing
		if keep {
			own = v1alpha1.KeepNode
		}
		if err := c.banPlanned(ctx, p, own); client.IgnoreNotFound(err) != nil { // a deletion may complete meanwhile
			return retired, err
		}
		report("machine banned: it gets no tickets, keys or certificates")
	}
	if retired, err = c.revoke(ctx, p.Name, now); err != nil {
		return retired, err
	}
	report("writes refused: its certificates are revoked until the last one has expired, " + retired.Format(time.RFC3339))
	// Otherwise a request of this machine would be checked against the enrollment of the name's next machine.
	var requests []string
	if err := once(ctx, func(ctx context.Context) (err error) {
		requests, err = c.requestsOf(ctx, p.Name)
		return err
	}); err != nil {
		return retired, err
	}
	for _, name := range requests {
		o := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := once(ctx, func(ctx context.Context) error { return client.IgnoreNotFound(c.client.Delete(ctx, o)) }); err != nil {
			return retired, fmt.Errorf("delete CertificateSigningRequest %s: %w", name, err)
		}
	}
	if len(requests) > 0 {
		report("certificate requests deleted: " + strings.Join(requests, ", "))
	}
	return retired, nil
}

// background also ends an earlier deletion that waits for dependents.
const background = client.PropagationPolicy(metav1.DeletePropagationBackground)

// deletePods deletes the pods that are bound to a node, so that their tokens become invalid. It does not wait for the
// kubelet, which may no longer be able to report their end. A pod that finalizers keep is an error, because the
// machine's certificate can read the Secrets of those pods.
func (c *Client) deletePods(ctx context.Context, node string, report func(string)) error {
	list := func() (out corev1.PodList, err error) {
		err = once(ctx, func(ctx context.Context) error {
			return c.client.List(ctx, &out, client.MatchingFields{"spec.nodeName": node})
		})
		if err != nil {
			err = fmt.Errorf("list the pods of %s: %w", node, err)
		}
		return out, err
	}
	pods, err := list()
	if err != nil {
		return err
	}
	var failed error // one pod that cannot be deleted does not keep the others
	for _, pod := range pods.Items {
		if err := once(ctx, func(ctx context.Context) error {
			return client.IgnoreNotFound(c.client.Delete(ctx, &pod, client.Preconditions{UID: &pod.UID}, client.GracePeriodSeconds(0), background))
		}); err != nil && failed == nil {
			failed = fmt.Errorf("delete pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
	}
	left, err := list()
	if err != nil {
		return errors.Join(err, failed)
	}
	if n := len(pods.Items) - len(left.Items); n > 0 {
		report(fmt.Sprintf("%d pods deleted, and with them their tokens", n))
	}
	if len(left.Items) > 0 {
		pod := left.Items[0]
		return errors.Join(fmt.Errorf("%d pods of %s still exist, such as %s/%s with finalizers %q: the machine's certificate can read their Secrets until they are gone. "+
			"Remove finalizers that no controller acts on, kubectl -n %s patch pod %s --type merge -p '{\"metadata\":{\"finalizers\":null}}', and run this again",
			len(left.Items), node, pod.Namespace, pod.Name, pod.Finalizers, pod.Namespace, pod.Name), failed)
	}
	return nil
}

// changeEnrollment changes the enrollment that p has found, and no newer one with the same name. change reports
// whether there is anything to write; its error ends the call.
func (c *Client) changeEnrollment(ctx context.Context, p *Presence, change func(*v1alpha1.AttestedNode) (bool, error), write func(context.Context, *v1alpha1.AttestedNode) error) error {
	return once(ctx, func(ctx context.Context) error {
		var n v1alpha1.AttestedNode
		if err := c.client.Get(ctx, types.NamespacedName{Name: p.Name}, &n); err != nil {
			return err
		}
		if n.UID != p.Enrollment.UID || n.Spec.MachineID != p.Enrollment.Spec.MachineID {
			return fmt.Errorf("%s has a new enrollment meanwhile, to machine %s: run the command again and read its plan", p.Name, n.Spec.MachineID)
		}
		if is, err := change(&n); err != nil || !is {
			return err
		}
		return write(ctx, &n)
	})
}

// maxSkew is the largest difference between the owner's clock and the API server's at which the owner's clock is used.
const maxSkew = 5 * time.Minute

// revoke ends the access of all certificates of the name (J4), and returns when the last of them has expired. now is
// the owner's clock. If the API server's clock differs from it, the API server's is used.
func (c *Client) revoke(ctx context.Context, node string, now time.Time) (until time.Time, err error) {
	theirs, err := c.serverTime(ctx)
	if err != nil {
		return until, err
	}
	if now.Sub(theirs).Abs() > maxSkew {
		now = theirs
	}
	until = nodeaccess.Entry{}.Revoke(now).Revoked.Until
	_, err = enrollment.Change(ctx, c.client, func(_ context.Context, l *nodeaccess.List) error {
		e := l.Entry(node).Revoke(now)
		until = e.Revoked.Until
		l.Set(node, e)
		return nil
	})
	if apierrors.IsNotFound(err) {
		return until, nil // without the list, no node can write
	}
	return until, err
}

// RevokeNames revokes the certificates of names without an enrollment (J4).
func (c *Client) RevokeNames(ctx context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	now, err := c.serverTime(ctx)
	if err != nil {
		return err
	}
	_, err = enrollment.Change(ctx, c.client, func(_ context.Context, l *nodeaccess.List) error {
		for _, name := range names {
			l.Set(name, l.Entry(name).Revoke(now))
		}
		return nil
	})
	return client.IgnoreNotFound(err) // without the list, no node can write
}

// Shut bans a machine that is not enrolled: it creates a banned enrollment with that name.
func (c *Client) Shut(ctx context.Context, name, machine string) error {
	err := once(ctx, func(ctx context.Context) error {
		err := c.client.Create(ctx, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{v1alpha1.RevokeCertificates}}, Spec: v1alpha1.AttestedNodeSpec{MachineID: machine, Role: v1alpha1.RoleWorker, Banned: true}})
		return client.IgnoreAlreadyExists(err)
	})
	if err != nil {
		return fmt.Errorf("ban machine %s as AttestedNode %s: %w", machine, name, err)
	}
	p, err := c.Presence(ctx, name)
	if err != nil {
		return err
	}
	if p.Enrollment == nil || p.Enrollment.Spec.MachineID != machine {
		return fmt.Errorf("machine %s could not be banned: the enrollment %s belongs to another machine", machine, name)
	}
	return c.SetBanned(ctx, p, true)
}

// serverTime returns the API server's clock, as the creation time of an object in a dry run.
func (c *Client) serverTime(ctx context.Context) (time.Time, error) {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "muster-clock-"}}
	if err := once(ctx, func(ctx context.Context) error { return c.client.Create(ctx, m, client.DryRunAll) }); err != nil {
		return time.Time{}, fmt.Errorf("ask the API server for its time: %w", err)
	}
	return m.CreationTimestamp.Time, nil
}
