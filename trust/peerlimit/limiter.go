package peerlimit

import (
	"errors"
	"sync"
	"time"
)

// ErrFull and ErrSourceFull are the reasons why a Limiter has no room: sources that hold no more
// than this one hold all places, or this source already holds its share.
var (
	ErrFull       = errors.New("all places are taken")
	ErrSourceFull = errors.New("the source holds its share")
)

// settle is how long a place is safe from sources that would hold as much as its own source: long
// enough for the next message of an honest peer with a slow TPM. A Limiter of n places accepts
// n/settle newcomers a second from any number of sources.
const settle = 2 * time.Second

// Limiter shares a capacity among sources. Its memory is bounded by its capacity. It stores nothing
// about sources without a place: otherwise a machine that retries would have a disadvantage against
// an attacker with many addresses, who always looks like a new source.
type Limiter[K comparable] struct {
	capacity, perSource int64
	keepEqual           bool
	now                 func() time.Time

	mu     sync.Mutex
	used   int64
	places map[*Place[K]]struct{}
	held   map[K]int64
}

// KeepEqual makes places safe from sources that would hold as much. It is for peers whose work must
// not be interrupted only because there are many of them.
func (l *Limiter[K]) KeepEqual() *Limiter[K] {
	l.keepEqual = true
	return l
}

// Place is a part of a Limiter's capacity that a source holds.
type Place[K comparable] struct {
	limiter *Limiter[K]
	source  K
	since   time.Time
	evict   func()

	// Guarded by the Limiter's lock.
	weight int64
	pins   int
	gone   bool
}

// NewLimiter returns a Limiter of capacity units, of which a source may hold perSource.
func NewLimiter[K comparable](capacity, perSource int64) *Limiter[K] {
	return &Limiter[K]{
		capacity: capacity, perSource: min(perSource, capacity), now: time.Now,
		places: make(map[*Place[K]]struct{}), held: make(map[K]int64),
	}
}

// Take takes weight units for a source. If they are not free, it evicts places of sources that hold
// more than this one would, the oldest first. After that, it evicts the oldest place of a source
// that holds as much, if it is 2 s old. evict is called once, without a lock, if the new place
// itself is evicted later; it must not block. The error is [ErrFull] or [ErrSourceFull].
func (l *Limiter[K]) Take(source K, weight int64, evict func()) (*Place[K], error) {
	p := &Place[K]{limiter: l, source: source, weight: weight, evict: evict}
	l.mu.Lock()
	victims, err := l.makeRoom(source, weight)
	if err == nil {
		p.since = l.now()
		l.places[p] = struct{}{}
		l.used += weight
		l.held[source] += weight
	}
	l.mu.Unlock()
	for _, v := range victims {
		v.evict()
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// makeRoom is called with the lock held. It evicts places only if that frees enough units.
func (l *Limiter[K]) makeRoom(source K, weight int64) ([]*Place[K], error) {
	after := l.held[source] + weight
	if after > l.perSource {
		return nil, ErrSourceFull
	}
	var victims []*Place[K]
	for l.used+weight > l.capacity {
		v := l.victim(source, after)
		if v == nil {
			for _, v := range victims { // no eviction can free enough, so all places stay
				l.restore(v)
			}
			return nil, ErrFull
		}
		l.remove(v)
		victims = append(victims, v)
	}
	return victims, nil
}

// victim returns the place to evict for a source that will hold after units; nil if there is none.
// It is called with the lock held.
func (l *Limiter[K]) victim(source K, after int64) *Place[K] {
	var out *Place[K]
	for p := range l.places {
		if p.pins > 0 || p.source == source {
			continue
		}
		if out == nil || l.before(p, out) {
			out = p
		}
	}
	if out == nil {
		return nil
	}
	switch held := l.held[out.source]; {
	case held > after:
		return out
	case held == after && !l.keepEqual && l.now().Sub(out.since) >= settle:
		return out
	}
	return nil
}

// before reports whether a is evicted before b.
func (l *Limiter[K]) before(a, b *Place[K]) bool {
	if x, y := l.held[a.source], l.held[b.source]; x != y {
		return x > y
	}
	return a.since.Before(b.since)
}

func (l *Limiter[K]) remove(p *Place[K]) {
	p.gone = true
	delete(l.places, p)
	l.used -= p.weight
	if l.held[p.source] -= p.weight; l.held[p.source] <= 0 {
		delete(l.held, p.source)
	}
}

func (l *Limiter[K]) restore(p *Place[K]) {
	p.gone = false
	l.places[p] = struct{}{}
	l.used += p.weight
	l.held[p.source] += p.weight
}

// Used returns how many units are taken.
func (l *Limiter[K]) Used() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// Release frees the place. It may be called again, and after the place was evicted.
func (p *Place[K]) Release() {
	if p == nil {
		return
	}
	p.limiter.mu.Lock()
	defer p.limiter.mu.Unlock()
	if !p.gone {
		p.limiter.remove(p)
	}
}

// Shrink reduces the place to weight units, if it holds more.
func (p *Place[K]) Shrink(weight int64) {
	l := p.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.gone || weight >= p.weight {
		return
	}
	l.used -= p.weight - weight
	l.held[p.source] -= p.weight - weight
	p.weight = weight
}

// Pin keeps the place from being evicted until unpin is called. After unpin it is as young as a new
// one.
func (p *Place[K]) Pin() (unpin func()) {
	l := p.limiter
	l.mu.Lock()
	p.pins++
	l.mu.Unlock()
	var once sync.Once
	return func() {
		once.Do(func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			p.pins--
			p.since = l.now()
		})
	}
}
