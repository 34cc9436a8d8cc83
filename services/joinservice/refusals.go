package joinservice

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
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
	now     func() time.Time

	unrecorded atomic.Int64 // since the last record that tells their number
	tokens     float64      // of Serve alone, as at
	at         time.Time
}

// Each audit record costs an fsync under the mutex that tickets need too, and a stranger
// costs us one whenever it likes. So they have a ration; what is above it is only counted.
const (
	recordRate  = 10 // records a second
	recordBurst = 50
	tellEvery   = 10 * time.Second // how often the number of the others is recorded
)

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
		records: make(chan audit.Record, queueSize), bad: make(chan badVerdict, queueSize), now: time.Now, tokens: recordBurst,
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
		r.skip()
	}
}

// Serve writes until ctx ends, and what is left then.
func (r *Refusals) Serve(ctx context.Context) error {
	tell := time.NewTicker(tellEvery)
	defer tell.Stop()
	defer r.tell()
	for {
		select {
		case <-tell.C:
			r.tell()
		case record := <-r.records:
			r.take(record)
		case v := <-r.bad:
			if err := r.kube.WriteVerdict(ctx, v.machine, v.verdict); err != nil && ctx.Err() == nil {
				r.log.ErrorContext(ctx, "a bad verdict could not be written to the machine's AttestedNode", "machine", v.machine, "reason", v.verdict.Reason, "err", err)
			}
		case <-ctx.Done():
			for {
				select {
				case record := <-r.records:
					r.take(record)
				default:
					return nil
				}
			}
		}
	}
}

// take records one refusal, if the ration allows it.
func (r *Refusals) take(record audit.Record) {
	now := r.now()
	if d := now.Sub(r.at); d > 0 {
		r.tokens, r.at = min(recordBurst, r.tokens+d.Seconds()*recordRate), now
	}
	if r.tokens < 1 {
		r.skip()
		return
	}
	r.tokens--
	r.write(record)
}

func (r *Refusals) skip() {
	r.unrecorded.Add(1)
	r.dropped.Inc()
}

// tell records how many refusals were not recorded one by one.
func (r *Refusals) tell() {
	if n := r.unrecorded.Swap(0); n > 0 {
		r.write(audit.Record{
			Time: r.now(), Service: "joinservice", Event: "connections refused", Reason: attest.ReasonName(attestv1.Reason_REASON_BUSY),
			Detail: fmt.Sprintf("%d more refused connections were not recorded one by one", n),
		})
	}
}

func (r *Refusals) write(record audit.Record) {
	if err := r.audit.Write(record); err != nil {
		r.dropped.Inc()
		r.log.Error("the audit record of a refused connection cannot be written", "reason", record.Reason, "err", err)
	}
}
