package kube

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// returnWithin is how old a ticket may be that is returned: a machine that loses the race for its
	// node lock knows at once.
	returnWithin = 10 * time.Minute
	// holdMargin is how much longer than its certificates a returned ticket keeps what it enrolled: for
	// clocks that differ, and a renewal that was under way.
	holdMargin = 10 * time.Minute
)

// standing is how many tickets stand that t is the latest of.
func standing(t *v1alpha1.Ticket) int32 {
	if t == nil {
		return 0
	}
	return max(t.Standing, 1) // earlier versions did not count
}

// byTicket says whether a ticket made the enrolment, and not the owner.
func byTicket(n *v1alpha1.AttestedNode) bool {
	return n.Annotations[v1alpha1.EnrolledByTicket] != "" || n.Status.ReleasedAt != nil || n.Status.Ticket != nil && n.Status.Ticket.Enrolled
}

// begun says whether a ticket made the enrolment and did not get as far as to stand: no certificate and no key
// are out for it. Either the ticket is being made, or its replica has ended. A node's enrolment that was
// restored from a backup without its status is no such one.
func (k *Kube) begun(n *v1alpha1.AttestedNode) bool {
	return n.Annotations[v1alpha1.EnrolledByTicket] != "" && n.Status.Ticket == nil && n.Status.ReleasedAt == nil && !k.nodes.has(n.Name)
}

// vacant says whether the enrolment was released so long ago that nothing which its machine got with
// the ticket is of use any more, or whether nothing ever came of it: then the name is anybody's (J4). The
// disk is not, once it was claimed (J2). A ban stays, and a deletion is not over before the certificates are retired.
func (k *Kube) vacant(n *v1alpha1.AttestedNode) bool {
	switch {
	case n == nil || n.ShutOut():
		return false
	case n.Status.ReleasedAt != nil:
		return k.now().Sub(n.Status.ReleasedAt.Time) > k.life+holdMargin
	}
	return k.begun(n) && k.now().Sub(n.CreationTimestamp.Time) > ticketTime
}

// Undo takes back what Enrol wrote: the ticket no longer stands. What other tickets of the machine
// rely on, issued or on their way at any replica, stays; the last one that fails takes back the enrolment.
// It goes on when ctx has ended. What is left if the API server does not answer is cleaned by rule, see
// [Sweeper].
func (e *Enrolment) Undo(ctx context.Context) {
	ctx, cancel := undo(ctx)
	defer cancel()
	k := e.kube
	err := e.revert(ctx)
	if err == nil { // the list comes last: an enrolment that stays keeps its place there
		err = k.settle(ctx, e.node.Name, false)
	}
	if err != nil {
		k.log.ErrorContext(ctx, "a failed ticket could not be taken back; it is cleaned by rule later", "node", e.node.Name, "machine", e.node.Spec.MachineID, "err", err)
	}
}

// File notes, before it happens, that certificates are asked for. Every node may read a signed one in its
// request, so from then on a ticket that fails leaves its machine what a returned one does: name and disk,
// until the certificates have expired (J2, J4).
func (e *Enrolment) File() { e.filed = true }

func (e *Enrolment) revert(ctx context.Context) error {
	k := e.kube
	for range writeAttempts {
		n := &v1alpha1.AttestedNode{}
		err := k.cluster.Client.Get(ctx, client.ObjectKeyFromObject(e.node), n)
		if err == nil && n.UID == e.node.UID && n.Spec.MachineID == e.node.Spec.MachineID { // else the owner has replaced the machine
			err = e.revertOver(ctx, n)
		}
		if err == nil || apierrors.IsNotFound(err) {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return err
		}
	}
	return fmt.Errorf("AttestedNode %s changed %d times meanwhile", e.node.Name, writeAttempts)
}

// revertOver takes our ticket out of that very state of the enrolment.
func (e *Enrolment) revertOver(ctx context.Context, n *v1alpha1.AttestedNode) error {
	k, t := e.kube, n.Status.Ticket
	latest := t != nil && t.ID == e.ticket
	switch {
	case !latest && !e.counted && t == nil && e.created && n.Status.ReleasedAt == nil && !n.ShutOut():
		return k.delete(ctx, n) // no ticket came of it
	case !latest && !e.counted && ticketOf(n) == e.stood:
		return e.giveBack(ctx, n) // ours never stood
	case !latest && !e.counted || t == nil:
		return nil // nor did it, or it has been returned
	}
	left := standing(t) - 1
	if left == 0 && t.Enrolled && t.Reclaims == nil && !n.ShutOut() && !e.filed {
		return k.delete(ctx, n)
	}
	if latest {
		if err := e.giveBack(ctx, n); err != nil {
			return err
		}
		t = n.Status.Ticket
	}
	switch {
	case left > 0:
		t.Standing = left
		if e.filed && t.Enrolled {
			t.Reclaims = new(metav1.NewTime(k.now())) // for the last one that fails
		}
		if latest && e.replaced.Ticket != nil {
			t.ID, t.IssuedAt = e.replaced.Ticket.ID, e.replaced.Ticket.IssuedAt
		}
	default:
		n.Status.Ticket, n.Status.ReleasedAt = nil, t.Reclaims
		if e.filed && t.Enrolled {
			n.Status.ReleasedAt = new(metav1.NewTime(k.now()))
		}
	}
	return k.cluster.Client.Status().Update(ctx, n)
}

// giveBack takes out of an enrolment what the claim has added to it, if nobody has written it since. What it had before
// has been its own all the time.
func (e *Enrolment) giveBack(ctx context.Context, n *v1alpha1.AttestedNode) error {
	if e.before == nil || !specEqual(n.Spec, e.node.Spec) {
		return nil
	}
	if e.filed { // J4: a certificate for what goes may be out
		e.kube.setAddresses(n, e.before.Addresses)
	}
	n.Spec = *e.before.DeepCopy()
	return e.kube.cluster.Client.Update(ctx, n)
}

// delete removes that very state of n and no later one. It is for enrollments of which no certificate lives, so there is nothing
// to retire. If it is cut off in the middle, the finalizer is missing: the next ticket or sweep puts it back.
func (k *Kube) delete(ctx context.Context, n *v1alpha1.AttestedNode) error {
	n = n.DeepCopy()
	if n.Retires() {
		n.Finalizers = slices.DeleteFunc(n.Finalizers, func(f string) bool { return f == v1alpha1.RetireCertificates })
		if err := k.cluster.Client.Update(ctx, n); err != nil {
			return err
		}
	}
	return k.cluster.Client.Delete(ctx, n, client.Preconditions{UID: &n.UID, ResourceVersion: &n.ResourceVersion})
}

// Withdraw releases the enrolment that a returned ticket made. The machine must be the ticket's own
// (J1), and no Node may have come of it; else TICKET_UNKNOWN.
//
// The ticket's certificate and disk key are out, whatever the machine says. So its name is struck
// from those that may write at once, but name and disk stay the machine's own until the certificate
// has expired: else one machine could collect names and keys of disks (J2, J4).
func (k *Kube) Withdraw(ctx context.Context, m attest.MachineID, ticket string) (node string, err error) {
	unknown := attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "machine %s has no such ticket, or it is older than %s, or it was used", m, returnWithin)
	for _, n := range k.cluster.Nodes.ByMachine(m) {
		if t := n.Status.Ticket; t == nil || t.ID != ticket {
			continue
		}
		return n.Name, k.release(ctx, n, func(n *v1alpha1.AttestedNode) error {
			if t := n.Status.Ticket; t == nil || t.ID != ticket || k.nodes.has(n.Name) || k.now().Sub(t.IssuedAt.Time) > returnWithin {
				return unknown
			}
			return checkShutOut(n)
		})
	}
	return "", unknown
}

// release takes the ticket from an enrolment that fits, and strikes its node from those that may write.
// One that a ticket made is held for its machine until nothing of the ticket is of use; one that the
// owner made stays. It is a compare-and-swap: fits is asked again of what another replica wrote
// meanwhile. Its errors are refusals, among them those of fits; NOT_ENROLLED if it is gone.
func (k *Kube) release(ctx context.Context, n *v1alpha1.AttestedNode, fits func(*v1alpha1.AttestedNode) error) error {
	n = n.DeepCopy()
	what, uid := "write the status of AttestedNode "+n.Name, n.UID
	for range writeAttempts {
		if err := fits(n); err != nil {
			return err
		}
		if byTicket(n) {
			n.Status.ReleasedAt = new(metav1.NewTime(k.now()))
		}
		n.Status.Ticket = nil
		err := k.cluster.Client.Status().Update(ctx, n)
		if err == nil {
			return k.settle(ctx, n.Name, false)
		}
		if !apierrors.IsConflict(err) {
			return unavailable(what, err)
		}
		err = k.cluster.Client.Get(ctx, client.ObjectKeyFromObject(n), n)
		if apierrors.IsNotFound(err) || err == nil && n.UID != uid {
			return attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "AttestedNode %s is gone", n.Name)
		}
		if err != nil {
			return unavailable("read AttestedNode "+n.Name, err)
		}
	}
	return unavailable(what, fmt.Errorf("it changed %d times meanwhile", writeAttempts))
}
