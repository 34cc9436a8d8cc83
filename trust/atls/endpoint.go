package atls

import (
	"net"
	"sync"
)

// endpoint is one of the two listeners that a Listener feeds.
type endpoint struct {
	addr   net.Addr
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func newEndpoint(a net.Addr) *endpoint {
	return &endpoint{addr: a, conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (b *endpoint) hand(c net.Conn) {
	select {
	case b.conns <- c:
	case <-b.closed:
		_ = c.Close()
	}
}

// Accept implements [net.Listener].
func (b *endpoint) Accept() (net.Conn, error) {
	select {
	case c := <-b.conns:
		return c, nil
	case <-b.closed:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener]. The other endpoint stays open.
func (b *endpoint) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}

// Addr implements [net.Listener].
func (b *endpoint) Addr() net.Addr { return b.addr }
