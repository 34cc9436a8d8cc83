package limit

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/semaphore"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Work bounds how many requests use the Kubernetes API at the same time. If more machines ask than the API server can
// serve, the served requests still meet their deadlines, and the others get BUSY early. Without the bound, all of them
// would exceed their deadlines together, and be repeated. It is safe for concurrent use.
type Work struct {
	slots *semaphore.Weighted
	wait  time.Duration
}

// NewWork returns a Work with that many slots. A request waits for a slot for at most wait, in the order of arrival.
func NewWork(slots int64, wait time.Duration) *Work {
	return &Work{slots: semaphore.NewWeighted(slots), wait: wait}
}

// Begin waits for a slot, which the caller frees by end. It returns ctx's error, or BUSY if no slot was free in time. BUSY
// has a random pause of one to three times the wait, so that machines that were refused together do not return together.
func (w *Work) Begin(ctx context.Context) (end func(), err error) {
	limited, cancel := context.WithTimeout(ctx, w.wait)
	defer cancel()
	if err := w.slots.Acquire(limited, 1); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		pause := w.wait + rand.N(2*w.wait) //nolint:gosec // spreads load, protects nothing
		return nil, attest.RefuseFor(pause, attestv1.Reason_REASON_BUSY, "requests of other machines are being served, and none of them ended within %s", w.wait)
	}
	return func() { w.slots.Release(1) }, nil
}
