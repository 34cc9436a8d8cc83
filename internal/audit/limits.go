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

// An admitted machine may repeat a refused request without limit. An honest one repeats it after a few seconds at least,
// and soon after half a minute.
const (
	eachRate   = 0.1 // records a second of one machine
	eachBurst  = 50
	allRate    = 2 // of all machines together: a policy may accept any number of software TPMs
	allBurst   = 1000
	maxShares  = 4096
	reportSums = time.Minute // how often the numbers of unrecorded refusals are recorded
	maxSums    = 16          // records of single machines each time; one more covers the rest
)

// RefusalLimits records the refusals of attested machines and nodes. Each has a limit of its own, so that no machine can
// displace the records of others; refusals above it are only counted, and their number is recorded. Grants are not recorded
// here: they go to the [Log] itself.
type RefusalLimits struct {
	beside *UnattestedRefusals // provides the service's name, log and metric
	now    func() time.Time

	mu     sync.Mutex
	all    bucket
	shares map[string]*share
	others int64 // unrecorded refusals of machines without a share
}

// share is the state of one machine or node that is refused.
type share struct {
	bucket
	machine, node string
	unrecorded    int64 // since the last record of their number
}

// NewRefusalLimits returns RefusalLimits that write their records as s does.
func NewRefusalLimits(s *UnattestedRefusals) (*RefusalLimits, error) {
	if s == nil {
		return nil, errors.New("audit: NewRefusalLimits needs UnattestedRefusals")
	}
	return &RefusalLimits{beside: s, now: time.Now, all: newBucket(allRate, allBurst), shares: map[string]*share{}}, nil
}

// Write records a refusal if the limit of the machine or node allows it. whose is a machine ID, or a node's name if no
// machine is attested. It returns an error if the record cannot be written.
func (r *RefusalLimits) Write(whose string, rec Record) error {
	s := r.take(whose, rec)
	if s == nil {
		r.beside.dropped.Inc()
		return nil
	}
	err := r.beside.audit.refuse(rec)
	if err != nil { // it will be repeated, or is lost without the machine's fault
		r.mu.Lock()
		s.tokens++
		r.all.tokens++
		r.mu.Unlock()
	}
	return err
}

// take returns the share from which a record was taken, or nil if no token is left.
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

// forget removes the shares that are equal to new ones.
func (r *RefusalLimits) forget(now time.Time) {
	for whose, s := range r.shares {
		if s.unrecorded == 0 && s.full(now) {
			delete(r.shares, whose)
		}
	}
}

// Serve records the numbers until ctx ends, and the rest then.
func (r *RefusalLimits) Serve(ctx context.Context) error {
	report := time.NewTicker(reportSums)
	defer report.Stop()
	defer r.report()
	for {
		select {
		case <-report.C:
			r.report()
		case <-ctx.Done():
			return nil
		}
	}
}

// report records how many refusals were not recorded one by one, for each machine.
func (r *RefusalLimits) report() {
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

// sums returns and resets the numbers to be recorded, the largest first.
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

// bucket is a token bucket: burst records at once, and rate a second. golang.org/x/time/rate does not fit here: a record
// that cannot be written must give its token back, and Reservation.Cancel does not always do so after a later reservation.
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
