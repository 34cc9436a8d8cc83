package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/muster-k8s/muster/trust/peerlimit"
)

// Probes is the plain HTTP server for monitoring: /metrics, /healthz and /readyz. Nothing that it serves is secret, and it
// belongs on the pod network or on loopback. All fields are required except Local.
type Probes struct {
	// Listener is its listener; it is closed when Run ends.
	Listener net.Listener
	// Metrics are served at /metrics, in Prometheus's text format.
	Metrics prometheus.Gatherer
	// Ready has the named checks that must pass for the process to serve: /readyz runs each and answers 503 with the names
	// of those that return an error; /metrics has the same as muster_ready{check}. /healthz does not run them: a process
	// that waits for something should not be restarted for it.
	Ready map[string]func(ctx context.Context) error
	// Log gets the errors of the server.
	Log *slog.Logger
	// Local also serves /healthz and /readyz, to processes that can reach it: no other clients can take its connections.
	// nil for none. Run closes it.
	Local net.Listener
}

const (
	// probeTimeout bounds one answer, so that a check that hangs counts as failed.
	probeTimeout = 5 * time.Second
	// shutdownTimeout bounds the wait for answers in progress.
	shutdownTimeout = 5 * time.Second
	// maxConns is the maximum number of concurrent connections, sourceConns that from one source: so the monitoring system
	// gets a connection whatever other clients do.
	maxConns, sourceConns = 256, 8
	// connMemory is the maximum memory of a connection, in bytes: buffers of 8 KiB, header fields of 8, stacks of 8.
	connMemory = 24 << 10
	// ProbesMemory is the maximum memory that clients can make [Probes] use, in bytes: connections, and two tables of
	// sources (the rates of requests and of metrics).
	ProbesMemory = maxConns*connMemory + 2*peerlimit.SourcesMemory
	// sourceRate is how many requests a second from one source are answered, and sourceBurst how many at once.
	sourceRate, sourceBurst = 20, 60
	// metricsRate is how many requests for /metrics a second are answered for all sources together that sent one within the
	// last 5 s: an answer takes about a millisecond of one core. Other answers are cheap and have no such bound; otherwise
	// other clients could keep the kubelet, which asks as often, from its answer.
	metricsRate = 60
	// maxHeaderBytes bounds the header of a request.
	maxHeaderBytes = 4 << 10
)

// Part returns the server as a part of [All].
func (p Probes) Part() Part { return Part{Name: "metrics and probes", Run: p.Run} }

// Run serves until ctx ends.
func (p Probes) Run(ctx context.Context) error {
	if p.Listener == nil || p.Metrics == nil || p.Ready == nil || p.Log == nil {
		return errors.New("serve: Probes needs a Listener, Metrics, Ready and Log")
	}
	errorLog := slog.NewLogLogger(p.Log.Handler(), slog.LevelWarn)
	ready := prometheus.NewRegistry()
	if err := ready.Register(readiness(func(yield func(string, bool)) {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout) // a scrape has no context of its own
		defer cancel()
		for name, check := range p.Ready {
			yield(name, check(ctx) == nil)
		}
	})); err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", limited(metricsRate, promhttp.HandlerFor(prometheus.Gatherers{ready, p.Metrics}, promhttp.HandlerOpts{
		ErrorLog:            errorLog,
		MaxRequestsInFlight: 4,
		Timeout:             probeTimeout,
	})))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), probeTimeout)
		defer cancel()
		answer(w, p.failing(ctx))
	})
	srv := &http.Server{
		Handler:           limited(math.Inf(1), mux),
		ReadHeaderTimeout: probeTimeout,
		ReadTimeout:       probeTimeout,
		WriteTimeout:      2 * probeTimeout,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          errorLog,
		// net/http's own answer to "OPTIONS *" bypasses the Handler.
		DisableGeneralOptionsHandler: true,
	}
	if p.Local != nil {
		local := &http.Server{Handler: mux, ReadTimeout: probeTimeout, WriteTimeout: 2 * probeTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: errorLog}
		var wg sync.WaitGroup
		wg.Go(func() { _ = local.Serve(p.Local) }) // if it ends, probes fail and report that
		defer wg.Wait()
		defer func() { _ = local.Close() }()
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(peerlimit.NewListener(p.Listener, maxConns, sourceConns)) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", p.Listener.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		_ = srv.Close()
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", p.Listener.Addr(), err)
	}
	return nil
}

// limited bounds the processor time for answers, by source and in sum.
func limited(total float64, next http.Handler) http.Handler {
	rate := peerlimit.NewRate(sourceRate, sourceBurst, total, time.Now())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rate.Allow(peerlimit.SourceOfAddress(r.RemoteAddr), time.Now()) != nil {
			w.Header().Set("Connection", "close")
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests", http.StatusTooManyRequests)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// readiness reports for each named check whether it passes, whenever metrics are read.
type readiness func(yield func(check string, holds bool))

var readyDesc = prometheus.NewDesc("muster_ready", "1 if what must hold for the process to serve does, by check; 0 if not.", []string{"check"}, nil)

// Describe implements [prometheus.Collector].
func (r readiness) Describe(out chan<- *prometheus.Desc) { out <- readyDesc }

// Collect implements [prometheus.Collector].
func (r readiness) Collect(out chan<- prometheus.Metric) {
	r(func(check string, holds bool) {
		value := 0.0
		if holds {
			value = 1
		}
		out <- prometheus.MustNewConstMetric(readyDesc, prometheus.GaugeValue, value, check)
	})
}

// failing returns the checks that fail, each with its cause.
func (p Probes) failing(ctx context.Context) []string {
	var out []string
	for name, check := range p.Ready {
		if err := check(ctx); err != nil {
			out = append(out, name+": "+err.Error())
		}
	}
	slices.Sort(out)
	return out
}

func answer(w http.ResponseWriter, failing []string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if len(failing) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintln(w, strings.Join(failing, "\n"))
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}
