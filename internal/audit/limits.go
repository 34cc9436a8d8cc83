package audit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// A machine that was let in may ask for what it doesn't get as often as it likes. An honest one comes
// again every few seconds at most, and soon every half a minute.
const (
	eachRate  = 0.1 // records a second of one machine
	eachBurst = 50
	allRate   = 2 // of all machines together: a policy may accept any number of software TPMs
	allBurst  = 1000
	maxShares = 4096
	tellSums  = time.Minute // how often the numbers of the others are recorded
	maxSums   = 16          // records of single machines each time; one more has the rest
)

// RefusalLimits puts on record what those were refused who reached the service. Each has a ration of its own,
// so that no machine can wash the records of others out of the log; what is above it is only counted,
// and its number recorded. What was granted is none of its business: that goes to the [Log] itself.
type RefusalLimits struct {
	beside *UnattestedRefusals // who has the service's name, log and metric
	now    func() time.Time

	mu     sync.Mutex
	all    bucket
	shares map[string]*share
	others int64 // unrecorded refusals of those for whom there was no share
}

// share is what is known of one of those who are refused.
type share struct {
	bucket
	machine, node string
	unrecorded    int64 // since the last record that tells their number
}

// NewRefusalLimits returns Rations whose records are those of the service that s is of.
func NewRefusalLimits(s *UnattestedRefusals) (*RefusalLimits, error) {
	if s == nil {
		return nil, errors.New("audit: rations are beside those of strangers")
	}
	return &RefusalLimits{beside: s, now: time.Now, all: newBucket(allRate, allBurst), shares: map[string]*share{}}, nil
}

// Write puts the record of a refusal on the log, if the ration of whom it speaks of allows it. whose
// is a machine ID, or a node's name where no machine is attested. An error says that the record can't
// be written.
func (r *RefusalLimits) Write(whose string, rec Record) error {
	s := r.take(whose, rec)
	if s == nil {
		r.beside.dropped.Inc()
		return nil
	}
	err := r.beside.audit.refuse(rec)
	if err != nil { // it will be tried again, or is lost by no fault of the machine's
		r.mu.Lock()
		s.tokens++
		r.all.tokens++
		r.mu.Unlock()
	}
	return err
}

// take gives the share that a record is taken from, or nil if there is nothing left in it.
func (r *RefusalLimits) take(whose string, rec Record) *share {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	s := r.shares[whose]
	if s == nil {
		if len(r.shares) >= maxShares {
			r.forget(now)
		}
		if len(r.shares) >= maxShares {
			r.others++
			return nil
		}
		s = &share{bucket: newBucket(eachRate, eachBurst)}
		r.shares[whose] = s
	}
	s.machine, s.node = rec.Machine, rec.Node
	if !s.left(now) || !r.all.left(now) {
		s.unrecorded++
		return nil
	}
	s.tokens--
	r.all.tokens--
	return s
}

// forget drops the shares that say no more than new ones would.
func (r *RefusalLimits) forget(now time.Time) {
	for whose, s := range r.shares {
		if s.unrecorded == 0 && s.full(now) {
			delete(r.shares, whose)
		}
	}
}

// Serve records the numbers until ctx ends, and what is left then.
func (r *RefusalLimits) Serve(ctx context.Context) error {
	tell := time.NewTicker(tellSums)
	defer tell.Stop()
	defer r.tell()
	for {
		select {
		case <-tell.C:
			r.tell()
		case <-ctx.Done():
			return nil
		}
	}
}

// tell records how many refusals were not recorded one by one, and whose they were.
func (r *RefusalLimits) tell() {
	sums, others := r.sums()
	for i, s := range sums {
		if i >= maxSums {
			others += s.unrecorded
			continue
		}
		r.sum(s, "%d more refusals of it were not recorded one by one", s.unrecorded)
	}
	if others > 0 {
		r.sum(share{}, "%d more refusals of further machines were not recorded one by one", others)
	}
}

// sums takes what is to be told, the largest numbers first.
func (r *RefusalLimits) sums() (sums []share, others int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.shares {
		if s.unrecorded > 0 {
			sums = append(sums, *s)
			s.unrecorded = 0
		}
	}
	r.forget(r.now())
	others, r.others = r.others, 0
	slices.SortFunc(sums, func(a, b share) int { return cmp.Compare(b.unrecorded, a.unrecorded) })
	return sums, others
}

func (r *RefusalLimits) sum(s share, format string, n int64) {
	r.beside.write(Record{
		Time: r.now(), Service: r.beside.service, Event: "refusals", Reason: attest.ReasonName(attestv1.Reason_REASON_BUSY),
		Machine: s.machine, Node: s.node, Detail: fmt.Sprintf(format, n),
	})
}

// ration is how much may be recorded: burst at once, and rate a second.
type bucket struct {
	rate, burst, tokens float64
	at                  time.Time
}

func newBucket(rate, burst float64) bucket { return bucket{rate: rate, burst: burst, tokens: burst} }

func (r *bucket) refill(now time.Time) {
	if d := now.Sub(r.at); d > 0 {
		r.tokens, r.at = min(r.burst, r.tokens+d.Seconds()*r.rate), now
	}
}

func (r *bucket) left(now time.Time) bool { r.refill(now); return r.tokens >= 1 }

func (r *bucket) full(now time.Time) bool { r.refill(now); return r.tokens >= r.burst }
