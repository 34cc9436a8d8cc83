package enrollment

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// Locked reports whether the machine of an enrollment still has certificates of the time before the name's were revoked, and
// none that may write: have is the list's entry of the name. Its machine attests, and its kubelet writes nothing.
func Locked(n *v1alpha1.AttestedNode, have nodeaccess.Entry) bool {
	return have.Revoked != nil && len(have.Revoked.Allowed) == 0 && Certified(n)
}

// SetConditions sets the conditions Accepted, Enrolled and Revoked from the other fields of the AttestedNode, and reports
// whether one of them changed. have is the list's entry of the name. No decision depends on conditions: they are for people
// and for kubectl wait.
func SetConditions(n *v1alpha1.AttestedNode, have nodeaccess.Entry) (changed bool) {
	for _, c := range []metav1.Condition{accepted(n), enrolled(n, have), revoked(n, have)} {
		c.ObservedGeneration = n.Generation
		changed = meta.SetStatusCondition(&n.Status.Conditions, c) || changed
	}
	return changed
}

func condition(kind string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message}
}

func accepted(n *v1alpha1.AttestedNode) metav1.Condition {
	switch v := n.Status.LastVerdict; {
	case v == nil:
		return condition(v1alpha1.ConditionAccepted, metav1.ConditionUnknown, "NoEvidence", "no evidence of the machine was appraised yet")
	case v.Accepted:
		return condition(v1alpha1.ConditionAccepted, metav1.ConditionTrue, v.Reason, fmt.Sprintf("the policy with serial %d accepts the machine's evidence", n.Status.PolicySerial))
	default:
		return condition(v1alpha1.ConditionAccepted, metav1.ConditionFalse, v.Reason, "the machine's evidence was refused: docs/reason-codes.md has the remedy for "+v.Reason)
	}
}

func enrolled(n *v1alpha1.AttestedNode, have nodeaccess.Entry) metav1.Condition {
	t := n.Status.Ticket
	switch {
	case n.Status.ReleasedAt != nil:
		return condition(v1alpha1.ConditionEnrolled, metav1.ConditionFalse, "TicketReturned", "the machine returned its join ticket at "+n.Status.ReleasedAt.UTC().Format(time.RFC3339))
	case t != nil:
		return condition(v1alpha1.ConditionEnrolled, metav1.ConditionTrue, "TicketIssued", "join ticket "+t.ID+" was issued at "+t.IssuedAt.UTC().Format(time.RFC3339))
	case Locked(n, have):
		return condition(v1alpha1.ConditionEnrolled, metav1.ConditionFalse, "CertificatesRevoked", "the machine attests as one that was the node before muster replace or forget, and has got no certificates since")
	case Certified(n):
		return condition(v1alpha1.ConditionEnrolled, metav1.ConditionTrue, "FirstMachine", "the machine made the cluster, or was in it when its owner enrolled it")
	case ByTicket(n):
		return condition(v1alpha1.ConditionEnrolled, metav1.ConditionFalse, "TicketPending", "a join ticket is being made; if that fails, the machine asks again")
	default:
		return condition(v1alpha1.ConditionEnrolled, metav1.ConditionFalse, "WaitingForMachine", "the owner has enrolled the machine, and it has not asked for a join ticket yet")
	}
}

func revoked(n *v1alpha1.AttestedNode, have nodeaccess.Entry) metav1.Condition {
	var reason, message string
	switch {
	case n.DeletionTimestamp != nil:
		reason, message = "Removed", "the enrollment is being removed"
	case n.Spec.Banned:
		reason, message = "Banned", "the machine is banned"
	case n.Status.ReleasedAt != nil:
		reason, message = "TicketReturned", "the machine has returned its join ticket"
	case have.Suspended:
		return condition(v1alpha1.ConditionRevoked, metav1.ConditionTrue, "AccessReturns", "the node may not write to the API yet: joinservice is about to let it")
	case Locked(n, have):
		return condition(v1alpha1.ConditionRevoked, metav1.ConditionTrue, "CertificatesRevoked", "the machine's certificates were revoked by muster replace or forget, and it has no newer ones: its node may not write to the API. muster status shows the remedy")
	default:
		return condition(v1alpha1.ConditionRevoked, metav1.ConditionFalse, "NotRevoked", "no suspension or revocation of the machine that is enrolled is recorded")
	}
	if !have.Suspended {
		return condition(v1alpha1.ConditionRevoked, metav1.ConditionFalse, reason+"Pending", message+"; that its node may not write to the API is about to be listed")
	}
	return condition(v1alpha1.ConditionRevoked, metav1.ConditionTrue, reason, message+": its node may not write to the API")
}
