package atls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
)

// ClientConfig configures a [Transport]. All fields are required unless their comment says
// otherwise.
type ClientConfig struct {
	// Attester makes this client's evidence; [NoAttester] if it has none.
	Attester attest.Attester
	// Verifier checks servers' evidence.
	Verifier attest.Verifier
	// Appraiser decides which servers are acceptable. A client always appraises its server before
	// it sends anything, so NoAppraiser is refused (A6).
	Appraiser attest.Appraiser
	// PeerPurpose is the purpose that a server's evidence must have (A5).
	PeerPurpose attest.Purpose
	// MaxAge is the age at which a verdict expires, so that the next request dials and attests
	// again; 0 means 1 h.
	MaxAge time.Duration
	// DialContext opens the TCP connection; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
	// OnPeer, if set, is called for each accepted server, before any request is sent to it. It must
	// be safe for concurrent use.
	OnPeer func(attest.Peer)
	// Observe, if set, is called for every connection once its set-up has ended. It must be fast
	// and safe for concurrent use.
	Observe func(SetUp)

	timeouts timeouts // zero: the defaults
}

// Transport is an [http.RoundTripper] for https URLs, over muster-atls/1 and HTTP/2. It keeps one
// connection to each host, however many requests begin at once, because each connection costs both
// sides a quote.
//
// If this side refused the server or the server refused this side, [errors.As] finds an
// [attest.Refusal] in the error; an immediate retry does not help then. [Unproven] reports whether
// the server had not proven its identity. Other errors are those of [http.Transport].
type Transport struct {
	cfg        ClientConfig
	sideConfig sideConfig
	ctx        context.Context //nolint:containedctx // its own lifetime, which Close ends
	cancel     context.CancelFunc
	dials      sync.WaitGroup

	mu      sync.Mutex
	current *http.Transport
	oldest  time.Time // the oldest verdict of current; zero if there is none yet
	conns   map[*tracked]struct{}
	refused map[string]heldRefusal // by address
	closed  bool
}

// heldRefusal answers the calls that wait for the same dial, so that not each of them costs a
// quote.
type heldRefusal struct {
	err   error
	until time.Time
}

// refusalHold is the minimum time for which a refusal answers new dials to its address.
const refusalHold = 250 * time.Millisecond

// NewTransport returns a Transport. The error names the fields that cfg lacks.
func NewTransport(cfg ClientConfig) (*Transport, error) {
	p := sideConfig{
		role:      roleClient,
		attester:  cfg.Attester,
		appraises: true,
		verifier:  cfg.Verifier,
		appraiser: cfg.Appraiser,
		purpose:   cfg.PeerPurpose,
		timeouts:  cfg.timeouts.withDefaults(),
	}
	if cfg.Appraiser == NoAppraiser {
		return nil, errors.New("atls: a client must appraise its server: set Appraiser")
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	if cfg.MaxAge <= 0 {
		cfg.MaxAge = DefaultMaxAge
	}
	if cfg.DialContext == nil {
		cfg.DialContext = (&net.Dialer{Timeout: handshakeTimeout, KeepAlive: 30 * time.Second}).DialContext
	}
	// A transport lives until Close, as an http.Transport lives until its connections are idle.
	ctx, cancel := context.WithCancel(context.Background())
	t := &Transport{
		cfg:        cfg,
		sideConfig: p,
		ctx:        ctx,
		cancel:     cancel,
		conns:      make(map[*tracked]struct{}),
		refused:    make(map[string]heldRefusal),
	}
	t.current = t.newHTTP()
	return t, nil
}

// newHTTP returns a pool of connections. When a verdict has expired, a new pool replaces it.
func (t *Transport) newHTTP() *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true) // inside TLS this is plain HTTP/2
	pool := &http.Transport{
		Protocols:          protocols,
		MaxConnsPerHost:    1,               // or all concurrent first calls would each dial and cost a quote
		IdleConnTimeout:    4 * time.Minute, // before the server, which closes after 5 min, without GOAWAY
		DisableCompression: true,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:             15 * time.Second,
			PingTimeout:                 10 * time.Second,
			WriteByteTimeout:            30 * time.Second,
			StrictMaxConcurrentRequests: true, // wait for a stream rather than dial again
		},
	}
	pool.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		return t.dial(ctx, pool, network, addr)
	}
	return pool
}

// RoundTrip implements [http.RoundTripper]. It accepts https URLs only: other transports would send
// a request for an http URL without attestation.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL == nil || req.URL.Scheme != "https" || req.URL.Host == "" {
		closeBody(req)
		return nil, fmt.Errorf("attested TLS needs a URL like https://HOST:PORT/, not %q", redacted(req.URL))
	}
	pool, err := t.pool()
	if err != nil {
		closeBody(req)
		return nil, err
	}
	ctx := req.Context()
	if capture, ok := ctx.Value(captureKey{}).(*captured); ok {
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GotConn: func(i httptrace.GotConnInfo) { capture.set(i.Conn) },
		})
	}
	inner := req.WithContext(ctx)
	u := *req.URL
	u.Scheme = "http" // inside: the connections of this pool use TLS already
	if u.Port() == "" {
		u.Host = net.JoinHostPort(u.Hostname(), "443")
	}
	inner.URL = &u
	if inner.Host == "" {
		inner.Host = req.URL.Host
	}
	resp, err := pool.RoundTrip(inner)
	if err != nil {
		return nil, err
	}
	resp.Request = req
	return resp, nil
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

func redacted(u *url.URL) string {
	if u == nil {
		return ""
	}
	return u.Redacted()
}

// pool returns the connections to use: new ones once a verdict has expired.
func (t *Transport) pool() (*http.Transport, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, net.ErrClosed
	}
	if !t.oldest.IsZero() && time.Since(t.oldest) > t.cfg.MaxAge {
		t.replace()
	}
	return t.current, nil
}

// Forget makes the next request dial and attest again, for instance after a change of the policy.
// Running requests end normally.
func (t *Transport) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.replace()
	}
}

// replace is called with the lock held.
func (t *Transport) replace() {
	old := t.current
	t.current, t.oldest = t.newHTTP(), time.Time{}
	clear(t.refused)
	// Closing calls our own hooks, which take the lock.
	t.dials.Go(old.CloseIdleConnections)
}

// CloseIdleConnections implements the method that [http.Client.CloseIdleConnections] calls.
func (t *Transport) CloseIdleConnections() {
	t.mu.Lock()
	pool := t.current
	t.mu.Unlock()
	pool.CloseIdleConnections()
}

// Close closes all connections at once and waits for dials to end. Running requests fail.
func (t *Transport) Close() error {
	t.mu.Lock()
	t.closed = true
	pool := t.current
	conns := make([]*tracked, 0, len(t.conns))
	for c := range t.conns {
		conns = append(conns, c)
	}
	t.mu.Unlock()
	t.cancel()
	for _, c := range conns {
		_ = c.Close()
	}
	t.dials.Wait()
	pool.CloseIdleConnections()
	return nil
}

// dial opens a connection, runs handshake and exchange, and passes it to HTTP/2 only if both
// verdicts are "accepted".
func (t *Transport) dial(ctx context.Context, pool *http.Transport, network, addr string) (net.Conn, error) {
	if err := t.begin(addr); err != nil {
		return nil, err
	}
	defer t.dials.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()

	raw, err := t.cfg.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn := &tracked{Conn: raw, onClose: t.gone}
	conn.left.Store(-1) // frames, then HTTP, bound what a server sends
	if err := t.track(conn); err != nil {
		_ = raw.Close()
		return nil, err
	}
	s := SetUp{Role: roleClient.String(), Remote: addr}
	ac, err := t.handshake(ctx, conn, addr, &s)
	s.Err = err
	if err != nil {
		t.hold(addr, err)
		_ = conn.Close()
	} else {
		s.Peer = ac.peer
		if err = t.noteVerdict(ac, pool); err != nil {
			_ = conn.Close()
			return nil, err
		}
	}
	if t.cfg.Observe != nil {
		t.cfg.Observe(s)
	}
	if err != nil {
		return nil, err
	}
	if p, ok := ac.Peer(); ok && t.cfg.OnPeer != nil {
		t.cfg.OnPeer(p)
	}
	return ac, nil
}

func (t *Transport) handshake(ctx context.Context, conn *tracked, addr string, s *SetUp) (*Conn, error) {
	conf := newTLSConfig()
	conf.NextProtos = []string{ALPN}
	// Certificates carry no trust here; the exchange that follows establishes trust (A1).
	conf.InsecureSkipVerify = true
	if host, _, err := net.SplitHostPort(addr); err == nil {
		conf.ServerName = host // for proxies that route by it; not sent for an IP address
	}
	tc := tls.Client(conn, conf)
	began := time.Now()
	hctx, cancel := context.WithTimeout(ctx, t.sideConfig.timeouts.handshake)
	defer cancel()
	if err := tc.HandshakeContext(hctx); err != nil {
		return nil, fmt.Errorf("TLS handshake with %s: %w", addr, &ExchangeError{Err: classifyHandshake(err)})
	}
	s.Times.Handshake = time.Since(began)
	// The end of the dial's context ends the exchange.
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	ac, times, err := establish(ctx, tc, conn, t.sideConfig)
	times.Handshake = s.Times.Handshake
	s.Times = times
	if err != nil {
		return nil, fmt.Errorf("attested TLS with %s: %w", addr, err)
	}
	if ac.peer == nil { // A1: cannot happen, since a client always appraises
		return nil, fmt.Errorf("attested TLS with %s: no verdict", addr)
	}
	return ac, nil
}

func (t *Transport) begin(addr string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return net.ErrClosed
	}
	if h, ok := t.refused[addr]; ok {
		if time.Now().Before(h.until) {
			return h.err
		}
		delete(t.refused, addr)
	}
	t.dials.Add(1)
	return nil
}

func (t *Transport) hold(addr string, err error) {
	r, ok := errors.AsType[*attest.Refusal](err)
	if !ok {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refused[addr] = heldRefusal{err, time.Now().Add(max(refusalHold, r.RetryAfter))}
}

func (t *Transport) track(c *tracked) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return net.ErrClosed
	}
	t.conns[c] = struct{}{}
	return nil
}

func (t *Transport) gone(c *tracked) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
}

// noteVerdict records the age of a verdict for its pool.
func (t *Transport) noteVerdict(ac *Conn, pool *http.Transport) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return net.ErrClosed
	}
	if pool == t.current && (t.oldest.IsZero() || ac.since.Before(t.oldest)) {
		t.oldest = ac.since
	}
	return nil
}

type captureKey struct{}

type captured struct {
	mu   sync.Mutex
	peer *attest.Peer
}

func (c *captured) set(conn net.Conn) {
	ac, ok := conn.(*Conn)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.peer = ac.peer
}

// CapturePeer returns a context for one request, and a function that returns the server that
// answered it: the peer of the connection that the request used. Another request may use another
// connection. The function returns false before the request has a connection.
func CapturePeer(ctx context.Context) (context.Context, func() (attest.Peer, bool)) {
	c := &captured{}
	return context.WithValue(ctx, captureKey{}, c), func() (attest.Peer, bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.peer == nil {
			return attest.Peer{}, false
		}
		return *c.peer, true
	}
}
