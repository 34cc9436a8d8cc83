package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// call is the state of a request, from its first byte on.
type call struct {
	procedure string
	source    peerlimit.Source
	began     time.Time
	log       *slog.Logger
	held      []func()
	hold      func(bytes int64) error // charges memory until the call has ended
	// Only the goroutine of the request uses these.
	recorded bool  // counted and logged
	refused  error // why it did not reach its handler
	denied   error // why there is no memory for it: the gate refuses it
}

// hold charges memory, in bytes, to a call until its answer is written.
func hold(ctx context.Context, bytes int64) error {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok || c.hold == nil {
		return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the call came over no server")
	}
	return c.hold(bytes)
}

// Refused is a call that was refused before it reached its handler, which therefore has not recorded it: the connection had
// not shown enough, or the request was too large or too slow.
type Refused struct {
	// Procedure is the call's procedure, which is in the table of levels.
	Procedure string
	// Remote is the caller's network address, which is not authenticated.
	Remote string
	// Machine is the caller's machine ID; empty if it did not attest.
	Machine string
	// Err is the refusal.
	Err error
}

type callKey struct{}

// Logger returns the logger of the call: it has the procedure, the caller's address and, if the caller is attested, its
// machine.
func Logger(ctx context.Context) *slog.Logger {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.log
	}
	return slog.Default()
}

// guard implements a Server's parts in connect: gate, time limits, error table, metrics, log.
type guard struct {
	// hold is [atls.Listener.Hold].
	hold          func(ctx context.Context, bytes int64) (release func(), err error)
	metrics       *Metrics
	timeout       time.Duration
	streamTimeout time.Duration // 0: none
	maxRequest    int
	refused       func(Refused)
	// lines limits how many refused calls of peers that did not attest are logged.
	lines *peerlimit.Rate
}

// options are the options of every handler of a Server.
func (g *guard) options() []connect.HandlerOption {
	return []connect.HandlerOption{
		// The gate runs before a message is read or decoded; the interceptor checks again, so that a call that bypasses one
		// is still refused.
		connect.WithRequestGate(g.gate),
		connect.WithInterceptors(g),
		connect.WithRecover(func(_ context.Context, _ connect.Spec, _ http.Header, v any) error {
			return fmt.Errorf("a handler panicked: %v\n%s", v, debug.Stack())
		}),
		// No client needs compressed requests, and a few bytes of one can cost a second to unpack. Uncompressed requests
		// are bounded while they are read: see body.
		connect.WithCompression("gzip", nil, nil),
	}
}

func (g *guard) gate(ctx context.Context, spec connect.Spec, _ connect.Peer, _ http.Header) (context.Context, error) {
	return ctx, g.authorized(ctx, spec.Procedure)
}

func (g *guard) authorized(ctx context.Context, procedure string) error {
	c, ok := ctx.Value(callKey{}).(*call)
	err := authorize(ctx, procedure)
	if err == nil && ok {
		err = c.denied
	}
	if err == nil {
		return nil
	}
	if ok {
		c.refused = err
	}
	return g.done(ctx, procedure, err)
}

// WrapUnary implements [connect.Interceptor].
func (g *guard) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		procedure := req.Spec().Procedure
		if err := g.authorized(ctx, procedure); err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, g.timeout)
		defer cancel()
		resp, err := next(ctx, req)
		return resp, g.done(ctx, procedure, err)
	}
}

// WrapStreamingHandler implements [connect.Interceptor].
func (g *guard) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		procedure := conn.Spec().Procedure
		if err := g.authorized(ctx, procedure); err != nil {
			return err
		}
		if procedure == reflectionV1 || procedure == reflectionV1Alpha {
			conn = &fewMessages{StreamingHandlerConn: conn}
		}
		return g.done(ctx, procedure, next(ctx, conn))
	}
}

// fewMessages bounds the requests of one stream.
type fewMessages struct {
	connect.StreamingHandlerConn

	received int
}

// Receive implements [connect.StreamingHandlerConn].
func (f *fewMessages) Receive(m any) error {
	err := f.StreamingHandlerConn.Receive(m)
	if f.received++; err == nil && f.received > maxReflections {
		err = Error(attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "a stream of reflection answers %d requests; open another one", maxReflections))
	}
	return err
}

// WrapStreamingClient implements [connect.Interceptor].
func (g *guard) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// done counts and logs a call and returns the error for the caller.
func (g *guard) done(ctx context.Context, procedure string, err error) error {
	out := Error(err)
	code, reason := "ok", attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)
	if out != nil {
		code, reason = connect.CodeOf(out).String(), ""
		if info, ok := infoFrom(out); ok {
			reason = attest.ReasonName(info.GetReason())
		}
	}
	took := time.Duration(0)
	log := Logger(ctx)
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		c.recorded = true
		took = time.Since(c.began)
	}
	g.metrics.call(procedure, code, reason, took)
	attrs := []any{"code", code, "reason", reason, "seconds", took.Seconds()}
	if err == nil {
		log.DebugContext(ctx, "call answered", attrs...)
		return nil
	}
	_, attested := attest.PeerFrom(ctx)
	attrs = append(attrs, "err", atls.LogText(err, !attested))
	switch {
	case connect.CodeOf(out) == connect.CodeCanceled:
		log.DebugContext(ctx, "caller hung up", attrs...)
	case attest.ReasonOf(err) == attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, !attested && g.lines.Allow(sourceFrom(ctx), time.Now()) != nil:
		// Unattested peers can cause any number of these: the metric counts them.
		log.DebugContext(ctx, "call refused", attrs...)
	case connect.CodeOf(out) == connect.CodeInternal:
		log.ErrorContext(ctx, "call failed", attrs...)
	default:
		log.WarnContext(ctx, "call refused", attrs...)
	}
	return out
}

// observe starts a call, bounds the time of its body and its answer, and counts calls that never reached a handler: an
// unknown path, a message too large, too slow or not decodable.
func (g *guard) observe(log *slog.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &call{procedure: r.URL.Path, source: peerlimit.SourceOfAddress(r.RemoteAddr), began: time.Now(), log: log.With("procedure", r.URL.Path, "remote", r.RemoteAddr)}
		if p, ok := attest.PeerFrom(r.Context()); ok {
			c.log = c.log.With("machine", p.Machine().String(), "purpose", string(p.Purpose()))
		}
		if _, ok := levels[c.procedure]; !ok {
			// All unknown paths are one label value, and their text is not logged.
			c.procedure, c.log = "unknown", log.With("remote", r.RemoteAddr)
		}
		read, write := g.times(r.URL.Path)
		bounds, err := newBounds(w, r, read, write)
		if err != nil {
			c.log.Error("cannot bound a request's time", "err", err)
			http.Error(w, "internal error", http.StatusInternalServerError)
			return
		}
		defer bounds.end()
		c.hold = func(bytes int64) error {
			release, err := g.hold(r.Context(), bytes)
			if err == nil {
				c.held = append(c.held, release)
			}
			return err
		}
		defer func() {
			for _, release := range c.held {
				release()
			}
		}()
		limit := g.requestLimit(r.URL.Path)
		c.denied = c.hold(cost(r.URL.Path, limit))
		ctx := context.WithValue(r.Context(), callKey{}, c)
		bounded := r.WithContext(ctx)
		bounded.Body = &body{ReadCloser: r.Body, limit: limit + envelopeHead, call: c, whole: func() {
			// The request is complete. Later bytes over HTTP/1.1 do not belong to it, and must not end the call.
			bounds.keep(c.began.Add(g.timeout))
		}}
		a := &answer{ResponseWriter: w}
		next.ServeHTTP(a, bounded)
		if r.ProtoMajor > 1 {
			a.send()
		}
		switch {
		case c.recorded:
		case c.refused != nil:
			_ = g.done(ctx, c.procedure, c.refused)
		default:
			g.metrics.call(c.procedure, "not_handled", "", time.Since(c.began))
			c.log.Debug("request without an RPC", "method", r.Method)
		}
		if c.refused != nil && g.refused != nil {
			refused := Refused{Procedure: c.procedure, Remote: r.RemoteAddr, Err: c.refused}
			if p, ok := attest.PeerFrom(ctx); ok {
				refused.Machine = p.Machine().String()
			}
			g.refused(refused)
		}
	})
}

// requestLimit returns the maximum length of a procedure's request, in bytes.
func (g *guard) requestLimit(procedure string) int {
	if trusted(procedure) {
		return g.maxRequest
	}
	return min(g.maxRequest, maxPlainRequest)
}

// trusted reports whether a procedure's callers have more memory and time than a plain client.
func trusted(procedure string) bool {
	l := levels[procedure]
	return l == Attested || l == Session && !small[procedure]
}

const (
	// callBytes is the cost of a call itself: goroutine, buffers of HTTP/2, header fields.
	callBytes = 16 << 10
	// requestCopies is how many copies of a request are in memory while it is read and decoded.
	requestCopies = 3
	// reflectionBytes is the cost of an answer of reflection: descriptors of our own files.
	reflectionBytes = 128 << 10
)

// cost returns the maximum memory of a call of the procedure, in bytes, without an answer of more than a few KiB.
func cost(procedure string, limit int) int64 {
	bytes := int64(callBytes + requestCopies*limit)
	if procedure == reflectionV1 || procedure == reflectionV1Alpha {
		bytes += reflectionBytes
	}
	return bytes
}

// envelopeHead is the length of gRPC's prefix of each message, in bytes.
const envelopeHead = 5

// body bounds a call's request, and adds the reason to the error of one that is too large or too slow (R1): connect makes
// such errors before any interceptor runs, and passes on an error that is a [connect.Error] already.
type body struct {
	io.ReadCloser

	limit int // bytes of the whole body
	read  int
	call  *call
	whole func() // called at its end
}

// Read implements [io.Reader].
func (b *body) Read(p []byte) (int, error) {
	if len(p) > b.limit-b.read+1 {
		p = p[:b.limit-b.read+1]
	}
	n, err := b.ReadCloser.Read(p)
	b.read += n
	var refusal error
	switch {
	case errors.Is(err, io.EOF) && b.read <= b.limit:
		b.whole()
		return n, err
	case b.read > b.limit:
		b.read = b.limit
		refusal = attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the request has more than %d bytes", b.limit-envelopeHead)
	case errors.Is(err, os.ErrDeadlineExceeded):
		refusal = attest.Refuse(attestv1.Reason_REASON_DEADLINE, "the request did not come in time: %w", err)
	default:
		return n, err
	}
	if !b.call.recorded { // otherwise the handler has answered, and the rest is discarded
		b.call.refused = refusal
	}
	return 0, Error(refusal)
}

// The maximum time of a plain client's stream: it has shown no evidence.
const (
	streamLimit     = 10 * time.Minute
	reflectionLimit = 30 * time.Second
	// maxReflections is how many requests one stream of reflection may have.
	maxReflections = 16
)

// times returns how long the request of a procedure may take to arrive, and its answer to be read; 0 for no limit.
func (g *guard) times(procedure string) (read, write time.Duration) {
	switch {
	case !streams[procedure] && !trusted(procedure):
		return min(g.timeout, plainRequestTimeout), g.timeout + time.Second
	case !streams[procedure]:
		return g.timeout, g.timeout + time.Second
	case procedure == reflectionV1, procedure == reflectionV1Alpha:
		return reflectionLimit, reflectionLimit
	case levels[procedure] == Plain:
		return streamLimit, streamLimit + time.Second
	default:
		// Over muster-atls/1 all streams are answers to one message: it must arrive soon, the answer may take any time
		// while pings are answered.
		return g.timeout, g.streamTimeout
	}
}
