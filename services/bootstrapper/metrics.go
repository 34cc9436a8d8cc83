package bootstrapper

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
)

type metrics struct {
	inits, joins *prometheus.CounterVec
	locked       prometheus.Gauge
	step         *prometheus.GaugeVec
	insecure     *prometheus.GaugeVec
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		inits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_init_attempts_total", Help: "Inits that were asked for or ended, by reason; ACCEPTED: the machine became the first node.",
		}, []string{"reason"}),
		joins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_join_attempts_total", Help: "Tries to join, and starts of a control plane whose state disk is not the newest, by reason; ACCEPTED: the machine became a node.",
		}, []string{"reason"}),
		locked: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "muster_node_locked", Help: "1 once an init or a join has taken the node lock.",
		}),
		step: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "muster_bootstrap_phase", Help: "1 for the phase that the journal is at, 0 for the others.",
		}, []string{"phase"}),
		insecure: newInsecure(),
	}
	for _, c := range []prometheus.Collector{m.inits, m.joins, m.locked, m.step, m.insecure} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("bootstrapper: %w", err)
		}
	}
	return m, nil
}

// newInsecure makes the gauge of the bootstrapper and of the attester, which stays when the bootstrapper is done.
func newInsecure() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "muster_insecure_config", Help: "1 for each way in which the configuration is weaker than it could be.",
	}, []string{"reason"})
}

// tellInsecure tells what of the image's configuration weakens the machine.
func tellInsecure(g *prometheus.GaugeVec, img *metadata.Image, log *slog.Logger) {
	for _, label := range img.Insecure() {
		g.WithLabelValues(label).Set(1)
		log.Warn("the image's configuration is weaker than it could be", "insecure", label)
	}
}

// seen shows a record of the journal.
func (m *metrics) seen(r journal.Record) {
	if r.Locked() {
		m.locked.Set(1)
	}
	m.step.Reset()
	for s := journal.StepWaiting; s <= journal.StepDone; s++ {
		v := 0.0
		if s == r.Step {
			v = 1
		}
		m.step.WithLabelValues(s.String()).Set(v)
	}
}

// measureQuotes gives an attester that does what a does and shows how long evidence took in
// muster_quote_seconds{purpose}.
func measureQuotes(a attest.Attester, p attest.Purpose, h *prometheus.HistogramVec) attest.Attester {
	return measured{a, h.WithLabelValues(string(p))}
}

// newQuoteSeconds makes the histogram for [measureQuotes] and registers it.
func newQuoteSeconds(r prometheus.Registerer) (*prometheus.HistogramVec, error) {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "muster_quote_seconds", Help: "Time to make evidence, the wait for the TPM included.",
		Buckets: prometheus.ExponentialBuckets(0.005, 2, 13), // 5 ms to 20 s
	}, []string{"purpose"})
	return h, r.Register(h)
}

type measured struct {
	attest.Attester
	seconds prometheus.Observer
}

func (m measured) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	start := time.Now()
	defer func() { m.seconds.Observe(time.Since(start).Seconds()) }()
	return m.Attester.Attest(ctx, f, b)
}
