package enroll

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// returnWithin is the maximum age of a ticket that is returned: a machine that loses the race for its node lock knows
	// at once.
	returnWithin = 10 * time.Minute
	// HoldMargin is how much longer than its certificates a returned or failed ticket holds what it enrolled: for clocks
	// that differ, and for a renewal in progress.
	HoldMargin = 10 * time.Minute
)

// ReturnTicket marks the enrollment of a returned ticket as released. The ticket must be that of the machine (J1), and no Node
// may exist for it; otherwise it returns TICKET_UNKNOWN.
//
// The machine may still have the ticket's certificate and disk key. So its node may not write from now on, but name and
// disk stay the machine's until the certificate has expired: otherwise one machine could collect names and keys of disks
// (J2, J4).
func (es *Enrollments) ReturnTicket(ctx context.Context, m attest.MachineID, ticket string) (node string, err error) {
	unknown := attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "machine %s has no such ticket, or it is older than %s, or it was used", m, returnWithin)
	for _, n := range es.state.Cluster.Nodes.ByMachine(m) {
		if t := n.Status.Ticket; t == nil || t.ID != ticket {
			continue
		}
		n = n.DeepCopy()
		if err := es.WriteStatus(ctx, n, func(s *v1alpha1.AttestedNodeStatus) error {
			if t := s.Ticket; t == nil || t.ID != ticket || es.state.HasNode(n.Name) || es.state.Now().Sub(t.IssuedAt.Time) > returnWithin {
				return unknown
			}
			if err := access.CheckShutOut(n); err != nil {
				return err
			}
			s.Ticket, s.ReleasedAt = nil, new(metav1.NewTime(es.state.Now()))
			return nil
		}); err != nil {
			return n.Name, err
		}
		return n.Name, es.list.Settle(ctx, n.Name)
	}
	return "", unknown
}
