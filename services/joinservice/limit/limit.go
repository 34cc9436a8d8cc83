// Package limit bounds how often each machine gets something, and how much of it is made at one time.
//
// Think of it as one token bucket for each machine: so many at once, and one more every so often. What a joinservice grants
// costs it a record that is kept, and writes in the cluster; one machine that asks without end gets BUSY, and the others get what they ask for.
package limit

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/lru"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Rate is Burst at once, and one more after every Every.
type Rate struct {
	Burst int
	Every time.Duration
}

// Most returns how many of something one machine gets within d.
func (r Rate) Most(d time.Duration) int { return r.Burst + int(d/r.Every) }

// maxMachines bounds how many machines are remembered, about 1 MiB. Of more than that the one is forgotten that asked longest
// ago, which may then begin anew: a policy that accepts so many machines has rates in proportion.
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

// Take counts something that the machine is about to get at now, or refuses it with BUSY and the time after which the machine
// gets it. What was refused is not counted.
func (b *ByMachine[K]) Take(machine K, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.of(machine).ReserveN(now, 1)
	wait := r.DelayFrom(now)
	if wait == 0 {
		return nil
	}
	r.CancelAt(now)
	wait = (wait + time.Millisecond - 1).Truncate(time.Millisecond) // up, since the bucket counts in fractions
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
