package enroll

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// OwnerOf returns the machine that has a disk, as far as the informer has seen.
func (es *Enrollments) OwnerOf(disk string) string { return es.disks.ownerHint(disk) }

// SetFirst changes [LeaseTimings].First.
func (es *Enrollments) SetFirst(d time.Duration) { es.leases.First = d }

// StartupGraceLeft is startupGraceLeft.
func (es *Enrollments) StartupGraceLeft(last *v1alpha1.Boot, lease *coordinationv1.Lease, now time.Time) time.Duration {
	return es.startupGraceLeft(last, lease, now)
}

// ReplaceOrUpdate is replaceOrUpdate.
func (es *Enrollments) ReplaceOrUpdate(ctx context.Context, c Claim, own *v1alpha1.AttestedNode) (*PendingTicket, error) {
	return es.replaceOrUpdate(ctx, c, own)
}

// Write is write.
func (es *Enrollments) Write(ctx context.Context, c Claim) (*PendingTicket, error) {
	return es.write(ctx, c)
}

// CheckAgainst is check.
func (es *Enrollments) CheckAgainst(c Claim, own *v1alpha1.AttestedNode) error {
	return es.check(c, own)
}

// RollBack is rollBack.
func (e *PendingTicket) RollBack(ctx context.Context) { e.rollBack(ctx) }
