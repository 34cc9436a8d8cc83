// Package attester serves evidence of this machine to the services that run on it.
//
// It uses the TPM for them and answers on one unix socket per purpose. A client is authenticated by its access to the socket: each socket is in a folder
// of its own, only root can enter the folder above, and a pod gets one folder as a mount. The purpose is fixed by the socket when this process starts
// (A5). A compromised service only gets evidence for itself on this machine.
package attester

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/serve"
	wire "github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxInFlight bounds the requests that wait on one socket; others are refused with BUSY.
	maxInFlight = 256
	// callTimeout bounds one call: a slow TPM takes a second for a quote, and calls wait for each other.
	callTimeout = 30 * time.Second
	busyRetry   = time.Second
	// shutdownTimeout bounds the end of running calls.
	shutdownTimeout = 5 * time.Second
)

// Purposes are those that have a socket. The bootstrapper and the re-attestation make evidence of the machine itself, without these sockets, and only
// for their own calls.
var Purposes = []attest.Purpose{attest.PurposeJoinservice, attest.PurposeKMS, attest.PurposePublic}

// Config lists what a Server needs. All fields are required.
type Config struct {
	// Dir holds the folders of the sockets.
	Dir string
	// Attesters has one per purpose of [Purposes].
	Attesters map[attest.Purpose]attest.Attester
	// Metrics registers muster_attester_requests_total and muster_attester_request_seconds.
	Metrics prometheus.Registerer
	// Log receives the causes of refusals; callers get only the reason.
	Log *slog.Logger
}

// Server answers on the sockets.
type Server struct {
	cfg      Config
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
}

// New returns a Server, or an error that names the missing field of cfg.
func New(cfg Config) (*Server, error) {
	if !filepath.IsAbs(cfg.Dir) || cfg.Metrics == nil || cfg.Log == nil {
		return nil, errors.New("attester: Dir (absolute), Metrics and Log are required")
	}
	for _, p := range Purposes {
		if cfg.Attesters[p] == nil {
			return nil, fmt.Errorf("attester: no attester for the purpose %s", p)
		}
	}
	s := &Server{
		cfg: cfg,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_attester_requests_total", Help: "Requests for evidence and responses, by purpose, call and reason.",
		}, []string{"purpose", "call", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "muster_attester_request_seconds", Help: "Time to answer, the wait for the TPM included.",
			Buckets: prometheus.ExponentialBuckets(0.005, 2, 13), // 5 ms to 20 s
		}, []string{"purpose", "call"}),
	}
	for _, c := range []prometheus.Collector{s.requests, s.seconds} {
		if err := cfg.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("attester: %w", err)
		}
	}
	return s, nil
}

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	parts := make([]serve.Part, 0, len(Purposes))
	for _, p := range Purposes {
		l, err := s.listen(ctx, p)
		if err != nil {
			return err
		}
		defer l.Close()
		parts = append(parts, serve.Part{Name: "attester for " + string(p), Run: func(ctx context.Context) error { return s.serve(ctx, p, l) }})
	}
	return serve.All(ctx, parts...)
}

func (s *Server) listen(ctx context.Context, p attest.Purpose) (net.Listener, error) {
	// A5: only root can pass the upper folder, so host users reach no socket, and a pod reaches only the one in its mounted folder.
	if err := mkdir(s.cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	socket := wire.Socket(s.cfg.Dir, p)
	if err := mkdir(filepath.Dir(socket), 0o755); err != nil {
		return nil, err
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(socket, 0o666); err != nil { // pods run as users of their own; see above
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func mkdir(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}

func (s *Server) serve(ctx context.Context, p attest.Purpose, l net.Listener) error {
	srv := &http.Server{
		Handler: s.handler(p), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: callTimeout + 10*time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 8 << 10, ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		_ = srv.Close()
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (s *Server) handler(p attest.Purpose) http.Handler {
	mux := http.NewServeMux()
	free := make(chan struct{}, maxInFlight)
	handle := func(path, call string, do func(*http.Request, []byte) (proto.Message, error)) {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			start := time.Now()
			out, err := func() (proto.Message, error) {
				select {
				case free <- struct{}{}:
					defer func() { <-free }()
				default:
					return nil, attest.RefuseFor(busyRetry, attestv1.Reason_REASON_BUSY, "%d calls are waiting for the TPM", maxInFlight)
				}
				body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, wire.MaxRequest))
				if err != nil {
					return nil, invalid("body: %w", err)
				}
				ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
				defer cancel()
				return do(r.WithContext(ctx), body)
			}()
			reason := attest.ReasonName(attest.ReasonOf(err))
			s.requests.WithLabelValues(string(p), call, reason).Inc()
			s.seconds.WithLabelValues(string(p), call).Observe(time.Since(start).Seconds())
			if err != nil {
				s.cfg.Log.WarnContext(r.Context(), "no evidence given", "purpose", string(p), "call", call, "reason", reason, "err", err)
			}
			answer(w, out, err)
		})
	}
	a := s.cfg.Attesters[p]
	handle(wire.EvidencePath, "evidence", func(r *http.Request, body []byte) (proto.Message, error) {
		in := &attestv1.GetEvidenceRequest{}
		if err := proto.Unmarshal(body, in); err != nil || len(in.GetNonce()) != len(attest.Binding{}) {
			return nil, invalid("want a request with a binding of %d bytes", len(attest.Binding{}))
		}
		return a.Attest(r.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding(in.GetNonce()))
	})
	handle(wire.RespondPath, "respond", func(r *http.Request, body []byte) (proto.Message, error) {
		in := &attestv1.Challenge{}
		b, err := hex.DecodeString(r.Header.Get(wire.BindingHeader))
		if err != nil || len(b) != len(attest.Binding{}) || proto.Unmarshal(body, in) != nil {
			return nil, invalid("want a challenge, and a binding of %d bytes in %s", len(attest.Binding{}), wire.BindingHeader)
		}
		mac, err := a.Respond(r.Context(), in, attest.Binding(b))
		return &attestv1.Response{Mac: mac}, err
	})
	return mux
}

func invalid(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, format, args...)
}

// answer sends the message, or only the reason: the cause is for this machine's log.
func answer(w http.ResponseWriter, m proto.Message, err error) {
	w.Header().Set("Content-Type", wire.ContentType)
	if err != nil {
		info := &attestv1.ErrorInfo{Reason: attest.ReasonOf(err)}
		status := http.StatusInternalServerError
		if r, ok := errors.AsType[*attest.Refusal](err); ok {
			status = http.StatusForbidden
			if r.RetryAfter > 0 {
				status, info.RetryAfter = http.StatusTooManyRequests, durationpb.New(r.RetryAfter)
			}
		}
		w.WriteHeader(status)
		m = info
	}
	if b, err := proto.Marshal(m); err == nil {
		_, _ = w.Write(b)
	}
}
