package enrollment

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

func TestConditionsFollowFromTheRest(t *testing.T) {
	verdict := func(accepted bool, reason string) func(*v1alpha1.AttestedNode) {
		return func(n *v1alpha1.AttestedNode) {
			n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: accepted, Reason: reason}
		}
	}
	suspended := nodeaccess.Entry{Suspended: true}
	revoked := func(allowed ...string) nodeaccess.Entry {
		return nodeaccess.Entry{Revoked: &nodeaccess.Revocation{Until: now.Add(time.Hour), Allowed: allowed}}
	}
	gone := func(n *v1alpha1.AttestedNode) { verdict(true, "ACCEPTED")(n); n.Status.Ticket = nil }
	for name, tt := range map[string]struct {
		change func(*v1alpha1.AttestedNode)
		have   nodeaccess.Entry
		want   [3]string // Accepted, Enrolled, Revoked: status and reason
	}{
		"a node":        {verdict(true, "ACCEPTED"), nodeaccess.Entry{}, [3]string{"True ACCEPTED", "True TicketIssued", "False NotRevoked"}},
		"one refused":   {verdict(false, "POLICY_REFUSED"), nodeaccess.Entry{}, [3]string{"False POLICY_REFUSED", "True TicketIssued", "False NotRevoked"}},
		"who has asked": {func(n *v1alpha1.AttestedNode) { n.Status.Ticket = nil }, nodeaccess.Entry{}, [3]string{"Unknown NoEvidence", "False WaitingForMachine", "False NotRevoked"}},
		"a ticket that is being made": {func(n *v1alpha1.AttestedNode) {
			n.Status.Ticket, n.Annotations = nil, map[string]string{v1alpha1.EnrolledByTicket: "true"}
		}, nodeaccess.Entry{}, [3]string{"Unknown NoEvidence", "False TicketPending", "False NotRevoked"}},
		"the first machine": {func(n *v1alpha1.AttestedNode) {
			n.Status.Ticket, n.Status.LastVerdict = nil, &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED"}
		}, nodeaccess.Entry{}, [3]string{"True ACCEPTED", "True FirstMachine", "False NotRevoked"}},
		"a returned ticket": {func(n *v1alpha1.AttestedNode) {
			n.Status.Ticket, n.Status.ReleasedAt = nil, &metav1.Time{Time: now}
		}, suspended, [3]string{"Unknown NoEvidence", "False TicketReturned", "True TicketReturned"}},
		"a ban that is not listed yet": {func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true }, nodeaccess.Entry{}, [3]string{"Unknown NoEvidence", "True TicketIssued", "False BannedPending"}},
		"a ban":                        {func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true }, suspended, [3]string{"Unknown NoEvidence", "True TicketIssued", "True Banned"}},
		"a removal":                    {func(n *v1alpha1.AttestedNode) { n.DeletionTimestamp = &metav1.Time{Time: now} }, suspended, [3]string{"Unknown NoEvidence", "True TicketIssued", "True Removed"}},
		"a machine whose certificates were revoked":          {gone, revoked(), [3]string{"True ACCEPTED", "False CertificatesRevoked", "True CertificatesRevoked"}},
		"a machine that has joined since":                    {verdict(true, "ACCEPTED"), revoked("X509SHA256=01"), [3]string{"True ACCEPTED", "True TicketIssued", "False NotRevoked"}},
		"a machine that will join after another one":         {func(n *v1alpha1.AttestedNode) { n.Status.Ticket = nil }, revoked(), [3]string{"Unknown NoEvidence", "False WaitingForMachine", "False NotRevoked"}},
		"a ban of one whose certificates were revoked first": {func(n *v1alpha1.AttestedNode) { gone(n); n.Spec.Banned = true }, nodeaccess.Entry{Suspended: true, Revoked: revoked().Revoked}, [3]string{"True ACCEPTED", "False CertificatesRevoked", "True Banned"}},
		"a ban that was lifted":                              {nil, suspended, [3]string{"Unknown NoEvidence", "True TicketIssued", "True AccessReturns"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(v1alpha1.RoleWorker, tt.change)
			n.Generation = 7
			if !SetConditions(n, tt.have) || SetConditions(n, tt.have) {
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
