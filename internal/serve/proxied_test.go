package serve

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
)

func proxied(t *testing.T, from ...string) *Proxied {
	t.Helper()
	inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	networks, err := ParsePrefixes(from)
	if err != nil {
		t.Fatal(err)
	}
	p := NewProxied(inner, networks, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func header(t *testing.T, version byte) []byte {
	t.Helper()
	h := proxyproto.HeaderProxyFromAddrs(version, &net.TCPAddr{IP: net.ParseIP("192.0.2.7"), Port: 1234}, &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 9})
	b, err := h.Format()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func dialFrom(t *testing.T, p *Proxied, source string, first []byte) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	c, err := d.DialContext(t.Context(), "tcp", p.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := c.Write(first); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestWhoALoadBalancerPassesOnIsTheSource(t *testing.T) {
	p := proxied(t, "127.0.0.2", "127.0.1.0/24")
	for name, tt := range map[string]struct {
		from  string
		first []byte
		want  string // the source that is seen, or "nobody"
		read  string
	}{
		"a listed load balancer":          {"127.0.0.2", append(header(t, 2), "hello"...), "192.0.2.7", "hello"},
		"one of a listed network":         {"127.0.1.9", append(header(t, 2), "hello"...), "192.0.2.7", "hello"},
		"a client that connects directly": {"127.0.0.3", []byte("hello"), "127.0.0.3", "hello"},
		"a client that says it is one":    {"127.0.0.3", append(header(t, 2), "hello"...), "127.0.0.3", string(header(t, 2))[:5]},
		"a listed one without the header": {"127.0.0.2", []byte("GET / HTTP/1.1\r\n\r\n"), "", ""},
		"a listed one with version 1":     {"127.0.0.2", append(header(t, 1), "hello"...), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialFrom(t, p, tt.from, tt.first)
			if tt.want == "" {
				if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, net.ErrClosed) {
					t.Errorf("%v, want the connection closed", err)
				}
				return
			}
			got, err := p.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = got.Close() }()
			b := make([]byte, 5)
			if _, err := io.ReadFull(got, b); err != nil || string(b) != tt.read {
				t.Errorf("read %q, %v", b, err)
			}
			if a := netip.MustParseAddrPort(got.RemoteAddr().String()).Addr().String(); a != tt.want {
				t.Errorf("the source is %s, want %s", a, tt.want)
			}
		})
	}
}

// Clients behind a load balancer that send nothing block no other client, and hold no more connections than documented.
func TestHeadersThatDoNotComeKeepNobodyOut(t *testing.T) {
	p := proxied(t, "127.0.0.2")
	const more = 50
	var silent []net.Conn
	for range headersAtOnce + more {
		silent = append(silent, dialFrom(t, p, "127.0.0.2", nil))
	}
	c := dialFrom(t, p, "127.0.0.3", []byte("x"))
	got, err := p.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = got.Close() }()
	if got.RemoteAddr().String() != c.LocalAddr().String() {
		t.Errorf("%s was accepted", got.RemoteAddr())
	}
	p.mu.Lock()
	n := len(p.waiting)
	p.mu.Unlock()
	if n > headersAtOnce {
		t.Errorf("%d wait", n)
	}
	closed := 0 // at this point: they came before the one that was accepted
	soon := time.Now().Add(time.Second)
	for _, c := range slices.Backward(silent) {
		if err := c.SetReadDeadline(soon); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			closed++
		}
	}
	if closed < more {
		t.Errorf("%d of those above the bound are closed, want %d", closed, more)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := p.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

func TestParsePrefixes(t *testing.T) {
	got, err := ParsePrefixes([]string{"10.1.2.3/8", "192.0.2.7", "2001:db8::/32"})
	if want := "[10.0.0.0/8 192.0.2.7/32 2001:db8::/32]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("%v, %v, want %s", got, err, want)
	}
	for _, bad := range []string{"", "10.0.0.0/33", "lb.example.org"} {
		if _, err := ParsePrefixes([]string{bad}); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
