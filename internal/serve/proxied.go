package serve

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/pires/go-proxyproto"
)

const (
	// headerTimeout is how long a load balancer may take to send the header of a connection.
	headerTimeout = 5 * time.Second
	// headersAtOnce bounds the connections whose header has not arrived: 4 KiB each, 1 MiB in sum. Further ones are closed.
	headersAtOnce = 256
)

// Proxied is a listener behind load balancers that send the client's address, by a header of the PROXY protocol, version 2
// (https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, section 2.2). The remote address of such a connection is
// the client's, so that limits of one source are those of one client.
//
// A connection from any other address is passed on unchanged: a header from there is invalid data for the reader of the
// connection. A client that can connect from an address of a load balancer can choose a source; limits in sum still bound
// it.
type Proxied struct {
	inner net.Listener
	from  []netip.Prefix
	log   *slog.Logger

	ready chan accepted
	done  chan struct{}
	slots chan struct{}
	all   sync.WaitGroup
	once  sync.Once

	mu      sync.Mutex
	closed  bool
	waiting map[net.Conn]struct{}
}

type accepted struct {
	conn net.Conn
	err  error
}

// NewProxied returns a listener for inner's connections that requires the header from remote addresses in one of the
// prefixes.
func NewProxied(inner net.Listener, from []netip.Prefix, log *slog.Logger) *Proxied {
	p := &Proxied{
		inner: inner, from: from, log: log, ready: make(chan accepted), done: make(chan struct{}), slots: make(chan struct{}, headersAtOnce), waiting: map[net.Conn]struct{}{},
	}
	p.all.Go(p.accept)
	return p
}

// Accept returns the next connection whose header has arrived, or that needs none.
func (p *Proxied) Accept() (net.Conn, error) {
	select {
	case a := <-p.ready:
		return a.conn, a.err
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Addr returns its address.
func (p *Proxied) Addr() net.Addr { return p.inner.Addr() }

// Close closes the listener and the connections that were not accepted.
func (p *Proxied) Close() error {
	var err error
	p.once.Do(func() {
		err = p.inner.Close()
		close(p.done)
		p.mu.Lock()
		p.closed = true
		for c := range p.waiting {
			_ = c.Close()
		}
		p.mu.Unlock()
		p.all.Wait()
	})
	return err
}

func (p *Proxied) accept() {
	for {
		conn, err := p.inner.Accept()
		if err != nil {
			if !p.hand(accepted{err: err}) || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		if !p.listed(conn.RemoteAddr()) {
			p.hand(accepted{conn: conn})
			continue
		}
		select {
		case p.slots <- struct{}{}:
		default:
			_ = conn.Close()
			continue
		}
		p.all.Go(func() {
			defer func() { <-p.slots }()
			p.read(conn)
		})
	}
}

// hand passes the connection to Accept, or closes it if the listener is closed.
func (p *Proxied) hand(a accepted) bool {
	select {
	case p.ready <- a:
		return true
	case <-p.done:
		if a.conn != nil {
			_ = a.conn.Close()
		}
		return false
	}
}

func (p *Proxied) listed(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return false
	}
	ip := tcp.AddrPort().Addr().Unmap()
	return slices.ContainsFunc(p.from, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// read reads the header.
func (p *Proxied) read(conn net.Conn) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		_ = conn.Close()
		return
	}
	p.waiting[conn] = struct{}{}
	p.mu.Unlock()
	c := proxyproto.NewConn(conn, proxyproto.WithPolicy(proxyproto.REQUIRE), proxyproto.SetReadHeaderTimeout(headerTimeout), proxyproto.ValidateHeader(func(h *proxyproto.Header) error {
		if h.Version != 2 {
			return fmt.Errorf("version %d of the PROXY protocol, want 2", h.Version)
		}
		return nil
	}))
	h := c.ProxyHeader()
	p.mu.Lock()
	delete(p.waiting, conn)
	p.mu.Unlock()
	if h == nil {
		if _, err := c.Read(nil); !errors.Is(err, io.EOF) { // a health check connects and closes
			p.log.Warn("a load balancer sent no header of the PROXY protocol, version 2: let it send one, or take its address from --proxy-protocol-from", "from", conn.RemoteAddr().String(), "err", err)
		}
		_ = conn.Close()
		return
	}
	p.hand(accepted{conn: c})
}

// ParsePrefixes reads networks (10.0.0.0/8) and addresses.
func ParsePrefixes(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		n, err := netip.ParsePrefix(s)
		if err != nil {
			a, other := netip.ParseAddr(s)
			if other != nil {
				return nil, err
			}
			n = netip.PrefixFrom(a, a.BitLen())
		}
		out = append(out, n.Masked())
	}
	return out, nil
}
