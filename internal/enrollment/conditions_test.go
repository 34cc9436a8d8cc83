package enrollment

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

func TestConditionsFollowFromTheRest(t *testing.T) {
	verdict := func(accepted bool, reason string) func(*v1alpha1.AttestedNode) {
		return func(n *v1alpha1.AttestedNode) {
			n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: accepted, Reason: reason}
		}
	}
	for name, tt := range map[string]struct {
		change    func(*v1alpha1.AttestedNode)
		suspended bool
		want      [3]string // Accepted, Enrolled, Revoked: status and reason
	}{
		"a node":        {verdict(true, "ACCEPTED"), false, [3]string{"True ACCEPTED", "True TicketIssued", "False NotRevoked"}},
		"one refused":   {verdict(false, "POLICY_REFUSED"), false, [3]string{"False POLICY_REFUSED", "True TicketIssued", "False NotRevoked"}},
		"who has asked": {func(n *v1alpha1.AttestedNode) { n.Status.Ticket = nil }, false, [3]string{"Unknown NoEvidence", "False WaitingForMachine", "False NotRevoked"}},
		"a ticket that is being made": {func(n *v1alpha1.AttestedNode) {
			n.Status.Ticket, n.Annotations = nil, map[string]string{v1alpha1.EnrolledByTicket: "true"}
		}, false, [3]string{"Unknown NoEvidence", "False TicketPending", "False NotRevoked"}},
		"the first machine": {func(n *v1alpha1.AttestedNode) {
			n.Status.Ticket, n.Status.LastVerdict = nil, &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED"}
		}, false, [3]string{"True ACCEPTED", "True FirstMachine", "False NotRevoked"}},
		"a returned ticket": {func(n *v1alpha1.AttestedNode) {
			n.Status.Ticket, n.Status.ReleasedAt = nil, &metav1.Time{Time: now}
		}, true, [3]string{"Unknown NoEvidence", "False TicketReturned", "True TicketReturned"}},
		"a ban that is not listed yet": {func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true }, false, [3]string{"Unknown NoEvidence", "True TicketIssued", "False BannedPending"}},
		"a ban":                        {func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true }, true, [3]string{"Unknown NoEvidence", "True TicketIssued", "True Banned"}},
		"a removal":                    {func(n *v1alpha1.AttestedNode) { n.DeletionTimestamp = &metav1.Time{Time: now} }, true, [3]string{"Unknown NoEvidence", "True TicketIssued", "True Removed"}},
		"a ban that was lifted":        {nil, true, [3]string{"Unknown NoEvidence", "True TicketIssued", "True AccessReturns"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(v1alpha1.RoleWorker, tt.change)
			n.Generation = 7
			if !SetConditions(n, tt.suspended) || SetConditions(n, tt.suspended) {
				t.Error("the first time changes them, the second time does not")
			}
			for i, kind := range []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionEnrolled, v1alpha1.ConditionRevoked} {
				c := meta.FindStatusCondition(n.Status.Conditions, kind)
				if c == nil || string(c.Status)+" "+c.Reason != tt.want[i] || c.ObservedGeneration != 7 || c.Message == "" {
					t.Errorf("%s: %+v, want %s", kind, c, tt.want[i])
				}
			}
		})
	}
}
