package peerlimit

import (
	"context"
	"errors"
	"sync"
	"time"
)

// ErrBusy means that the maximum number of callers already waits, or that this caller would have to wait too long.
var ErrBusy = errors.New("too many wait already")

// Queue lets sources do work that costs processor or TPM time, a few at a time. The next slot goes
// to the waiting source that was served the longest ago, and within one source to the caller that
// came first. So a source that comes often waits for sources that come seldom.
//
// A caller that would wait for more than half of its time is refused at once. Otherwise, with more
// callers than can be served in time, those whose time is almost over would always be next, and the
// work for each of them would be for nothing.
type Queue struct {
	slots, waitingMax, perSource int
	rest                         float64
	now                          func() time.Time

	mu      sync.Mutex
	busy    int
	waiting []*waiter
	count   map[Source]int // callers that wait or work
	served  map[Source]time.Time
	usual   time.Duration // how long work has kept a slot lately, with its rest; 0 if there was none
}

// waiter receives nil when it may work, or ErrBusy if its place goes to another source.
type waiter struct {
	source Source
	ready  chan error
}

// QueueConfig configures a Queue. All fields except Rest are required.
type QueueConfig struct {
	// Slots is how many callers work at one time.
	Slots int
	// Waiting is how many callers may wait in all, PerSource how many of one source may wait or
	// work.
	Waiting, PerSource int
	// Rest is how long a slot stays free after work, as a multiple of the work's duration: with 3
	// the work takes at most a quarter of the time.
	Rest float64
}

// NewQueue returns a Queue.
func NewQueue(c QueueConfig) *Queue {
	return &Queue{
		slots: c.Slots, waitingMax: c.Waiting, perSource: c.PerSource, rest: c.Rest, now: time.Now,
		count: make(map[Source]int), served: make(map[Source]time.Time),
	}
}

// Do calls work when the source gets a slot. It returns work's error; ctx's error if ctx ended
// before; [ErrSourceFull] if the largest permitted number of the source's callers waits or works
// already; or [ErrBusy] if all places to wait are taken by sources that were served no later than
// this one, or if the wait would probably take more than half of the time until ctx's deadline.
func (q *Queue) Do(ctx context.Context, source Source, work func() error) error {
	deadline, _ := ctx.Deadline()
	w, err := q.enter(source, deadline)
	if err != nil {
		return err
	}
	select {
	case err := <-w.ready:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		if q.leave(w) {
			return ctx.Err()
		}
		if <-w.ready == nil { // it got the slot at the same moment: pass it on
			q.done(source, 0)
		}
		return ctx.Err()
	}
	began := q.now()
	defer func() {
		took := q.now().Sub(began)
		if err == nil {
			q.learn(took)
		}
		q.done(source, took)
	}()
	err = work()
	return err
}

// learn adds a duration of work to the estimate, in which the last eight weigh about two thirds. Failed work does not change
// the estimate, and delayed work changes it little.
func (q *Queue) learn(took time.Duration) {
	kept := took + time.Duration(float64(took)*q.rest)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.usual == 0 {
		q.usual = kept
		return
	}
	q.usual += (min(kept, 4*q.usual) - q.usual) / 8
}

// wait estimates how long a caller of the source would wait for those that come before it. The work that keeps the slots now is
// not counted: who is next may wait, however slow the work is. It is called with the lock held.
func (q *Queue) wait(source Source) time.Duration {
	before, own, seen := 0, q.served[source], map[Source]bool{}
	for _, w := range q.waiting {
		switch {
		case w.source == source:
			before++
		case !seen[w.source] && !q.served[w.source].After(own): // once served, a source comes after this one
			seen[w.source] = true
			before++
		}
	}
	return q.usual * time.Duration(before) / time.Duration(q.slots)
}

func (q *Queue) enter(source Source, deadline time.Time) (*waiter, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	w := &waiter{source: source, ready: make(chan error, 1)}
	if q.count[source] >= q.perSource {
		return nil, ErrSourceFull
	}
	if !deadline.IsZero() && q.wait(source) > deadline.Sub(q.now())/2 {
		return nil, ErrBusy
	}
	if q.busy >= q.slots && len(q.waiting) >= q.waitingMax && !q.makeRoom(source) {
		return nil, ErrBusy
	}
	q.count[source]++
	q.waiting = append(q.waiting, w)
	q.grant()
	return w, nil
}

// makeRoom removes the waiting caller whose source was served last, if that was later than this
// source.
func (q *Queue) makeRoom(source Source) bool {
	last := 0
	for i, w := range q.waiting {
		if !q.served[w.source].Before(q.served[q.waiting[last].source]) {
			last = i
		}
	}
	w := q.waiting[last]
	if !q.served[source].Before(q.served[w.source]) {
		return false
	}
	q.waiting = append(q.waiting[:last], q.waiting[last+1:]...)
	q.discount(w.source)
	w.ready <- ErrBusy
	return true
}

// leave reports whether w still waited.
func (q *Queue) leave(w *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, other := range q.waiting {
		if other == w {
			q.waiting = append(q.waiting[:i], q.waiting[i+1:]...)
			q.discount(w.source)
			return true
		}
	}
	return false
}

func (q *Queue) discount(source Source) {
	if q.count[source]--; q.count[source] == 0 {
		delete(q.count, source)
	}
}

// done frees a slot after its rest.
func (q *Queue) done(source Source, took time.Duration) {
	q.mu.Lock()
	q.discount(source)
	q.mu.Unlock()
	free := func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.busy--
		q.grant()
	}
	if rest := time.Duration(float64(took) * q.rest); rest > 0 {
		time.AfterFunc(rest, free)
		return
	}
	free()
}

// grant gives free slots to waiting callers. It is called with the lock held.
func (q *Queue) grant() {
	for q.busy < q.slots && len(q.waiting) > 0 {
		next := 0
		for i, w := range q.waiting {
			if q.served[w.source].Before(q.served[q.waiting[next].source]) {
				next = i
			}
		}
		w := q.waiting[next]
		q.waiting = append(q.waiting[:next], q.waiting[next+1:]...)
		q.remember(w.source)
		q.busy++
		w.ready <- nil
	}
}

// remember records that a source is served now. It is called with the lock held.
func (q *Queue) remember(source Source) {
	now := q.now()
	if len(q.served) >= maxSources {
		for s, at := range q.served {
			if now.Sub(at) > time.Minute {
				delete(q.served, s)
			}
		}
		if len(q.served) >= maxSources {
			clear(q.served)
		}
	}
	q.served[source] = now
}
