// Package retry waits between attempts: exponentially longer, with jitter so that machines that failed together don't
// return together, and never shorter than the server requested.
package retry

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff computes the pauses of one series of attempts. Its zero value is not usable.
type Backoff struct {
	// Min is the upper limit of the first pause, Max that of all later ones.
	Min, Max time.Duration

	attempts int
}

// Next returns the next pause: a random time between half and all of Min doubled once for each call, at most Max. A larger
// hint replaces it, with up to a quarter of jitter added.
func (b *Backoff) Next(hint time.Duration) time.Duration {
	d := b.Min
	for range b.attempts {
		if d >= b.Max {
			break
		}
		d *= 2
	}
	d = min(d, b.Max)
	b.attempts++
	d -= jitter(d / 2)
	if hint > d {
		return hint + jitter(hint/4)
	}
	return d
}

// Reset starts a new series.
func (b *Backoff) Reset() { b.attempts = 0 }

// Wait sleeps for d. It returns early with ctx's cause if ctx ends.
func Wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func jitter(n time.Duration) time.Duration {
	if n <= 0 {
		return 0
	}
	return rand.N(n) //nolint:gosec // spreads load, protects nothing
}
