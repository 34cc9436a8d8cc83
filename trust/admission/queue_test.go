package admission

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
