package provision

import (
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

// metrics show the machine's progress, by its journal.
type metrics struct {
	locked prometheus.Gauge
	phase  *prometheus.GaugeVec

	mu    sync.Mutex
	step  journal.Step
	since time.Time // zero: the journal was always at this step
}

func (n *Node) registerMetrics() error {
	n.Joins = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "muster_join_attempts_total", Help: "Attempts to join, and starts of a control plane whose state disk is not the newest, by reason; ACCEPTED: the machine became a node.",
	}, []string{"reason"})
	n.metrics.locked = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "muster_node_locked", Help: "1 once an init or a join has taken the node lock.",
	})
	n.metrics.phase = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "muster_bootstrap_phase", Help: "1 for the phase that the journal is at, 0 for the others.",
	}, []string{"phase"})
	for _, c := range []prometheus.Collector{n.Joins, n.metrics.locked, n.metrics.phase} {
		if err := n.Metrics.Register(c); err != nil {
			return fmt.Errorf("provision: %w", err)
		}
	}
	return nil
}

// observe shows a record of the journal, first the one that an earlier process left.
func (m *metrics) observe(r journal.Record) {
	if r.Locked() {
		m.locked.Set(1)
	}
	m.phase.Reset()
	for s := journal.StepWaiting; s <= journal.StepDone; s++ {
		v := 0.0
		if s == r.Step {
			v = 1
		}
		m.phase.WithLabelValues(s.String()).Set(v)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Step != m.step {
		if m.step, m.since = r.Step, r.Changed; m.since.IsZero() {
			m.since = time.Now()
		}
	}
}

// Since returns when the journal's step was reached; zero if the journal was always at it.
func (n *Node) Since() time.Time {
	n.metrics.mu.Lock()
	defer n.metrics.mu.Unlock()
	return n.metrics.since
}

// Waits reports whether a node waits for certificates from a joinservice, or for its owner to accept its state disk.
func (n *Node) Waits() bool { return n.renewing.Load() || n.older.Load() }
