// Package limit bounds how often each machine is granted something, and how many requests are served at the same time.
//
// Each machine has a token bucket: a burst, and one more token per interval. Each grant of a joinservice costs a permanent
// record, and writes in the cluster; a machine that asks without end gets BUSY, and the others are served.
package limit

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/lru"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Rate allows Burst grants at once, and one more after every Every.
type Rate struct {
	Burst int
	Every time.Duration
}

// Most returns the maximum number of grants of one machine within d.
func (r Rate) Most(d time.Duration) int { return r.Burst + int(d/r.Every) }

// maxMachines limits the number of machines in memory (about 1 MiB). Above that, the machine with the oldest request is
// dropped, and starts again with a full burst: a policy that accepts that many machines has rates in proportion.
const maxMachines = 4096

// ByMachine keeps a Rate for each machine, by a machine ID or a node's name. It is safe for concurrent use.
type ByMachine[K comparable] struct {
	rate Rate

	mu       sync.Mutex
	machines *lru.Cache // of *rate.Limiter by K
}

// New returns a ByMachine that allows each machine r.
func New[K comparable](r Rate) *ByMachine[K] {
	return &ByMachine[K]{rate: r, machines: lru.New(maxMachines)}
}

// Take counts a grant to the machine at now, or returns BUSY with the time until the machine may ask again. A refused
// request is not counted.
func (b *ByMachine[K]) Take(machine K, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.of(machine).ReserveN(now, 1)
	wait := r.DelayFrom(now)
	if wait == 0 {
		return nil
	}
	r.CancelAt(now)
	wait = (wait + time.Millisecond - 1).Truncate(time.Millisecond) // rounded up, since the bucket counts in fractions
	return attest.RefuseFor(wait, attestv1.Reason_REASON_BUSY, "the machine had %d at once, and gets one more every %s", b.rate.Burst, b.rate.Every)
}

// of returns the machine's bucket.
func (b *ByMachine[K]) of(machine K) *rate.Limiter {
	if v, ok := b.machines.Get(machine); ok {
		return v.(*rate.Limiter) //nolint:forcetypeassert // nothing else is put in
	}
	l := rate.NewLimiter(rate.Every(b.rate.Every), b.rate.Burst)
	b.machines.Add(machine, l)
	return l
}
