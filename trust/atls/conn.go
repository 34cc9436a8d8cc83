package atls

import (
	"crypto/tls"
	"net"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
)

// Conn is a connection whose exchange has ended well. It hides the *tls.Conn, so that
// net/http speaks HTTP/2 on it as it would on a connection without TLS, and nothing looks
// for trust in certificates.
type Conn struct {
	net.Conn // only what the interface names

	tcp   *tracked
	peer  *attest.Peer // nil: a session without an attested peer
	since time.Time
}

// Peer gives the attested peer; false if the other side did not attest.
func (c *Conn) Peer() (attest.Peer, bool) {
	if c.peer == nil {
		return attest.Peer{}, false
	}
	return *c.peer, true
}

// newTLSConfig is what both sides have in common.
func newTLSConfig() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true, // A4
	}
}
