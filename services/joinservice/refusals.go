package joinservice

import (
	"context"
	"errors"
	"log/slog"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/services/joinservice/kube"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// queueSize bounds what strangers can make us remember.
const queueSize = 256

// Refusals tells the cluster of machines that are refused in the exchange, before any RPC: if such a
// one is enrolled, its AttestedNode says so, which keeps its kubelet from renewing its certificates.
// That is done in the background and may be dropped under a flood; nothing is handed out for it.
type Refusals struct {
	judge     attest.Appraiser
	kube      *kube.Kube
	strangers *audit.UnattestedRefusals
	log       *slog.Logger
	bad       chan badVerdict
}

type badVerdict struct {
	machine attest.MachineID
	verdict v1alpha1.Verdict
}

// NewRefusals returns Refusals whose verdicts are those of judge. What is dropped is counted by
// strangers.
func NewRefusals(judge attest.Appraiser, k *kube.Kube, strangers *audit.UnattestedRefusals, l *slog.Logger) (*Refusals, error) {
	if judge == nil || k == nil || strangers == nil || l == nil {
		return nil, errors.New("joinservice: every argument of NewRefusals is required")
	}
	return &Refusals{judge: judge, kube: k, strangers: strangers, log: l, bad: make(chan badVerdict, queueSize)}, nil
}

// Appraise implements [attest.Appraiser].
func (r *Refusals) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	a, err := r.judge.Appraise(ctx, c)
	switch reason := attest.ReasonOf(err); reason {
	case attestv1.Reason_REASON_BANNED: // stands in its enrollment already
		err = &refusedMachine{c.Machine(), err}
	case attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_EK_UNTRUSTED, attestv1.Reason_REASON_LOCK_FOREIGN:
		// The evidence is genuine, so it is that machine, and not somebody who wants it to look bad.
		err = &refusedMachine{c.Machine(), err}
		v := badVerdict{c.Machine(), v1alpha1.Verdict{Reason: attest.ReasonName(reason), Time: metav1.NewTime(time.Now())}}
		select {
		case r.bad <- v:
		default:
			r.strangers.Skip()
		}
	default:
	}
	return a, err
}

// Observe is for [atls.ServerConfig]: it puts who was refused on record, and on the list for the owner
// if it is a machine.
func (r *Refusals) Observe(s atls.SetUp) {
	machine := ""
	if m, ok := errors.AsType[*refusedMachine](s.Err); ok {
		machine = m.machine.String()
		if reason := attest.ReasonOf(s.Err); reason != attestv1.Reason_REASON_EK_UNTRUSTED { // nobody in the policy vouches for it
			r.kube.Refused(waiting.Entry{Machine: machine, Reason: reasonOf(s.Err), Address: host(s.Remote), Last: time.Now()})
		}
	}
	r.strangers.Connection(s, machine)
}

// Serve writes until ctx ends.
func (r *Refusals) Serve(ctx context.Context) error {
	for {
		select {
		case v := <-r.bad:
			if err := r.kube.WriteVerdict(ctx, v.machine, v.verdict); err != nil && ctx.Err() == nil {
				r.log.ErrorContext(ctx, "a bad verdict could not be written to the machine's AttestedNode", "machine", v.machine, "reason", v.verdict.Reason, "err", err)
			}
		case <-ctx.Done():
			return nil
		}
	}
}
