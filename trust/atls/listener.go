package atls

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// Listener accepts connections and hands each one on when its type is known: connections over muster-atls/1,
// after their exchange, at [Listener.Attested], and those of plain HTTPS clients, after their handshake, at
// [Listener.Plain].
//
// It needs two [http.Server]s. The one for Attested has Protocols UnencryptedHTTP2 alone and ConnContext
// [Listener.ConnContext]; the one for Plain has HTTP1 and HTTP2. Set ReadHeaderTimeout at both.
type Listener struct {
	inner      net.Listener
	cfg        ServerConfig
	sideConfig sideConfig
	tls        *tls.Config
	limiters   *limiters

	attested, plain *endpoint

	ctx    context.Context //nolint:containedctx // its own lifetime, which Close ends
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	setUp    map[net.Conn]struct{}
	sessions map[*Conn]struct{}
	bans     []ban
}

// ban stores a banned machine until every exchange that began before the ban has ended.
type ban struct {
	machine attest.MachineID
	at      time.Time
}

// NewListener takes over inner and begins to accept. The error names the fields that cfg lacks.
func NewListener(inner net.Listener, cfg ServerConfig) (*Listener, error) {
	p, err := cfg.sideConfig()
	if err != nil {
		return nil, err
	}
	if cfg.MaxAge <= 0 {
		cfg.MaxAge = DefaultMaxAge
	}
	cfg.Limits = cfg.Limits.withDefaults()
	cert := cfg.Certificate
	if cert == nil {
		if cert, err = processCertificate(); err != nil {
			return nil, err
		}
	}
	conf := newTLSConfig()
	conf.Certificates = []tls.Certificate{*cert}
	conf.NextProtos = []string{ALPN, "h2", "http/1.1"}

	// A listener lives until Close, as a net.Listener does.
	ctx, cancel := context.WithCancel(context.Background())
	l := &Listener{
		inner:      inner,
		cfg:        cfg,
		sideConfig: p,
		tls:        conf,
		limiters:   newLimiters(cfg.Limits, cfg.Challenges),
		attested:   newEndpoint(inner.Addr()),
		plain:      newEndpoint(inner.Addr()),
		ctx:        ctx,
		cancel:     cancel,
		setUp:      make(map[net.Conn]struct{}),
		sessions:   make(map[*Conn]struct{}),
	}
	l.wg.Go(l.accept)
	return l, nil
}

// processCertificate makes the key of this process. No side trusts it: evidence is bound to the session's key
// exchange, so an attacker gains nothing from a stolen key.
var processCertificate = sync.OnceValues(func() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a TLS key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "muster, self-signed: trust comes from attestation"},
		DNSNames:     []string{"muster"},
		// The clock of a machine that boots for the first time may be wrong, and no side checks these times.
		NotBefore: time.Unix(0, 0),
		NotAfter:  time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // RFC 5280: no expiry
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a TLS certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
})

// Attested returns the listener for connections over muster-atls/1, each a [*Conn].
func (l *Listener) Attested() net.Listener { return l.attested }

// Plain returns the listener for connections of plain HTTPS clients, each a [*tls.Conn] after its handshake.
func (l *Listener) Plain() net.Listener { return l.plain }

// Addr returns the listener's address.
func (l *Listener) Addr() net.Addr { return l.inner.Addr() }

// ConnContext is for both [http.Server]s. It puts the session and the peer, if any, into the context of every
// request (J1), and the connection, for [Listener.Hold].
func (l *Listener) ConnContext(ctx context.Context, c net.Conn) context.Context {
	switch c := c.(type) {
	case *Conn:
		return context.WithValue(withSession(ctx, c), connKey{}, c.tcp)
	case *tls.Conn:
		if t, ok := c.NetConn().(*tracked); ok {
			return context.WithValue(ctx, connKey{}, t)
		}
	}
	return ctx
}

type connKey struct{}

// Handler closes connections, for both [http.Server]s, in two cases. The verdict has expired: it is older than
// MaxAge, or of another generation of the policy than the one in force. Or an unattested peer has sent half of
// the permitted bytes, or started half of the permitted requests. A response then has the header Connection:
// close, which net/http turns into GOAWAY (RFC 9113, section 6.8). Open streams end normally. If a peer starts
// more requests than permitted, for instance by canceling each before its response, its connection is closed at
// once.
func (l *Listener) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s, ok := SessionFrom(r.Context())
		if ok && l.aged(s.conn) {
			windUp(w)
		}
		if t, ok := r.Context().Value(connKey{}).(*tracked); ok {
			half, all := t.spent(l.limiters.limits)
			if all {
				t.drop()
				return
			}
			if half {
				windUp(w)
			}
		}
		next.ServeHTTP(w, r)
	})
}

// Hold charges a request with memory, in bytes, until release is called. It charges the source, or the machine
// if the peer has attested. The connection is closed if another source or machine, which holds less, needs the
// memory. The error is a refusal with BUSY. A request that came over no connection of this Listener is refused
// (A3).
func (l *Listener) Hold(ctx context.Context, bytes int64) (release func(), err error) {
	t, ok := ctx.Value(connKey{}).(*tracked)
	if !ok {
		return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the request came over no connection of this listener")
	}
	if peer, ok := attest.PeerFrom(ctx); ok {
		p, err := l.limiters.calls.Take(peer.Machine(), bytes, t.drop)
		return p.Release, busy(err)
	}
	p, err := l.limiters.bytes.Take(t.source, bytes, t.drop)
	return p.Release, busy(err)
}

func (l *Listener) aged(c *Conn) bool {
	if time.Since(c.since) > l.cfg.MaxAge {
		return true
	}
	return c.peer != nil && c.peer.Appraisal().Generation != l.cfg.Generation()
}

// CloseMachine closes every connection of that machine at once, also those whose exchange has not ended. It is
// for a ban. The Appraiser must know the ban before, because it refuses later connections. CloseMachine returns
// the number of connections that were open.
func (l *Listener) CloseMachine(m attest.MachineID) int {
	now := time.Now()
	l.mu.Lock()
	l.bans = slices.DeleteFunc(l.bans, func(b ban) bool {
		return now.Sub(b.at) > l.sideConfig.timeouts.handshake+l.sideConfig.timeouts.exchange
	})
	l.bans = append(l.bans, ban{m, now})
	var gone []*Conn
	for c := range l.sessions {
		if c.peer != nil && c.peer.Machine() == m {
			gone = append(gone, c)
		}
	}
	l.mu.Unlock()
	for _, c := range gone {
		// Not the TLS connection: it would first write an alert, and wait for a peer that does not read.
		_ = c.tcp.Close()
	}
	return len(gone)
}

// Close stops accepting, closes the connections in handshake or exchange, and waits until those have ended.
// Connections that were handed on belong to their server.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		l.wg.Wait()
		return nil
	}
	l.closed = true
	var pending []net.Conn
	for c := range l.setUp {
		pending = append(pending, c)
	}
	l.mu.Unlock()
	err := l.inner.Close()
	l.cancel()
	for _, c := range pending {
		_ = c.Close()
	}
	_ = l.attested.Close()
	_ = l.plain.Close()
	l.wg.Wait()
	return err
}

func (l *Listener) accept() {
	var pause time.Duration
	for {
		raw, err := l.inner.Accept()
		if err != nil {
			if l.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				l.cancel()
				_ = l.attested.Close()
				_ = l.plain.Close()
				return
			}
			// No file descriptors left, or a client that disconnected: no reason to stop.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			l.cfg.Log.Warn("accept a connection", "err", err, "pause", pause)
			select {
			case <-time.After(pause):
			case <-l.ctx.Done():
			}
			continue
		}
		pause = 0
		conn, dropped := l.admit(raw)
		if dropped != "" {
			_ = raw.Close()
			l.observe(SetUp{Remote: raw.RemoteAddr().String(), Dropped: dropped})
			continue
		}
		l.wg.Go(func() { l.serve(conn) })
	}
}

// admit applies the limits before TLS, where an unauthenticated peer begins to use resources.
func (l *Listener) admit(raw net.Conn) (conn *tracked, dropped string) {
	source := peerlimit.SourceOf(raw.RemoteAddr())
	if err := l.limiters.rate.Allow(source, time.Now()); err != nil {
		return nil, causeOf(err, "source_rate", "rate")
	}
	conn = &tracked{Conn: raw, source: source, onClose: l.forget}
	conn.left.Store(handshakeBytes)
	place, err := l.limiters.setUp.Take(source, 1, conn.drop)
	if err != nil {
		return nil, causeOf(err, "source_setup_full", "setup_full")
	}
	if t, ok := raw.(interface {
		SetReadBuffer(bytes int) error
		SetWriteBuffer(bytes int) error
	}); ok {
		_, _ = t.SetReadBuffer(socketBuffer), t.SetWriteBuffer(socketBuffer)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		place.Release()
		return nil, "closed"
	}
	conn.setUp = place
	conn.keep(place)
	l.setUp[raw] = struct{}{}
	return conn, ""
}

func causeOf(err error, source, all string) string {
	if errors.Is(err, peerlimit.ErrSourceFull) {
		return source
	}
	return all
}

func (l *Listener) serve(conn *tracked) {
	s := SetUp{Remote: conn.RemoteAddr().String()}
	ready, to := l.prepare(conn, &s)
	l.mu.Lock()
	delete(l.setUp, conn.Conn)
	l.mu.Unlock()
	if s.Err == nil {
		s.Dropped = l.seat(conn, s.Peer, s.Plain)
	}
	conn.setUp.Release()
	l.observe(s)
	if s.Err != nil || s.Dropped != "" {
		_ = conn.Close()
		return
	}
	to.hand(ready)
}

// seat takes a place for a connection whose set-up has ended: which kind depends on the peer's evidence.
func (l *Listener) seat(conn *tracked, peer *attest.Peer, plain bool) (dropped string) {
	if peer != nil {
		place, err := l.limiters.attested.Take(peer.Machine(), 1, conn.drop)
		if err != nil {
			return causeOf(err, "machine_open_full", "attested_full")
		}
		conn.left.Store(-1)
		conn.keep(place)
		return ""
	}
	place, err := l.limiters.open.Take(conn.source, 1, conn.drop)
	if err != nil {
		return causeOf(err, "source_open_full", "open_full")
	}
	bytes := l.limiters.limits.ConnBytes
	if plain {
		bytes = l.limiters.limits.PlainBytes
	}
	conn.left.Store(bytes)
	conn.half = bytes / 2
	if !plain && l.limiters.limits.Large > 0 {
		conn.more = l.enlarge
	}
	conn.open = place
	conn.keep(place)
	return ""
}

// enlarge gives a connection one of [Limits.Large] places until it is closed, and lets it send
// [Limits.LargeBytes] more.
func (l *Listener) enlarge(t *tracked) error {
	place, err := l.limiters.large.Take(t.source, 1, t.drop)
	if err != nil {
		return busy(err)
	}
	t.keep(place)
	t.left.Add(l.limiters.limits.LargeBytes)
	return nil
}

// forget is called once for every connection that was admitted.
func (l *Listener) forget(t *tracked) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.sessions, t.session)
}

// prepare runs the handshake and, if the client asks for it, the exchange. It also returns the connection's
// endpoint.
func (l *Listener) prepare(conn *tracked, s *SetUp) (net.Conn, *endpoint) {
	began := time.Now()
	tc := tls.Server(conn, l.tls)
	ctx, cancel := context.WithTimeout(l.ctx, l.sideConfig.timeouts.handshake)
	defer cancel()
	if s.Err = errors.Join(tc.SetDeadline(began.Add(l.sideConfig.timeouts.handshake)), tc.HandshakeContext(ctx)); s.Err != nil {
		s.Err = fmt.Errorf("TLS handshake: %w", classifyHandshake(s.Err))
		return nil, nil
	}
	s.Times.Handshake = time.Since(began)
	if s.Err = tc.SetDeadline(time.Time{}); s.Err != nil {
		return nil, nil
	}
	if tc.ConnectionState().NegotiatedProtocol != ALPN {
		s.Plain = true
		return tc, l.plain
	}
	conn.left.Store(exchangeBytes)
	p := l.sideConfig
	p.peers = &unattested{conn: conn, limiters: l.limiters}
	ac, times, err := establish(l.ctx, tc, conn, p)
	times.Handshake = s.Times.Handshake
	s.Times, s.Err = times, err
	if err != nil {
		_ = tc.Close()
		return nil, nil
	}
	s.Peer = ac.peer
	if s.Err = l.register(ac, conn, began); s.Err != nil {
		_ = tc.Close()
		return nil, nil
	}
	return ac, l.attested
}

// register makes a connection known to CloseMachine. It refuses a machine that was banned while its exchange
// ran, even if that was after its appraisal.
func (l *Listener) register(ac *Conn, conn *tracked, began time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.bans {
		if ac.peer != nil && ac.peer.Machine() == b.machine && !b.at.Before(began) {
			return attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s was banned while it connected", b.machine)
		}
	}
	l.sessions[ac] = struct{}{}
	conn.session = ac
	return nil
}

// establish checks the session and runs the exchange on it: the same at both ends.
func establish(ctx context.Context, tc *tls.Conn, tcp *tracked, p sideConfig) (*Conn, Times, error) {
	cs := tc.ConnectionState()
	if err := checkSession(cs); err != nil {
		return nil, Times{}, &ExchangeError{Err: err}
	}
	ekm, err := exportKey(cs)
	if err != nil {
		return nil, Times{}, &ExchangeError{Err: err}
	}
	peer, times, err := p.run(ctx, tc, ekm)
	if err != nil {
		return nil, times, err
	}
	return &Conn{Conn: tc, tcp: tcp, peer: peer, since: time.Now()}, times, nil
}

func classifyHandshake(err error) error {
	if e := classify(err); attest.ReasonOf(e) == attestv1.Reason_REASON_DEADLINE {
		return attest.Refuse(attestv1.Reason_REASON_DEADLINE, "it was not complete after %s", handshakeTimeout)
	}
	return err
}

func (l *Listener) observe(s SetUp) {
	s.Role = roleServer.String()
	if l.cfg.Observe != nil {
		l.cfg.Observe(s)
	}
	switch {
	case s.Dropped != "":
		l.cfg.Log.Debug("connection dropped", "remote", s.Remote, "cause", s.Dropped)
	case s.Err == nil && s.Plain:
	case s.Err == nil:
		l.cfg.Log.Debug("session opened", "remote", s.Remote, "peer", peerName(s.Peer), "seconds", s.Times.Total.Seconds())
	case errors.As(s.Err, new(*attest.Refusal)):
		// Only this place records the details that an unattested peer does not receive. Above the rate limit
		// only metrics count the refusal.
		level, rate := slog.LevelWarn, l.limiters.lines
		switch attest.ReasonOf(s.Err) { //nolint:exhaustive // only a peer with genuine evidence and a trusted EK gets these
		case attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_BANNED, attestv1.Reason_REASON_LOCK_FOREIGN:
			rate = l.limiters.genuine
		}
		if rate.Allow(peerlimit.SourceOfAddress(s.Remote), time.Now()) != nil {
			level = slog.LevelDebug
		}
		l.cfg.Log.Log(l.ctx, level, "peer refused", "remote", s.Remote, "reason", attest.ReasonName(attest.ReasonOf(s.Err)), "err", LogText(s.Err, rate == l.limiters.lines))
	default:
		l.cfg.Log.Debug("connection failed", "remote", s.Remote, "err", s.Err)
	}
}

func peerName(p *attest.Peer) slog.Value {
	if p == nil {
		return slog.StringValue("not attested")
	}
	return slog.StringValue(p.String())
}
