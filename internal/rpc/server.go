package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"

	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Service is one RPC service of a [Server]; [Serve] makes it.
type Service struct {
	name string
	make func(...connect.HandlerOption) (string, http.Handler)
}

// Serve returns a Service with its name, its implementation and its generated constructor, as in
// Serve(kmsv1connect.KeyServiceName, svc, kmsv1connect.NewKeyServiceHandler). It takes the constructor, not a handler, so
// that every handler has the Server's options.
func Serve[H any](name string, impl H, constructor func(H, ...connect.HandlerOption) (string, http.Handler)) Service {
	return Service{name: name, make: func(o ...connect.HandlerOption) (string, http.Handler) {
		return constructor(impl, o...)
	}}
}

// Config configures a [Server]. All fields are required unless their comments say otherwise.
type Config struct {
	// Listener is the server's listener; Run closes it.
	Listener net.Listener
	// ATLS is the configuration of attested TLS. Its Observe and Log may be left out: Metrics and Log replace them.
	ATLS atls.ServerConfig
	// Services are served beside health and reflection.
	Services []Service
	// Health gets each service; it starts as not serving.
	Health *Health
	// Metrics counts calls and connections.
	Metrics *Metrics
	// Log gets the details that callers do not get.
	Log *slog.Logger
	// Timeout bounds a unary call; 0 for 30 s.
	Timeout time.Duration
	// StreamTimeout bounds a call over muster-atls/1 that is answered by a stream; 0 for no limit while pings are answered.
	StreamTimeout time.Duration
	// IdleTimeout is how long a connection without a call stays open; 0 for 5 min, and 1 min for a plain client, which never
	// gets more.
	IdleTimeout time.Duration
	// MaxRequest bounds the request of a call that needs the level session or attested, in bytes; 0 for 32 KiB. Calls that
	// need less have 4 KiB.
	MaxRequest int
	// Refused, if not nil, is called for each call that was refused before it reached its handler, so that the service can
	// record it. It must not block.
	Refused func(Refused)
	// Grace is how long calls in progress may take after Run's context has ended; 0 for 10 s.
	Grace time.Duration
}

// Server serves RPCs on one port: over muster-atls/1 to clients that use it, over plain HTTPS to others, and to each only
// what its [Level] allows.
type Server struct {
	cfg      Config
	listener *atls.Listener
	attested *http.Server
	plain    *http.Server

	mu    sync.Mutex
	fresh map[net.Conn]struct{}    // handed to net/http, and no byte was read from it yet
	idle  map[net.Conn]*time.Timer // no call is in progress
	quits bool
}

const (
	readHeaderTimeout = 5 * time.Second
	idleTimeout       = 5 * time.Minute
	// ownWriteTimeout is for answers of net/http itself. A call's time is that of its bounds.
	ownWriteTimeout = 10 * time.Second
	maxHeaderBytes  = 8 << 10
	maxStreams      = 16
	// The memory of HTTP/2 for one connection, in bytes: the frame that it reads, the data that peers send before a handler
	// reads it, and the tables of header compression.
	maxFrame       = 16 << 10
	receiveBuffer  = 64 << 10
	maxHeaderTable = 4 << 10

	// A plain client has shown no evidence, so it gets less.
	plainIdleTimeout    = time.Minute
	maxPlainStreams     = 8
	plainWriteTimeout   = 10 * time.Second
	plainRequestTimeout = 5 * time.Second
	maxPlainRequest     = 4 << 10
)

// NewServer starts to accept connections, which wait until [Server.Run]. If a field of cfg is missing, it closes
// cfg.Listener and returns an error that names the field.
func NewServer(cfg Config) (*Server, error) {
	if cfg.Listener == nil {
		return nil, errors.New("rpc: Listener is missing")
	}
	if cfg.Health == nil || cfg.Metrics == nil || cfg.Log == nil || len(cfg.Services) == 0 {
		return nil, errors.Join(errors.New("rpc: Services, Health, Metrics and Log are required"), cfg.Listener.Close())
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 30 * time.Second
	}
	if cfg.MaxRequest <= 0 {
		cfg.MaxRequest = 32 << 10
	}
	if cfg.IdleTimeout <= 0 {
		cfg.IdleTimeout = idleTimeout
	}
	if cfg.Grace <= 0 {
		cfg.Grace = 10 * time.Second
	}
	if cfg.ATLS.Observe == nil {
		cfg.ATLS.Observe = cfg.Metrics.SetUp
	}
	if cfg.ATLS.Log == nil {
		cfg.ATLS.Log = cfg.Log
	}
	l, err := atls.NewListener(cfg.Listener, cfg.ATLS)
	if err != nil {
		return nil, errors.Join(err, cfg.Listener.Close())
	}
	s := &Server{cfg: cfg, listener: l, fresh: make(map[net.Conn]struct{}), idle: make(map[net.Conn]*time.Timer)}
	handler := s.handler()
	errorLog := slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug) // errors that unattested clients cause
	http2 := http.HTTP2Config{
		MaxConcurrentStreams:          maxStreams,
		MaxDecoderHeaderTableSize:     maxHeaderTable,
		MaxEncoderHeaderTableSize:     maxHeaderTable,
		MaxReadFrameSize:              maxFrame,
		MaxReceiveBufferPerConnection: receiveBuffer,
		// At least what a client may send before it has our settings (RFC 9113, section 6.9.2).
		MaxReceiveBufferPerStream: receiveBuffer,
		SendPingTimeout:           30 * time.Second,
		PingTimeout:               15 * time.Second,
		WriteByteTimeout:          30 * time.Second,
	}
	plainHTTP2 := http2
	plainHTTP2.MaxConcurrentStreams = maxPlainStreams
	plainHTTP2.WriteByteTimeout = plainWriteTimeout
	s.attested = &http.Server{
		Handler:           l.Handler(handler),
		Protocols:         protocols((*http.Protocols).SetUnencryptedHTTP2),
		ReadHeaderTimeout: readHeaderTimeout,
		WriteTimeout:      ownWriteTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		HTTP2:             &http2,
		ConnContext:       l.ConnContext,
		ConnState:         s.state(cfg.IdleTimeout),
		ErrorLog:          errorLog,
		// net/http's own answer to "OPTIONS *" bypasses the Handler, and so the limits.
		DisableGeneralOptionsHandler: true,
	}
	s.plain = &http.Server{
		Handler:           l.Handler(handler),
		ConnContext:       l.ConnContext,
		Protocols:         protocols((*http.Protocols).SetHTTP1, (*http.Protocols).SetHTTP2),
		ReadHeaderTimeout: readHeaderTimeout,
		WriteTimeout:      ownWriteTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		HTTP2:             &plainHTTP2,
		ConnState:         s.state(min(plainIdleTimeout, cfg.IdleTimeout)),
		ErrorLog:          errorLog,

		DisableGeneralOptionsHandler: true,
	}
	return s, nil
}

func protocols(set ...func(*http.Protocols, bool)) *http.Protocols {
	p := new(http.Protocols)
	for _, f := range set {
		f(p, true)
	}
	return p
}

func (s *Server) handler() http.Handler {
	g := &guard{hold: s.listener.Hold, metrics: s.cfg.Metrics, timeout: s.cfg.Timeout, streamTimeout: s.cfg.StreamTimeout, maxRequest: s.cfg.MaxRequest, refused: s.cfg.Refused,
		lines: atls.LogRate()}
	options := g.options()
	mux := http.NewServeMux()
	names := []string{healthv1connect.HealthName}
	for _, svc := range s.cfg.Services {
		mux.Handle(svc.make(options...))
		names = append(names, svc.name)
		s.cfg.Health.Set(svc.name, false)
	}
	mux.Handle(healthv1connect.NewHealthHandler(s.cfg.Health, options...))
	reflector := grpcreflect.NewStaticReflector(names...)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, options...))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, options...))
	return g.observe(s.cfg.Log, mux)
}

// Addr returns the address of the listener.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// CloseMachine closes every connection of a banned machine; see [atls.Listener.CloseMachine].
func (s *Server) CloseMachine(m attest.MachineID) int { return s.listener.CloseMachine(m) }

// Run serves until ctx ends. Then it stops accepting, lets calls end within Grace, and closes everything. It does not wait
// for silent peers.
func (s *Server) Run(ctx context.Context) error {
	failed := make(chan error, 2)
	go func() { failed <- s.attested.Serve(s.listener.Attested()) }()
	go func() { failed <- s.plain.Serve(s.listener.Plain()) }()
	running := 2
	var err error
	select {
	case err = <-failed:
		running--
		err = fmt.Errorf("serve %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	s.cfg.Health.stop()
	closed := s.listener.Close()
	s.closeFresh()

	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Grace)
	defer cancel()
	var wg sync.WaitGroup
	for _, srv := range []*http.Server{s.attested, s.plain} {
		wg.Go(func() {
			if srv.Shutdown(grace) != nil {
				_ = srv.Close()
			}
		})
	}
	wg.Wait()
	for range running {
		if e := <-failed; !errors.Is(e, http.ErrServerClosed) && !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	return errors.Join(err, closed)
}

// state closes connections without a call after the idle time, and tracks those that have not sent a byte of HTTP yet. When
// it shuts down, net/http waits up to 5 s for the latter, since a request could be on its way; a peer that has just
// connected can connect to another server instead.
//
// http.Server's IdleTimeout is not used: when a connection is closed while calls are in progress, HTTP/2 starts its timer
// again (Go 1.26), which keeps all memory of the connection, about 40 KiB, until the timer ends.
func (s *Server) state(idle time.Duration) func(net.Conn, http.ConnState) {
	return func(c net.Conn, st http.ConnState) {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.fresh, c)
		if t, ok := s.idle[c]; ok {
			t.Stop()
			delete(s.idle, c)
		}
		switch {
		case st == http.StateIdle:
			s.idle[c] = time.AfterFunc(idle, func() { _ = c.Close() })
		case st == http.StateNew && s.quits:
			_ = c.Close()
		case st == http.StateNew:
			s.fresh[c] = struct{}{}
		}
	}
}

func (s *Server) closeFresh() {
	s.mu.Lock()
	s.quits = true
	fresh := slices.Collect(maps.Keys(s.fresh))
	s.mu.Unlock()
	for _, c := range fresh {
		_ = c.Close()
	}
}
