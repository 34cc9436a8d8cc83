package peerlimit

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// One source asks again and again; another source, which comes later, waits for one piece of work.
func TestWhoWasServedLongestAgoIsNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 8, PerSource: 4})
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		ask := func(n int) {
			wg.Go(func() {
				if err := q.Do(t.Context(), source(n), func() error {
					time.Sleep(time.Second)
					mu.Lock()
					defer mu.Unlock()
					order = append(order, n)
					return nil
				}); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		for range 4 {
			ask(1)
		}
		ask(2)
		ask(3)
		wg.Wait()
		if want := []int{1, 2, 3, 1, 1, 1}; !slices.Equal(order, want) {
			t.Errorf("served %v, want %v", order, want)
		}
		if len(q.count) != 0 || q.busy != 0 {
			t.Errorf("%v, %d busy: something is left", q.count, q.busy)
		}
	})
}

func TestAQueueRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 8, PerSource: 8, Rest: 3})
		began := time.Now()
		for range 4 {
			if err := q.Do(t.Context(), source(1), func() error { time.Sleep(time.Second); return nil }); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took != 13*time.Second {
			t.Errorf("4 s of work took %s, want 13 s", took)
		}
		time.Sleep(time.Minute)
	})
}

// Many more machines than can be served in time ask, and ask again after a refusal. What is done is done for callers that still
// have time for what follows: nearly all of the capacity is of use. Without the estimate it was nothing: the next caller was always
// the one whose time was almost over.
func TestWorkUnderOverloadIsNotForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const (
			machines = 500
			takes    = 150 * time.Millisecond // an activation by a TPM
			patience = 10 * time.Second       // of one exchange
			follows  = time.Second            // what remains of it afterwards
		)
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 256, PerSource: 64})
		var mu sync.Mutex
		worked, late, last := 0, 0, time.Now()
		began := last
		var all sync.WaitGroup
		for i := range machines {
			all.Go(func() {
				for {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					deadline, _ := ctx.Deadline()
					err := q.Do(ctx, source(i), func() error { time.Sleep(takes); return nil })
					left := time.Until(deadline)
					cancel()
					if err == nil {
						mu.Lock()
						worked++
						if left < follows {
							late++
						} else {
							last = time.Now()
						}
						mu.Unlock()
						if left >= follows {
							return
						}
					}
					time.Sleep(time.Second + time.Duration(i)*7*time.Millisecond)
				}
			})
		}
		all.Wait()
		if took, least := last.Sub(began), machines*takes; late > machines/50 || took > least*5/4 {
			t.Errorf("all are served after %s of at least %s, and %d of %d pieces of work came too late", took, least, late, worked)
		}
		if len(q.count) != 0 || len(q.waiting) != 0 || q.busy != 0 {
			t.Errorf("%v, %d waiting, %d busy: something is left", q.count, len(q.waiting), q.busy)
		}
	})
}

// One source with many callers does not make the others' turn come late: each source has its turn first.
func TestTheEstimateCountsSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 256, PerSource: 64})
		short := func(n int) error {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			return q.Do(ctx, source(n), func() error { time.Sleep(time.Second); return nil })
		}
		if err := short(1); err != nil { // the queue learns how long work takes
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for range 40 {
			all.Go(func() {
				_ = q.Do(t.Context(), source(1), func() error { time.Sleep(time.Second); return nil })
			})
		}
		synctest.Wait()
		if err := short(1); !errors.Is(err, ErrBusy) {
			t.Errorf("a caller behind 40 of its own source: %v", err)
		}
		if err := short(2); err != nil {
			t.Errorf("a caller of another source: %v", err)
		}
		all.Wait()
	})
}

// Work that takes more than half of a caller's time: a source that asks without end does not keep out one that comes seldom, as
// the owner's program does while a machine with a slow TPM is flooded.
func TestWhoIsNextMayWaitForSlowWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 64, PerSource: 2, Rest: 1})
		slow := func() error { time.Sleep(3 * time.Second); return nil }
		ctx, stop := context.WithCancel(t.Context())
		var flood sync.WaitGroup
		for range 4 {
			flood.Go(func() {
				for ctx.Err() == nil {
					one, cancel := context.WithTimeout(ctx, 9*time.Second)
					_ = q.Do(one, source(1), slow)
					cancel()
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
		time.Sleep(time.Minute)
		for range 20 {
			time.Sleep(20*time.Second + 777*time.Millisecond)
			one, cancel := context.WithTimeout(t.Context(), 9*time.Second)
			if err := q.Do(one, source(2), slow); err != nil {
				t.Errorf("the one that comes seldom: %v", err)
			}
			cancel()
		}
		stop()
		flood.Wait()
		time.Sleep(time.Minute)
	})
}

// Work that fails at once, as of garbage, and one stall do not mislead the estimate.
func TestTheEstimateIsOfWorkThatSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 64, PerSource: 64})
		do := func(takes time.Duration, err error) {
			_ = q.Do(t.Context(), source(1), func() error { time.Sleep(takes); return err })
		}
		for range 20 {
			do(time.Second, nil)
		}
		for range 100 {
			do(0, errors.New("garbage"))
		}
		if q.usual != time.Second {
			t.Errorf("%s after garbage", q.usual)
		}
		do(time.Hour, nil)
		if q.usual > 2*time.Second {
			t.Errorf("%s after a stall", q.usual)
		}
	})
}

func TestAQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(QueueConfig{Slots: 1, Waiting: 2, PerSource: 2})
		ctx, cancel := context.WithCancel(t.Context())
		results := make(chan error, 10)
		ask := func(n int) {
			go func() {
				results <- q.Do(ctx, source(n), func() error { <-ctx.Done(); return nil })
			}()
			synctest.Wait()
		}
		ask(1) // works
		ask(1) // waits
		ask(1)
		if err := <-results; !errors.Is(err, ErrSourceFull) {
			t.Errorf("a third of one source: %v", err)
		}
		ask(2) // waits
		ask(3) // was served no earlier than 2, but earlier than 1, which loses its place
		if err := <-results; !errors.Is(err, ErrBusy) {
			t.Errorf("the source that was served last: %v", err)
		}
		ask(4)
		if err := <-results; !errors.Is(err, ErrBusy) {
			t.Errorf("one too many: %v", err)
		}
		cancel()
		for range 3 {
			if err := <-results; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		if len(q.count) != 0 || len(q.waiting) != 0 || q.busy != 0 {
			t.Errorf("%v, %d waiting, %d busy: something is left", q.count, len(q.waiting), q.busy)
		}
	})
}
