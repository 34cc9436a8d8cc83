package peerlimit

import (
	"sync"
	"time"
)

// maxSources is how many sources a Rate and a Queue each remember. In a Rate all further sources
// share one bucket.
const maxSources = 4096

// SourcesMemory is the largest memory that a Rate or a Queue needs to remember sources, in bytes.
const SourcesMemory = 768 << 10

// Rate limits how often sources may come: one token bucket for each source, and one for all
// together. A source that did not come for 5 s does not need a token of the common bucket, so that
// sources that come often cannot exclude it.
type Rate struct {
	perSource, total pace

	mu      sync.Mutex
	sources map[Source]*bucket
	rest    bucket // shared by all sources beyond maxSources
	all     bucket
}

// pace is how fast a bucket fills, in tokens a second, and how many tokens it holds.
type pace struct{ rate, burst float64 }

type bucket struct {
	tokens float64
	at     time.Time
	last   time.Time // time of the last token
}

// recently is the time for which a source counts as recent after it came.
const recently = 5 * time.Second

func (b *bucket) refill(p pace, now time.Time) {
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(p.burst, b.tokens+d.Seconds()*p.rate)
		b.at = now
	}
}

// NewRate returns a Rate of perSource a second and burst at once for each source, and of total a
// second, and as many at once, for all recent sources together.
func NewRate(perSource float64, burst int, total float64, now time.Time) *Rate {
	one, all := pace{perSource, float64(burst)}, pace{total, total}
	return &Rate{
		perSource: one, total: all, sources: make(map[Source]*bucket),
		rest: bucket{tokens: one.burst, at: now}, all: bucket{tokens: all.burst, at: now},
	}
}

// Allow takes a token of the source and one of the common bucket. The error names the one that was
// missing.
func (r *Rate) Allow(source Source, now time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sources[source]
	if !ok {
		if len(r.sources) >= maxSources {
			r.forgetFull(now)
		}
		if len(r.sources) >= maxSources {
			s = &r.rest
		} else {
			s = &bucket{tokens: r.perSource.burst, at: now}
			r.sources[source] = s
		}
	}
	s.refill(r.perSource, now)
	r.all.refill(r.total, now)
	fresh := s != &r.rest && now.Sub(s.last) >= recently
	switch {
	case s.tokens < 1:
		return ErrSourceFull
	case r.all.tokens < 1 && !fresh:
		return ErrFull
	}
	s.tokens--
	s.last = now
	r.all.tokens = max(r.all.tokens-1, 0)
	return nil
}

// forgetFull removes sources that have all their tokens, which changes no result. It stops early,
// so that a flood of sources does not make every connection wait for a full scan.
func (r *Rate) forgetFull(now time.Time) {
	looked := 0
	for source, s := range r.sources { // in random order
		if s.refill(r.perSource, now); s.tokens >= r.perSource.burst && now.Sub(s.last) >= recently {
			delete(r.sources, source)
		}
		if looked++; looked >= 256 {
			return
		}
	}
}
