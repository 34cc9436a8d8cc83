package tpm2

import (
	"container/list"
	"crypto/sha256"
	"sync"
	"time"
)

// pairLifetime is how long the proof that an AK and an EK are in one TPM is remembered.
const pairLifetime = 24 * time.Hour

// pair identifies an EK public key and an AK name.
type pair [sha256.Size]byte

// pairOf takes the EK's SHA-256, whose length is fixed, so the boundary between the parts is
// unambiguous.
func pairOf(ek [sha256.Size]byte, akName []byte) pair {
	return sha256.Sum256(append(ek[:], akName...))
}

// pairs stores which AKs have proven to be in the TPM of which EK. Nothing else is stored: chain,
// ban and policy are checked again for each evidence.
type pairs struct {
	mu    sync.Mutex
	max   int
	order list.List // of remembered, oldest first
	at    map[pair]*list.Element
}

type remembered struct {
	pair  pair
	until time.Time
}

func newPairs(limit int) *pairs { return &pairs{max: limit, at: make(map[pair]*list.Element)} }

func (p *pairs) has(k pair, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, ok := p.at[k]
	if !ok {
		return false
	}
	if r := e.Value.(remembered); now.Before(r.until) && now.After(r.until.Add(-pairLifetime-time.Minute)) {
		return true // a clock that was set back does not prolong it
	}
	p.drop(e)
	return false
}

func (p *pairs) add(k pair, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.at[k]; ok {
		p.drop(e)
	}
	for len(p.at) >= p.max {
		p.drop(p.order.Front())
	}
	p.at[k] = p.order.PushBack(remembered{pair: k, until: now.Add(pairLifetime)})
}

func (p *pairs) drop(e *list.Element) {
	delete(p.at, e.Value.(remembered).pair)
	p.order.Remove(e)
}
