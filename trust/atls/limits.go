package atls

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

// Limits bound what connections can take from a server before they have shown anything.
// Zero fields have the defaults named.
type Limits struct {
	// SetUp is how many connections may be in handshake or exchange at one time; 1,024.
	SetUp int
	// SetUpPerSource is how many of those one source may have, an IPv4 address or an IPv6
	// /64; 64.
	SetUpPerSource int
	// Open is how many connections may be open at all; 4,096.
	Open int
	// OpenPerSource is how many of those one source may have; 512.
	OpenPerSource int
	// Rate is how many new connections a second one source may open; 16. Behind a NodePort
	// limits of a source need externalTrafficPolicy: Local, or all clients are one source.
	Rate float64
	// Burst is how many it may open at once; 64.
	Burst int
	// Large is how many exchanges may hold a frame of more than 64 KiB at one time; 32.
	Large int
}

func (l Limits) withDefaults() Limits {
	if l.SetUp <= 0 {
		l.SetUp = 1024
	}
	if l.Open <= 0 {
		l.Open = 4096
	}
	if l.SetUpPerSource <= 0 {
		l.SetUpPerSource = 64
	}
	if l.OpenPerSource <= 0 {
		l.OpenPerSource = 512
	}
	if l.Rate <= 0 {
		l.Rate = 16
	}
	if l.Burst <= 0 {
		l.Burst = 64
	}
	if l.Large <= 0 {
		l.Large = 32
	}
	return l
}

// places are the connections that there are, by source. Its methods are called with its
// Listener's lock held. Its memory is bounded by Limits.Open.
type places struct {
	limits      Limits
	setUp, open int
	sources     map[netip.Prefix]held
}

// held is what one source has: open counts those in set-up too.
type held struct{ setUp, open int }

func newPlaces(l Limits) *places { return &places{limits: l, sources: make(map[netip.Prefix]held)} }

// take takes a place for set-up and an open one, or says which limit forbids it.
func (p *places) take(source netip.Prefix) (full string) {
	h := p.sources[source]
	switch {
	case h.setUp >= p.limits.SetUpPerSource:
		return "source_setup_full"
	case h.open >= p.limits.OpenPerSource:
		return "source_open_full"
	case p.setUp >= p.limits.SetUp:
		return "setup_full"
	case p.open >= p.limits.Open:
		return "open_full"
	}
	p.setUp++
	p.open++
	p.sources[source] = held{h.setUp + 1, h.open + 1}
	return ""
}

// ready gives the place for set-up back.
func (p *places) ready(source netip.Prefix) {
	p.setUp--
	h := p.sources[source]
	h.setUp--
	p.keep(source, h)
}

// gone gives the open place back.
func (p *places) gone(source netip.Prefix) {
	p.open--
	h := p.sources[source]
	h.open--
	p.keep(source, h)
}

func (p *places) keep(source netip.Prefix, h held) {
	if h == (held{}) {
		delete(p.sources, source)
		return
	}
	p.sources[source] = h
}

// maxSources bounds the memory of the buckets; further sources share one.
const maxSources = 16384

// buckets is a token bucket for each source.
type buckets struct {
	rate  float64
	burst float64

	mu      sync.Mutex
	sources map[netip.Prefix]*bucket
	rest    bucket // shared by all sources that no longer fit
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newBuckets(l Limits, now time.Time) *buckets {
	return &buckets{
		rate:    l.Rate,
		burst:   float64(l.Burst),
		sources: make(map[netip.Prefix]*bucket),
		rest:    bucket{tokens: float64(l.Burst), at: now},
	}
}

// allow takes a token of the source's, if it has one left.
func (b *buckets) allow(source netip.Prefix, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, ok := b.sources[source]
	if !ok {
		if len(b.sources) >= maxSources {
			b.forgetFull(now)
		}
		if len(b.sources) >= maxSources {
			s = &b.rest
		} else {
			s = &bucket{tokens: b.burst, at: now}
			b.sources[source] = s
		}
	}
	b.refill(s, now)
	if s.tokens < 1 {
		return false
	}
	s.tokens--
	return true
}

func (b *buckets) refill(s *bucket, now time.Time) {
	if d := now.Sub(s.at); d > 0 {
		s.tokens = min(b.burst, s.tokens+d.Seconds()*b.rate)
		s.at = now
	}
}

// forgetFull drops sources that have all their tokens: to forget them changes nothing. It
// stops early, so that a flood of sources does not make every connection pay for a sweep.
func (b *buckets) forgetFull(now time.Time) {
	looked := 0
	for source, s := range b.sources { // in random order
		if b.refill(s, now); s.tokens >= b.burst {
			delete(b.sources, source)
		}
		if looked++; looked >= 256 {
			return
		}
	}
}

// sourceOf gives what one party can be assumed to own: an IPv4 address or an IPv6 /64
// (RFC 6177). Addresses that are none, as of a unix socket, are one source.
func sourceOf(a net.Addr) netip.Prefix {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	ip := ap.Addr().Unmap().WithZone("")
	bits := 32
	if ip.Is6() {
		bits = 64
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
