package joinservice

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/ownerview"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// queueSize bounds how many refusals of unattested peers are kept in memory.
const queueSize = 256

// Refusals reports machines that are refused in the TLS exchange, before any RPC: if such a machine is enrolled, its
// AttestedNode gets the verdict, which keeps its kubelet from renewing its certificates. This is done in the background and
// may be dropped under a flood; no grant depends on it.
type Refusals struct {
	appraiser   *policy.Appraiser
	enrollments *enroll.Enrollments
	records     *ownerview.Records
	unattested  *audit.UnattestedRefusals
	log         *slog.Logger
	bad         chan badVerdict
}

type badVerdict struct {
	machine   attest.MachineID
	verdict   v1alpha1.Verdict
	candidate *v1alpha1.CandidateVerdict
}

// NewRefusals returns Refusals whose verdicts are those of appraiser. unattested counts the dropped ones.
func NewRefusals(appraiser *policy.Appraiser, e *enroll.Enrollments, waiting *ownerview.Records, unattested *audit.UnattestedRefusals, l *slog.Logger) (*Refusals, error) {
	if appraiser == nil || e == nil || waiting == nil || unattested == nil || l == nil {
		return nil, errors.New("joinservice: every argument of NewRefusals is required")
	}
	return &Refusals{appraiser: appraiser, enrollments: e, records: waiting, unattested: unattested, log: l, bad: make(chan badVerdict, queueSize)}, nil
}

// Appraise implements [attest.Appraiser].
func (r *Refusals) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	a, err := r.appraiser.Appraise(ctx, c)
	reason := attest.ReasonOf(err)
	_, hardware := errors.AsType[*attest.HardwareError](err)
	switch {
	case reason == attestv1.Reason_REASON_BANNED: // recorded in its enrollment already
		err = &refusedMachine{waiting.Entry{Machine: c.Machine().String()}, err}
	case hardware || reason == attestv1.Reason_REASON_POLICY_REFUSED || reason == attestv1.Reason_REASON_EK_UNTRUSTED || reason == attestv1.Reason_REASON_LOCK_FOREIGN:
		// The evidence is genuine, so it comes from that machine, and not from a client that imitates it.
		now := time.Now()
		v := badVerdict{c.Machine(), verdictOf(err, now), r.byCandidate(c, now)}
		err = &refusedMachine{r.describe(c), err}
		select {
		case r.bad <- v:
		default:
			r.unattested.Skip()
		}
	default:
	}
	return a, err
}

// byCandidate returns the verdict of the owner's next policy on an enrolled machine that the policy in force refuses; nil if there is
// none. Other machines cause no second appraisal.
func (r *Refusals) byCandidate(c attest.Claims, now time.Time) *v1alpha1.CandidateVerdict {
	next := r.appraiser.Candidate()
	if next == nil || !r.enrollments.Has(c.Machine()) {
		return nil
	}
	_, locks, err := r.appraiser.Policy()
	if err != nil {
		return nil // there is no policy any more
	}
	return byCandidate(next, c, now, locks...)
}

// describe returns what the owner sees of a refused machine, beside the refusal.
func (r *Refusals) describe(c attest.Claims) waiting.Entry {
	e := waiting.Entry{Machine: c.Machine().String(), Endorsement: c.Endorsement()}
	if i := c.Instance(); i.Provider != "" {
		e.Instance = i.String()
	}
	p, locks, err := r.appraiser.Policy()
	if err != nil {
		return e // there is no policy any more
	}
	for _, found := range p.Compare(c) {
		if found.Kind == "image" {
			e.Image = found.Name
		} else {
			e.Class = found.Name
		}
	}
	e.List, err = p.AppraiseAsListed(c, locks...)
	if err != nil {
		e.Differs = explain.Words(err)
	}
	return e
}

// Observe is for [atls.ServerConfig]: it records a refused peer, and lists it for the owner if it is a machine.
func (r *Refusals) Observe(s atls.SetUp) {
	machine := ""
	if m, ok := errors.AsType[*refusedMachine](s.Err); ok {
		e := m.entry
		machine, e.Reason, e.Address, e.Last = e.Machine, reasonOf(s.Err), host(s.Remote), time.Now()
		if e.List != "" || attest.ReasonOf(s.Err) != attestv1.Reason_REASON_EK_UNTRUSTED { // otherwise the policy has no place for it
			r.records.Refused(e)
		}
	}
	r.unattested.Connection(s, machine)
}

// Serve writes until ctx ends.
func (r *Refusals) Serve(ctx context.Context) error {
	for {
		select {
		case v := <-r.bad:
			if err := r.enrollments.WriteVerdict(ctx, v.machine, v.verdict, v.candidate); err != nil && ctx.Err() == nil {
				r.log.ErrorContext(ctx, "a bad verdict could not be written to the machine's AttestedNode", "machine", v.machine, "reason", v.verdict.Reason, "err", err)
			}
		case <-ctx.Done():
			return nil
		}
	}
}
