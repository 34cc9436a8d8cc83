package atls

import (
	"crypto/tls"
	"net"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
)

// Conn is a connection whose exchange has succeeded. It hides the *tls.Conn, so that net/http
// speaks HTTP/2 on it as on a connection without TLS, and no code derives trust from certificates.
type Conn struct {
	net.Conn // only the interface's methods are visible

	tcp   *tracked
	peer  *attest.Peer // nil: a session without an attested peer
	since time.Time
}

// Peer returns the attested peer, and false if the other side did not attest.
func (c *Conn) Peer() (attest.Peer, bool) {
	if c.peer == nil {
		return attest.Peer{}, false
	}
	return *c.peer, true
}

// newTLSConfig returns the part of the TLS configuration that both sides share.
func newTLSConfig() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true, // A4
	}
}
