package peerlimit

import (
	"net"
	"sync"
)

// Listener accepts a bounded number of connections at one time, per source and in sum, for a server
// without authentication. When all places are taken, it closes the oldest connection of the source
// with the most.
type Listener struct {
	net.Listener
	limiter *Limiter[Source]
}

// NewListener takes over inner. At most open connections are open at one time, and at most
// perSource of one source.
func NewListener(inner net.Listener, open, perSource int) *Listener {
	return &Listener{inner, NewLimiter[Source](int64(open), int64(perSource))}
}

// Accept implements [net.Listener]. It closes connections for which there is no place.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		conn := &placed{Conn: c}
		place, err := l.limiter.Take(SourceOf(c.RemoteAddr()), 1, func() { _ = c.Close() })
		if err == nil {
			conn.place = place
			return conn, nil
		}
		_ = c.Close()
	}
}

// placed releases its place when it is closed.
type placed struct {
	net.Conn
	place *Place[Source]
	once  sync.Once
}

// Close implements [net.Conn].
func (p *placed) Close() error {
	p.once.Do(p.place.Release)
	return p.Conn.Close()
}
