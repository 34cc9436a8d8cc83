package enroll

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// OwnerOf returns the machine that has a disk, as far as the informer has seen.
func (es *Enrollments) OwnerOf(disk string) string { return es.disks.of(disk) }

// SetFirst changes [Leases].First.
func (es *Enrollments) SetFirst(d time.Duration) { es.leases.First = d }

// ComesUp is comesUp.
func (es *Enrollments) ComesUp(last *v1alpha1.Boot, lease *coordinationv1.Lease, now time.Time) time.Duration {
	return es.comesUp(last, lease, now)
}

// WriteOver is writeOver.
func (es *Enrollments) WriteOver(ctx context.Context, c Claim, own *v1alpha1.AttestedNode) (*Enrollment, error) {
	return es.writeOver(ctx, c, own)
}

// Write is write.
func (es *Enrollments) Write(ctx context.Context, c Claim) (*Enrollment, error) {
	return es.write(ctx, c)
}

// CheckAgainst is check.
func (es *Enrollments) CheckAgainst(c Claim, own *v1alpha1.AttestedNode) error {
	return es.check(c, own)
}

// GiveUp is giveUp.
func (e *Enrollment) GiveUp(ctx context.Context) { e.giveUp(ctx) }
