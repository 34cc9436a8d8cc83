package joinservice

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/records"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// queueSize bounds how many refusals of unattested peers are kept in memory.
const queueSize = 256

// Refusals reports machines that are refused in the TLS exchange, before any RPC: if such a machine is enrolled, its
// AttestedNode gets the verdict, which keeps its kubelet from renewing its certificates. This is done in the background and
// may be dropped under a flood; no grant depends on it.
type Refusals struct {
	appraiser   attest.Appraiser
	enrollments *enroll.Enrollments
	records     *records.Records
	unattested  *audit.UnattestedRefusals
	log         *slog.Logger
	bad         chan badVerdict
}

type badVerdict struct {
	machine attest.MachineID
	verdict v1alpha1.Verdict
}

// NewRefusals returns Refusals whose verdicts are those of appraiser. unattested counts the dropped ones.
func NewRefusals(appraiser attest.Appraiser, e *enroll.Enrollments, waiting *records.Records, unattested *audit.UnattestedRefusals, l *slog.Logger) (*Refusals, error) {
	if appraiser == nil || e == nil || waiting == nil || unattested == nil || l == nil {
		return nil, errors.New("joinservice: every argument of NewRefusals is required")
	}
	return &Refusals{appraiser: appraiser, enrollments: e, records: waiting, unattested: unattested, log: l, bad: make(chan badVerdict, queueSize)}, nil
}

// Appraise implements [attest.Appraiser].
func (r *Refusals) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	a, err := r.appraiser.Appraise(ctx, c)
	switch reason := attest.ReasonOf(err); reason {
	case attestv1.Reason_REASON_BANNED: // recorded in its enrollment already
		err = &refusedMachine{c.Machine(), err}
	case attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_EK_UNTRUSTED, attestv1.Reason_REASON_LOCK_FOREIGN:
		// The evidence is genuine, so it comes from that machine, and not from a client that imitates it.
		v := badVerdict{c.Machine(), verdictOf(err, time.Now())}
		err = &refusedMachine{c.Machine(), err}
		select {
		case r.bad <- v:
		default:
			r.unattested.Skip()
		}
	default:
	}
	return a, err
}

// Observe is for [atls.ServerConfig]: it records a refused peer, and lists it for the owner if it is a machine.
func (r *Refusals) Observe(s atls.SetUp) {
	machine := ""
	if m, ok := errors.AsType[*refusedMachine](s.Err); ok {
		machine = m.machine.String()
		if reason := attest.ReasonOf(s.Err); reason != attestv1.Reason_REASON_EK_UNTRUSTED { // no root of the policy certifies its TPM
			r.records.Refused(waiting.Entry{Machine: machine, Reason: reasonOf(s.Err), Address: host(s.Remote), Last: time.Now()})
		}
	}
	r.unattested.Connection(s, machine)
}

// Serve writes until ctx ends.
func (r *Refusals) Serve(ctx context.Context) error {
	for {
		select {
		case v := <-r.bad:
			if err := r.enrollments.WriteVerdict(ctx, v.machine, v.verdict); err != nil && ctx.Err() == nil {
				r.log.ErrorContext(ctx, "a bad verdict could not be written to the machine's AttestedNode", "machine", v.machine, "reason", v.verdict.Reason, "err", err)
			}
		case <-ctx.Done():
			return nil
		}
	}
}
