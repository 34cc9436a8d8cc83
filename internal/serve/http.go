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

	"github.com/muster-k8s/muster/trust/admission"
)

// Probes is the plain HTTP server for those who watch a process from outside: /metrics,
// /healthz and /readyz. Nothing that it serves is secret, and it belongs on the pod network
// or on loopback. All fields are required.
type Probes struct {
	// Listener is where it serves; it is closed when Run ends.
	Listener net.Listener
	// Metrics is what /metrics shows, in Prometheus's text format.
	Metrics prometheus.Gatherer
	// Ready says by name what must hold for the process to serve: /readyz asks each and
	// answers 503 with the names of those that give an error; /metrics has the same as
	// muster_ready{check}. /healthz does not ask: a process that waits for something should not
	// be restarted for it.
	Ready map[string]func(ctx context.Context) error
	// Log takes the errors of the server.
	Log *slog.Logger
	// Local is where /healthz and /readyz are served too, to whoever may reach it: nobody else takes its places. nil: nowhere. Run closes it.
	Local net.Listener
}

const (
	// probeTimeout bounds one answer, so that a check that hangs counts as failed.
	probeTimeout = 5 * time.Second
	// shutdownTimeout bounds the wait for answers that are under way.
	shutdownTimeout = 5 * time.Second
	// maxConns is how many connections there are at one time, sourceConns how many of one source: who scrapes
	// finds a place whoever else connects.
	maxConns, sourceConns = 256, 8
	// connMemory is what one takes at most, in bytes: buffers of 8 KiB, header fields of 8, stacks of 8.
	connMemory = 24 << 10
	// ProbesMemory is the most that clients can make [Probes] hold, in bytes: connections, and two tables of sources (the rates of requests and of metrics).
	ProbesMemory = maxConns*connMemory + 2*admission.SourcesMemory
	// sourceRate is how many requests a second of one source are answered, and sourceBurst how many at once.
	sourceRate, sourceBurst = 20, 60
	// metricsRate is how many requests for /metrics a second are answered of all sources together that sent one within the last 5 s: an answer takes about a
	// millisecond of one core. Other answers are cheap and have no such bound, or others could keep the kubelet, which asks as often, from its answer.
	metricsRate = 60
	// maxHeaderBytes bounds what one request sends.
	maxHeaderBytes = 4 << 10
)

// Part gives the server as a part of [All].
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
		// net/http's own answer to "OPTIONS *" passes no Handler.
		DisableGeneralOptionsHandler: true,
	}
	if p.Local != nil {
		local := &http.Server{Handler: mux, ReadTimeout: probeTimeout, WriteTimeout: 2 * probeTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: errorLog}
		var wg sync.WaitGroup
		wg.Go(func() { _ = local.Serve(p.Local) }) // without it probes fail, and say so
		defer wg.Wait()
		defer func() { _ = local.Close() }()
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(admission.NewListener(p.Listener, maxConns, sourceConns)) }()
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

// rationed bounds what answers take of the processor, by source and in sum.
func limited(total float64, next http.Handler) http.Handler {
	rate := admission.NewRate(sourceRate, sourceBurst, total, time.Now())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rate.Allow(admission.SourceOfAddress(r.RemoteAddr), time.Now()) != nil {
			w.Header().Set("Connection", "close")
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests", http.StatusTooManyRequests)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// readiness tells of each check by name whether it holds, whenever metrics are read.
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

// failing lists what does not hold, each with its cause.
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
