// Package atls implements muster-atls/1: TLS 1.3 with mutual remote attestation, bound to the TLS
// session. docs/attested-tls.md is its specification.
//
// A connection has three phases. It starts as plain TLS, whose certificates carry no trust. If the
// client asked for muster-atls/1 by ALPN, the two sides then exchange offers, evidence and
// verdicts, all bound to the session's exported keying material. Only when both verdicts are
// "accepted" does the connection carry HTTP/2, and every request on it then has the [attest.Peer]
// in its context.
//
// The verdict belongs to the connection: it is made once and never changes, and no request can
// influence it (J1). It expires, though: see [Listener.Handler].
//
// This package enforces the following invariants. The lines that enforce one name it:
//
//	A1  no verdict without the checked quote of this session;
//	A3  an empty configuration accepts nothing;
//	A4  no resumption and no 0-RTT;
//	A5  evidence is appraised for one purpose, and never for "public".
package atls

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// ALPN is the protocol's name in TLS's application-layer protocol negotiation (RFC 7301).
const ALPN = "muster-atls/1"

const (
	// handshakeTimeout bounds the TLS handshake. exchangeTimeout bounds everything after it, up to
	// the second verdict. Both are fixed at the start: a peer that sends one byte a second does not
	// prolong them.
	handshakeTimeout = 5 * time.Second
	exchangeTimeout  = 10 * time.Second
	// verdictReserve is the part of exchangeTimeout that is reserved to send the reason to a peer
	// that was too slow.
	verdictReserve = 500 * time.Millisecond
	// lingerTimeout bounds the wait for a refused peer to read its verdict and close the
	// connection.
	lingerTimeout = time.Second
	// maxRetryAfter bounds the wait that an accepted peer can ask of us, maxUnattestedRetryAfter
	// the wait that any other peer can ask of us.
	maxRetryAfter           = 10 * time.Minute
	maxUnattestedRetryAfter = 5 * time.Second
	// DefaultMaxAge is the age at which a verdict expires and its connection is closed with GOAWAY.
	DefaultMaxAge = time.Hour
)

// timeouts are handshakeTimeout and exchangeTimeout, or those of a test.
type timeouts struct{ handshake, exchange time.Duration }

func (t timeouts) withDefaults() timeouts {
	return timeouts{cmp.Or(t.handshake, handshakeTimeout), cmp.Or(t.exchange, exchangeTimeout)}
}

// NoAttester is for a side that sends no evidence: an owner's program, which does not run on a
// machine of the cluster. Its connections reach the access level "session" at most.
var NoAttester attest.Attester = noAttester{}

type noAttester struct{}

func (noAttester) Formats() []attestv1.Format { return nil }

func (noAttester) Attest(context.Context, attestv1.Format, attest.Binding) (*attestv1.Evidence, error) {
	return nil, attest.Refuse(attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST, "this program has no evidence to give")
}

func (noAttester) Respond(context.Context, *attestv1.Challenge, attest.Binding) ([]byte, error) {
	return nil, attest.Refuse(attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST, "this program has no key to show")
}

// NoAppraiser is for a server that asks clients for no evidence, because all that it serves is open
// to every session: the init server, whose clients authenticate with a secret. Its connections have
// no [attest.Peer]. As an appraiser it accepts nothing (A3).
var NoAppraiser attest.Appraiser = noAppraiser{}

type noAppraiser struct{}

func (noAppraiser) Appraise(context.Context, attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "this server appraises no peer, so it accepts none")
}

// errHungUp is not a refusal: the peer may only be restarting.
var errHungUp = errors.New("the peer closed the connection before its verdict")

// checkSession checks the session after the handshake, not in a callback of crypto/tls, because
// some of those run before the peer's signature is checked.
func checkSession(cs tls.ConnectionState) error {
	if !cs.HandshakeComplete {
		return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the handshake is not complete")
	}
	if cs.NegotiatedProtocol != ALPN {
		return attest.Refuse(attestv1.Reason_REASON_FORMAT_NONE, "the peer speaks %q, not %s: is the address that of a Muster service?", cs.NegotiatedProtocol, ALPN)
	}
	if cs.Version != tls.VersionTLS13 {
		return attest.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the session is %s, not TLS 1.3, so evidence cannot be bound to it", tls.VersionName(cs.Version))
	}
	if cs.DidResume { // A4
		return attest.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the session was resumed, so evidence cannot be bound to it")
	}
	return nil
}

type sessionKey struct{}

// Session is the part of a muster-atls/1 connection that a request's context holds. If the peer is
// attested, [attest.PeerFrom] returns it.
type Session struct {
	// Since is when the exchange ended.
	Since time.Time
	// Remote is the peer's network address, which proves nothing.
	Remote string

	conn *Conn
}

// SessionFrom returns the session that a request came over, and false if the request came over
// plain HTTPS.
func SessionFrom(ctx context.Context) (Session, bool) {
	s, ok := ctx.Value(sessionKey{}).(Session)
	return s, ok && s.conn != nil
}

// Keep keeps the connection's place from being given to another source until done is called. It is
// for a call that waits or works for its caller; only a few such calls may run at one time.
func (s Session) Keep() (done func()) {
	if s.conn == nil || s.conn.tcp.open == nil {
		return func() {}
	}
	return s.conn.tcp.open.Pin()
}

// withSession is the only function that puts a Session into a context, so a Session found there
// always belongs to a finished exchange.
func withSession(ctx context.Context, c *Conn) context.Context {
	ctx = context.WithValue(ctx, sessionKey{}, Session{Since: c.since, Remote: c.RemoteAddr().String(), conn: c})
	if c.peer != nil {
		ctx = attest.WithPeer(ctx, *c.peer)
	}
	return ctx
}

// windUp makes net/http send GOAWAY: open streams end normally, and the client dials and attests
// again for its next request.
func windUp(w http.ResponseWriter) { w.Header().Set("Connection", "close") }
