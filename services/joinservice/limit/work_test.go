package limit

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// A thousand concurrent requests take a second each: no more than the slots are served at the same time, and all others are
// refused after the wait, with different pauses.
func TestOverloadIsRefusedEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slots, wait = 16, 5 * time.Second
		w := NewWork(slots, wait)
		var mu sync.Mutex
		now, most, served := 0, 0, 0
		pauses := map[time.Duration]bool{}
		var all sync.WaitGroup
		for range 1000 {
			all.Go(func() {
				began := time.Now()
				end, err := w.Begin(t.Context())
				if err != nil {
					pause := rpc.RetryAfterFrom(err)
					if waited := time.Since(began); attest.ReasonOf(err) != attestv1.Reason_REASON_BUSY || waited != wait || pause < wait || pause > 3*wait {
						t.Errorf("after %s: %v, to come again in %s", waited, err, pause)
					}
					mu.Lock()
					pauses[pause.Truncate(10*time.Millisecond)] = true
					mu.Unlock()
					return
				}
				mu.Lock()
				now++
				served, most = served+1, max(most, now)
				mu.Unlock()
				time.Sleep(time.Second) // by the bubble's clock
				mu.Lock()
				now--
				mu.Unlock()
				end()
			})
		}
		all.Wait()
		// These started at 0 s, 1 s … 4 s. At 5 s a slot becomes free at the moment when the others give up.
		if most != slots || served < 5*slots || served > 6*slots {
			t.Errorf("%d were served, %d at one time", served, most)
		}
		if len(pauses) < 300 {
			t.Errorf("%d requests came back in %d moments", 1000-served, len(pauses))
		}
		if end, err := w.Begin(t.Context()); err != nil {
			t.Errorf("with all slots free: %v", err)
		} else {
			end()
		}
	})
}

func TestACallerThatGivesUpHoldsNoSlot(t *testing.T) {
	w := NewWork(1, time.Hour)
	end, err := w.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Begin(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	end()
	if end, err = w.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	end()
}
