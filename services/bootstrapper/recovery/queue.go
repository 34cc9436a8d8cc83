package recovery

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxWrong is how many wrong keys a source may send at once.
	maxWrong = 5
	// perWrong is the time after which it may send one more.
	perWrong = 12 * time.Second
	// betweenAttempts is the least time between a wrong key and the next attempt of any source: the machine's own work needs the processor.
	betweenAttempts = time.Second
	// maxWaiting is how many calls wait in the queue at one time.
	maxWaiting = 16
	// comeBack is the retry hint for a source that is refused as BUSY; placeKept is how long its position is kept.
	comeBack  = 2 * time.Second
	placeKept = time.Minute
	// maxSources bounds the sources in memory.
	maxSources = 4096
)

// queue decides which call may try a key next. It does not depend on RPC.
//
// One key is tried at a time. A source has one call that waits or is tried, and maxWrong wrong keys a minute. The source that asked first goes first.
// Its position counts from its first call since its last attempt, even if that call was refused because the queue was full. So it precedes all sources that
// came later: many sources can delay the owner by one attempt each, but not lock the owner out.
type queue struct {
	now   func() time.Time
	pause time.Duration

	mu      sync.Mutex
	busy    bool
	waiting []*slot
	sources map[netip.Prefix]*source
}

// source is the state of a network address.
type source struct {
	left    float64   // wrong keys that it may send now
	counted time.Time // the time of left
	present bool      // it has a call that waits or is tried
	since   time.Time // its first call since its last attempt; zero if it does not wait
	asked   time.Time // its last call
}

// slot is a call that waits. It receives exactly one value: nil if it may try, or an error.
type slot struct {
	source *source
	ready  chan error
}

func newQueue(now func() time.Time, pause time.Duration) *queue {
	return &queue{now: now, pause: pause, sources: map[netip.Prefix]*source{}}
}

// take waits until a call from that address may try a key; it calls waits if the call has to wait. The caller calls done once, with whether the key was
// wrong.
func (q *queue) take(ctx context.Context, from netip.Prefix, waits func()) (done func(wrong bool), err error) {
	s, mine, err := q.enter(from)
	if err != nil {
		return nil, err
	}
	if mine == nil {
		return func(wrong bool) { q.leave(s, wrong) }, nil
	}
	waits()
	select {
	case err = <-mine.ready:
	case <-ctx.Done():
		err = q.giveUp(mine, ctx.Err())
	}
	if err != nil {
		return nil, err
	}
	return func(wrong bool) { q.leave(s, wrong) }, nil
}

// enter returns a nil slot for a call that may try at once.
func (q *queue) enter(from netip.Prefix) (*source, *slot, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	s := q.sources[from]
	if s == nil {
		q.makeRoom(now)
		s = &source{left: maxWrong, counted: now}
		q.sources[from] = s
	}
	s.count(now)
	if s.left < 1 {
		wait := time.Duration((1 - s.left) * float64(perWrong))
		return nil, nil, attest.RefuseFor(wait, attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, "%s has sent %d wrong keys, and may send one every %s", from, maxWrong, perWrong)
	}
	if s.present {
		return nil, nil, attest.RefuseFor(comeBack, attestv1.Reason_REASON_BUSY, "another call from %s waits already", from)
	}
	if s.since.IsZero() || now.Sub(s.asked) > placeKept {
		s.since = now
	}
	s.asked = now
	if !q.busy {
		q.busy, s.present = true, true
		return s, nil, nil
	}
	if len(q.waiting) >= maxWaiting {
		// waiting is sorted by since, so the last one came last.
		last := q.waiting[len(q.waiting)-1]
		if !s.since.Before(last.source.since) {
			return nil, nil, attest.RefuseFor(comeBack, attestv1.Reason_REASON_BUSY, "%d calls wait already", maxWaiting)
		}
		q.waiting = q.waiting[:len(q.waiting)-1]
		last.source.present = false
		last.ready <- attest.RefuseFor(comeBack, attestv1.Reason_REASON_BUSY, "the queue is full: a source that asked earlier has taken this place")
	}
	mine := &slot{source: s, ready: make(chan error, 1)}
	s.present = true
	at, _ := slices.BinarySearchFunc(q.waiting, mine, func(a, b *slot) int {
		if a.source.since.After(b.source.since) {
			return 1
		}
		return -1 // of two with the same time, the one in the queue stays before the other
	})
	q.waiting = slices.Insert(q.waiting, at, mine)
	return s, mine, nil
}

// giveUp removes the call of a disconnected client from the queue, or passes its permission to the next call.
func (q *queue) giveUp(mine *slot, why error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.waiting, mine); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		mine.source.present = false
		return why
	}
	if err := <-mine.ready; err != nil { // refused before it left the queue
		return err
	}
	mine.source.present = false
	q.next()
	return why
}

// leave ends an attempt.
func (q *queue) leave(s *source, wrong bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s.present, s.since = false, time.Time{}
	if wrong {
		s.count(q.now())
		s.left--
	}
	if !wrong || q.pause <= 0 {
		q.next()
		return
	}
	time.AfterFunc(q.pause, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.next()
	})
}

// next is called with the lock held.
func (q *queue) next() {
	if len(q.waiting) == 0 {
		q.busy = false
		return
	}
	first := q.waiting[0]
	q.waiting = slices.Delete(q.waiting, 0, 1)
	first.ready <- nil
}

// count adds the wrong keys that the source may send since counted.
func (s *source) count(now time.Time) {
	if d := now.Sub(s.counted); d > 0 {
		s.left = min(maxWrong, s.left+d.Seconds()/perWrong.Seconds())
		s.counted = now
	}
}

// makeRoom removes sources that are idle and have all attempts left. If there are none, it removes the most recent source, which loses its position or
// regains attempts.
func (q *queue) makeRoom(now time.Time) {
	if len(q.sources) < maxSources {
		return
	}
	var last netip.Prefix
	var latest *source
	for at, s := range q.sources {
		s.count(now)
		switch {
		case s.present:
		case s.left >= maxWrong && now.Sub(s.asked) > placeKept:
			delete(q.sources, at)
		case latest == nil || s.asked.After(latest.asked):
			last, latest = at, s
		}
	}
	if len(q.sources) >= maxSources {
		delete(q.sources, last)
	}
}
