package joinservice

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/services/joinservice/kube"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// queueSize bounds what strangers can make us remember.
const queueSize = 256

// Refusals records those who never reach an RPC: a machine that is refused in the exchange gets its
// audit record, and if it is enrolled its AttestedNode says so, which keeps its kubelet from renewing
// its certificates. Both are done in the background and may be dropped under a flood; nothing is
// handed out for them.
type Refusals struct {
	judge   attest.Appraiser
	kube    *kube.Kube
	audit   *audit.Log
	log     *slog.Logger
	dropped prometheus.Counter
	records chan audit.Record
	bad     chan badVerdict
}

type badVerdict struct {
	machine attest.MachineID
	verdict v1alpha1.Verdict
}

// NewRefusals returns Refusals whose verdicts are those of judge.
func NewRefusals(judge attest.Appraiser, k *kube.Kube, log *audit.Log, l *slog.Logger, r prometheus.Registerer) (*Refusals, error) {
	if judge == nil || k == nil || log == nil || l == nil || r == nil {
		return nil, errors.New("joinservice: every argument of NewRefusals is required")
	}
	dropped := prometheus.NewCounter(prometheus.CounterOpts{Name: "muster_refusals_unrecorded_total", Help: "Refused connections that were counted and logged, but not put into the audit log, since there were too many."})
	if err := r.Register(dropped); err != nil {
		return nil, fmt.Errorf("joinservice: %w", err)
	}
	return &Refusals{
		judge: judge, kube: k, audit: log, log: l, dropped: dropped,
		records: make(chan audit.Record, queueSize), bad: make(chan badVerdict, queueSize),
	}, nil
}

// Appraise implements [attest.Appraiser].
func (r *Refusals) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	a, err := r.judge.Appraise(ctx, c)
	switch reason := attest.ReasonOf(err); reason {
	case attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_EK_UNTRUSTED, attestv1.Reason_REASON_LOCK_FOREIGN:
		// The evidence is genuine, so it is that machine, and not somebody who wants it to look bad.
		v := badVerdict{c.Machine(), v1alpha1.Verdict{Reason: attest.ReasonName(reason), Time: metav1.NewTime(time.Now())}}
		select {
		case r.bad <- v:
		default:
			r.dropped.Inc()
		}
	default:
	}
	return a, err
}

// Observe is for [atls.ServerConfig].
func (r *Refusals) Observe(s atls.SetUp) {
	refusal, ok := errors.AsType[*attest.Refusal](s.Err)
	if !ok || refusal.Remote {
		return
	}
	record := audit.Record{Time: time.Now(), Service: "joinservice", Event: "connection refused", Reason: reasonOf(s.Err), Detail: s.Remote + ": " + s.Err.Error()}
	select {
	case r.records <- record:
	default:
		r.dropped.Inc()
	}
}

// Serve writes until ctx ends, and what is left then.
func (r *Refusals) Serve(ctx context.Context) error {
	for {
		select {
		case record := <-r.records:
			r.write(record)
		case v := <-r.bad:
			if err := r.kube.WriteVerdict(ctx, v.machine, v.verdict); err != nil && ctx.Err() == nil {
				r.log.ErrorContext(ctx, "a bad verdict could not be written to the machine's AttestedNode", "machine", v.machine, "reason", v.verdict.Reason, "err", err)
			}
		case <-ctx.Done():
			for {
				select {
				case record := <-r.records:
					r.write(record)
				default:
					return nil
				}
			}
		}
	}
}

func (r *Refusals) write(record audit.Record) {
	if err := r.audit.Write(record); err != nil {
		r.dropped.Inc()
		r.log.Error("the audit record of a refused connection cannot be written", "reason", record.Reason, "err", err)
	}
}
