package access

import (
	"context"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/enrollment"
)

const (
	// clocksEvery is the minimum pause between two reads of the other control planes' Leases. It is longer than a kubelet's
	// renewal interval, so a Lease that is unchanged between two reads belongs to a control plane that is down.
	clocksEvery = 30 * time.Second
	// clocksLast is how long the result of a read is valid, clockRuns how long a control plane counts after its Lease has
	// changed.
	clocksLast, clockRuns = 10 * time.Minute, 3 * time.Minute
	// maxAhead bounds how far one clock that is ahead can move the times that others write.
	maxAhead = 30 * 24 * time.Hour
	// maxClocks bounds the number of control planes whose Leases are read.
	maxClocks = 16
)

// clocks estimates the difference between the clocks of the control planes and that of this process, by the Leases that
// their kubelets renew every ten seconds. A revoked certificate or a name expires only when it has expired by all clocks;
// new periods start at the latest clock (J4). So one wrong clock, of this control plane or another, does not let a revoked
// certificate write again. A cluster of one control plane has only its own clock.
type clocks struct {
	mu     sync.Mutex
	looked time.Time // by the monotonic clock
	of     map[string]peerClock
}

type peerClock struct {
	version string
	seen    time.Time // when it changed last, by the monotonic clock; zero if it was seen once
	offset  time.Duration
}

// Clock returns the earliest and the latest time of the control planes' clocks. Earliest is zero while they are not known.
func (a *List) Clock() enrollment.Clock {
	now := a.state.Now()
	out := enrollment.Clock{Earliest: now, Latest: now}
	names := a.controlPlanes()
	c := &a.clocks
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(names) > 1 && (c.looked.IsZero() || time.Since(c.looked) > clocksLast) {
		out.Earliest = time.Time{}
		return out
	}
	for _, name := range names {
		is, known := c.of[name]
		switch {
		case !known: // it has no Lease, or had none at the last read
		case is.seen.IsZero():
			out.Earliest = time.Time{} // it may be down: the next read shows that
		case time.Since(is.seen) < clockRuns:
			if at := now.Add(min(is.offset, maxAhead)); at.After(out.Latest) {
				out.Latest = at
			} else if at.Before(out.Earliest) {
				out.Earliest = at
			}
		}
	}
	return out
}

// LookAtClocks reads the Leases of the control planes, at most once in [clocksEvery].
func (a *List) LookAtClocks(ctx context.Context) {
	c := &a.clocks
	c.mu.Lock()
	due := c.looked.IsZero() || time.Since(c.looked) >= clocksEvery
	c.mu.Unlock()
	if !due || a.Get() == nil {
		return
	}
	found := map[string]*coordinationv1.Lease{}
	for _, name := range a.controlPlanes() {
		if len(found) == maxClocks {
			break
		}
		lease := &coordinationv1.Lease{}
		err := a.state.Cluster.Client.Get(ctx, client.ObjectKey{Namespace: corev1.NamespaceNodeLease, Name: name}, lease)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			a.state.Log.WarnContext(ctx, "the Lease of a control plane can't be read, so nothing ends meanwhile because time has passed", "node", name, "err", err)
			return
		case lease.Spec.RenewTime != nil:
			found[name] = lease
		}
	}
	now := a.state.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.looked = time.Now()
	next := map[string]peerClock{}
	for name, lease := range found {
		is, known := c.of[name]
		if known && is.version != lease.ResourceVersion {
			is.seen, is.offset = time.Now(), lease.Spec.RenewTime.Sub(now)
		} else if known && is.seen.IsZero() {
			is.seen = time.Now().Add(-clocksLast) // it is down: its Lease has not changed
		}
		is.version = lease.ResourceVersion
		next[name] = is
	}
	c.of = next
}
