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
	// perWrong is how long it takes until it may send one more.
	perWrong = 12 * time.Second
	// betweenTries is the least time between a wrong key and the next try, whoever sends it: the processor
	// belongs to the machine's own work.
	betweenAttempts = time.Second
	// maxWaiting is how many calls wait for their turn at one time.
	maxWaiting = 16
	// comeBack is what a source that finds no place is asked to wait; placeKept is for how long its place
	// is kept.
	comeBack  = 2 * time.Second
	placeKept = time.Minute
	// maxSources bounds the memory.
	maxSources = 4096
)

// turns decides who may try a key next. It knows nothing of RPC.
//
// One key is tried at a time. A source has one call that waits or is tried, and maxWrong wrong keys
// by the minute. Who asked first goes first, by source, and what counts is when it first asked since its
// last try, even if it was sent away since: so a source that comes back passes all that came
// after it, and many sources together can delay the owner by one try each, not keep it out.
type turns struct {
	now   func() time.Time
	pause time.Duration

	mu      sync.Mutex
	busy    bool
	waiting []*turn
	sources map[netip.Prefix]*source
}

// source is what is remembered of a network address.
type source struct {
	left    float64   // wrong keys that it may send now
	counted time.Time // when left was that
	present bool      // a call of it waits or is tried
	since   time.Time // when it first asked since its last try; zero: it does not wait
	asked   time.Time // when it asked last
}

// turn is a call that waits. Exactly one thing is sent to it: nil if it may try, else why not.
type turn struct {
	source *source
	ready  chan error
}

func newQueue(now func() time.Time, pause time.Duration) *turns {
	return &turns{now: now, pause: pause, sources: map[netip.Prefix]*source{}}
}

// take waits for the turn of a call from that address; waits is called if it is not now. Who gets it
// calls done once, and says whether the key was wrong.
func (t *turns) take(ctx context.Context, from netip.Prefix, waits func()) (done func(wrong bool), err error) {
	s, mine, err := t.enter(from)
	if err != nil {
		return nil, err
	}
	if mine == nil {
		return func(wrong bool) { t.leave(s, wrong) }, nil
	}
	waits()
	select {
	case err = <-mine.ready:
	case <-ctx.Done():
		err = t.giveUp(mine, ctx.Err())
	}
	if err != nil {
		return nil, err
	}
	return func(wrong bool) { t.leave(s, wrong) }, nil
}

// enter gives a nil turn to a call that may try at once.
func (t *turns) enter(from netip.Prefix) (*source, *turn, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	s := t.sources[from]
	if s == nil {
		t.makeRoom(now)
		s = &source{left: maxWrong, counted: now}
		t.sources[from] = s
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
	if !t.busy {
		t.busy, s.present = true, true
		return s, nil, nil
	}
	if len(t.waiting) >= maxWaiting {
		// waiting is in the order of since, so the last one came last.
		last := t.waiting[len(t.waiting)-1]
		if !s.since.Before(last.source.since) {
			return nil, nil, attest.RefuseFor(comeBack, attestv1.Reason_REASON_BUSY, "%d calls wait already", maxWaiting)
		}
		t.waiting = t.waiting[:len(t.waiting)-1]
		last.source.present = false
		last.ready <- attest.RefuseFor(comeBack, attestv1.Reason_REASON_BUSY, "a caller that came before has taken the place in the queue")
	}
	mine := &turn{source: s, ready: make(chan error, 1)}
	s.present = true
	at, _ := slices.BinarySearchFunc(t.waiting, mine, func(a, b *turn) int {
		if a.source.since.After(b.source.since) {
			return 1
		}
		return -1 // of two that asked at the same time, who is there stays before
	})
	t.waiting = slices.Insert(t.waiting, at, mine)
	return s, mine, nil
}

// giveUp takes a call whose caller hung up out of the queue, or passes its turn on.
func (t *turns) giveUp(mine *turn, why error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.waiting, mine); i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
		mine.source.present = false
		return why
	}
	if err := <-mine.ready; err != nil { // was sent before it left the queue
		return err
	}
	mine.source.present = false
	t.next()
	return why
}

// leave ends a try.
func (t *turns) leave(s *source, wrong bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.present, s.since = false, time.Time{}
	if wrong {
		s.count(t.now())
		s.left--
	}
	if !wrong || t.pause <= 0 {
		t.next()
		return
	}
	time.AfterFunc(t.pause, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.next()
	})
}

// next is called with the lock held.
func (t *turns) next() {
	if len(t.waiting) == 0 {
		t.busy = false
		return
	}
	first := t.waiting[0]
	t.waiting = slices.Delete(t.waiting, 0, 1)
	first.ready <- nil
}

// count adds what time has given back.
func (s *source) count(now time.Time) {
	if d := now.Sub(s.counted); d > 0 {
		s.left = min(maxWrong, s.left+d.Seconds()/perWrong.Seconds())
		s.counted = now
	}
}

// makeRoom forgets sources that have nothing to be remembered for. If all have, the one that came last
// is forgotten: that costs it its place, or gives it a few tries back.
func (t *turns) makeRoom(now time.Time) {
	if len(t.sources) < maxSources {
		return
	}
	var last netip.Prefix
	var latest *source
	for at, s := range t.sources {
		s.count(now)
		switch {
		case s.present:
		case s.left >= maxWrong && now.Sub(s.asked) > placeKept:
			delete(t.sources, at)
		case latest == nil || s.asked.After(latest.asked):
			last, latest = at, s
		}
	}
	if len(t.sources) >= maxSources {
		delete(t.sources, last)
	}
}
