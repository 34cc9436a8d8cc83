package rpc

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Metrics counts calls, and connections over muster-atls/1 on both sides. A process creates one.
type Metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	setUps   *prometheus.CounterVec
	dropped  *prometheus.CounterVec
	parts    *prometheus.HistogramVec
}

// NewMetrics registers the metrics with r.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_rpc_requests_total", Help: "Calls that were answered, by procedure, Connect code and reason.",
		}, []string{"procedure", "code", "reason"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "muster_rpc_duration_seconds", Help: "Time from a call's first byte to its answer, by procedure.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 13),
		}, []string{"procedure"}),
		setUps: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_atls_setups_total", Help: "Connections whose set-up ended, by our side, outcome (accepted, plain, refused, refused_by_peer, failed) and reason.",
		}, []string{"side", "outcome", "reason"}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_atls_dropped_total", Help: "Connections closed by a limit, by cause (before TLS: source_rate, rate, source_setup_full, setup_full, closed; after their set-up: source_open_full, open_full, machine_open_full, attested_full).",
		}, []string{"cause"}),
		parts: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "muster_atls_setup_seconds", Help: "Time of a connection's set-up, by our side and part (handshake, exchange, attest, verify).",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 12),
		}, []string{"side", "part"}),
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.requests, m.duration, m.setUps, m.dropped, m.parts} {
		if err := r.Register(c); err != nil {
			errs = append(errs, fmt.Errorf("register metrics: %w", err))
		}
	}
	return m, errors.Join(errs...)
}

func (m *Metrics) call(procedure, code, reason string, d time.Duration) {
	m.requests.WithLabelValues(procedure, code, reason).Inc()
	m.duration.WithLabelValues(procedure).Observe(d.Seconds())
}

// SetUp is for the field Observe of [atls.ServerConfig] and [atls.ClientConfig].
func (m *Metrics) SetUp(s atls.SetUp) {
	if s.Dropped != "" {
		m.dropped.WithLabelValues(s.Dropped).Inc()
		return
	}
	outcome, reason := "accepted", ""
	refusal, refused := errors.AsType[*attest.Refusal](s.Err)
	switch {
	case refused && refusal.Remote:
		outcome, reason = "refused_by_peer", knownReason(refusal)
	case refused:
		outcome, reason = "refused", knownReason(refusal)
	case s.Err != nil:
		outcome = "failed"
	case s.Plain:
		outcome = "plain"
	}
	m.setUps.WithLabelValues(s.Role, outcome, reason).Inc()
	for part, d := range map[string]time.Duration{
		"handshake": s.Times.Handshake, "exchange": s.Times.Total, "attest": s.Times.Attest, "verify": s.Times.Verify,
	} {
		if d > 0 {
			m.parts.WithLabelValues(s.Role, part).Observe(d.Seconds())
		}
	}
}

// knownReason prevents label values that a peer has invented.
func knownReason(r *attest.Refusal) string {
	if _, ok := reasons[r.Reason]; !ok {
		return "UNKNOWN"
	}
	return attest.ReasonName(r.Reason)
}
