// Package atls is muster-atls/1: TLS 1.3 after which each side that asked for it knows
// which machine is at the other end of this very session. docs/attested-tls.md is its
// specification.
//
// Think of a connection as having three lives. First it is plain TLS, whose certificates
// carry no trust at all. Then, if the client asked for it by ALPN, the two sides exchange
// offers, evidence and verdicts, all bound to the session's exported keying material.
// Only when both verdicts are "accepted" does it begin its third life as an ordinary
// HTTP/2 connection, and then every request on it carries the [attest.Peer] in its
// context.
//
// The verdict belongs to the connection: it is made once, never changed, and no request
// can say anything about it (J1). It ages, though: see [Listener.Handler].
//
// These invariants are kept here, and the lines that keep one name it:
//
//	A1  no verdict without the checked quote of this session;
//	A3  nothing configured means nothing accepted;
//	A4  no resumption and no 0-RTT;
//	A5  evidence is judged for one purpose, and never for "public".
package atls

import (
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
	// handshakeTimeout bounds the TLS handshake, exchangeTimeout what follows it until the
	// second verdict. Both are fixed at the start: a byte a second does not prolong them.
	handshakeTimeout = 5 * time.Second
	exchangeTimeout  = 10 * time.Second
	// verdictReserve is kept back from exchangeTimeout, so that a peer that was too slow
	// can still be told so.
	verdictReserve = 500 * time.Millisecond
	// lingerTimeout bounds the wait for a refused peer to read its verdict and hang up.
	lingerTimeout = time.Second
	// maxRetryAfter bounds what a peer can make us wait that we accepted,
	// maxUnattestedRetryAfter what any other can.
	maxRetryAfter           = 10 * time.Minute
	maxUnattestedRetryAfter = 5 * time.Second
	// DefaultMaxAge is how old a verdict may grow before its connection is wound up.
	DefaultMaxAge = time.Hour
)

// NoAttester is for a side that gives no evidence of itself: an owner's program, which
// runs on no machine of the cluster. Its connections reach the access level "session" at
// most.
var NoAttester attest.Attester = noAttester{}

type noAttester struct{}

func (noAttester) Formats() []attestv1.Format { return nil }

func (noAttester) Attest(context.Context, attestv1.Format, attest.Binding) (*attestv1.Evidence, error) {
	return nil, attest.Refuse(attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST, "this program has no evidence to give")
}

func (noAttester) Respond(context.Context, *attestv1.Challenge, attest.Binding) ([]byte, error) {
	return nil, attest.Refuse(attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST, "this program has no key to show")
}

// NoAppraiser is for a server that asks no client for evidence, since what it serves is
// open to every session: the init server, whose callers show a secret. Its connections
// have no [attest.Peer]. As an appraiser it accepts nothing (A3).
var NoAppraiser attest.Appraiser = noAppraiser{}

type noAppraiser struct{}

func (noAppraiser) Appraise(context.Context, attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "nobody is judged here, so nobody is accepted")
}

// errHungUp is no refusal: a peer that went away may be one that is just restarting.
var errHungUp = errors.New("the peer hung up before its verdict")

// checkSession decides after the handshake, never in one of crypto/tls's callbacks, some
// of which run before the peer's signature was checked.
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

// Session is what a request's context knows of a connection over muster-atls/1. The peer,
// if it is attested, is at [attest.PeerFrom].
type Session struct {
	// Since is when the exchange ended.
	Since time.Time
	// Remote is the peer's network address, which proves nothing.
	Remote string

	conn *Conn
}

// SessionFrom gives the session that a request came over; false if it came over plain
// HTTPS.
func SessionFrom(ctx context.Context) (Session, bool) {
	s, ok := ctx.Value(sessionKey{}).(Session)
	return s, ok && s.conn != nil
}

// Keep keeps the connection's place from being given to another source until done is called. It
// is for a call that waits or works for its caller; there must be few at a time.
func (s Session) Keep() (done func()) {
	if s.conn == nil || s.conn.tcp.open == nil {
		return func() {}
	}
	return s.conn.tcp.open.Pin()
}

// withSession is the only way into the context, so that a Session there always is that of
// a finished exchange.
func withSession(ctx context.Context, c *Conn) context.Context {
	ctx = context.WithValue(ctx, sessionKey{}, Session{Since: c.since, Remote: c.RemoteAddr().String(), conn: c})
	if c.peer != nil {
		ctx = attest.WithPeer(ctx, *c.peer)
	}
	return ctx
}

// windUp makes net/http send GOAWAY: streams that are open end as they would, and the
// client dials and attests anew for the next one.
func windUp(w http.ResponseWriter) { w.Header().Set("Connection", "close") }
