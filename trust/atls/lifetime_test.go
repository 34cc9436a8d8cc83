package atls_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// counted counts the dialed connections.
func counted(cc *atls.ClientConfig) *atomic.Int32 {
	n := new(atomic.Int32)
	cc.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		n.Add(1)
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	return n
}

// Invariant K2.
func TestAVerdictAges(t *testing.T) {
	w := newFixture(t)
	var generation atomic.Int64
	for name, tt := range map[string]struct {
		server func(*atls.ServerConfig)
		client func(*atls.ClientConfig)
		age    func() // between two calls
		dials  int32  // for three calls
	}{
		"a young one serves all calls": {dials: 1},
		"an old one is wound up by the server": {
			server: func(c *atls.ServerConfig) { c.MaxAge = time.Nanosecond },
			dials:  3,
		},
		"an old one is given up by the client": {
			client: func(c *atls.ClientConfig) { c.MaxAge = time.Nanosecond },
			dials:  3,
		},
		"one by an older policy is wound up": {
			server: func(c *atls.ServerConfig) { c.Generation = generation.Load },
			age:    func() { generation.Add(1) },
			dials:  2, // the call after the change still succeeds, and is the connection's last one
		},
	} {
		t.Run(name, func(t *testing.T) {
			generation.Store(0)
			sc, cc := w.serverConfig(t), w.clientConfig(t)
			sc.Appraiser = generations{sc.Appraiser, generation.Load}
			if tt.server != nil {
				tt.server(&sc)
			}
			if tt.client != nil {
				tt.client(&cc)
			}
			dials := counted(&cc)
			s := serve(t, sc, whoami)
			c := dial(t, cc)
			for i := range 3 {
				if got, err := get(t.Context(), c, s.url); err != nil || got != w.client.ID().String() {
					t.Fatalf("call %d: %q, %v", i, got, err)
				}
				if i == 0 && tt.age != nil {
					tt.age()
				}
			}
			if dials.Load() != tt.dials {
				t.Errorf("%d connections for three calls, want %d", dials.Load(), tt.dials)
			}
		})
	}
}

func TestAStreamOutlivesTheVerdictButNotABan(t *testing.T) {
	w := newFixture(t)
	sc, cc := w.serverConfig(t), w.clientConfig(t)
	sc.MaxAge = time.Nanosecond
	next := make(chan struct{})
	s := serve(t, sc, func(w http.ResponseWriter, r *http.Request) {
		for {
			if _, err := io.WriteString(w, "x"); err != nil {
				return
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				return
			}
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	})
	c := dial(t, cc)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	one := make([]byte, 1)
	for i := range 5 {
		if i > 0 {
			next <- struct{}{}
		}
		if _, err := io.ReadFull(resp.Body, one); err != nil {
			t.Fatalf("byte %d of a stream on a connection that is wound up: %v", i, err)
		}
	}
	if n := s.CloseMachine(attest.MachineID{1}); n != 0 {
		t.Errorf("%d connections of a machine that has none", n)
	}
	if n := s.CloseMachine(w.client.ID()); n != 1 {
		t.Errorf("%d connections closed by the ban, want 1", n)
	}
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the stream goes on after the ban")
	}
}

func TestABanCatchesAnExchangeUnderWay(t *testing.T) {
	w := newFixture(t)
	sc, cc := w.serverConfig(t), w.clientConfig(t)
	var s *service
	ready := make(chan struct{})
	// The ban happens after the appraisal of this connection.
	sc.Appraiser = after{sc.Appraiser, func() { <-ready; s.CloseMachine(w.client.ID()) }}
	seen := make(chan atls.SetUp, 1)
	sc.Observe = func(s atls.SetUp) { seen <- s }
	s = serve(t, sc, whoami)
	close(ready)
	if got, err := get(t.Context(), dial(t, cc), s.url); err == nil {
		t.Fatalf("%q: the machine got through", got)
	}
	if got := (<-seen).Err; attest.ReasonOf(got) != attestv1.Reason_REASON_BANNED {
		t.Errorf("%v, want BANNED", got)
	}
}

// after runs a function after the appraisal.
type after struct {
	attest.Appraiser
	do func()
}

func (a after) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	out, err := a.Appraiser.Appraise(ctx, c)
	a.do()
	return out, err
}

func TestCloseEndsWhatIsInTheExchange(t *testing.T) {
	w := newFixture(t)
	inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	sc := w.serverConfig(t)
	sc.Patient()
	l, err := atls.NewListener(inner, sc)
	if err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	// One sends nothing, one stops within the handshake, one after it.
	for i := range 3 {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		switch i {
		case 1:
			if _, err := c.Write([]byte{22, 3, 1, 2, 0}); err != nil {
				t.Fatal(err)
			}
		case 2:
			tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{atls.ALPN}})
			if err := tc.HandshakeContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(tc, make([]byte, 4)); err != nil { // its Offer: the exchange has begun
				t.Fatal(err)
			}
		}
		conns = append(conns, c)
	}
	began := time.Now()
	for range 2 { // a second Close is not an error
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took > atls.Patience {
		t.Errorf("Close took %s", took)
	}
	for i, c := range conns {
		if err := c.SetReadDeadline(time.Now().Add(atls.Patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connection %d is still open", i)
		}
		_ = c.Close()
	}
	for _, b := range []net.Listener{l.Attested(), l.Plain()} {
		if _, err := b.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("accept after Close: %v", err)
		}
	}
}

func TestTransportCloseEndsDialsAndCalls(t *testing.T) {
	w := newFixture(t)
	for name, url := range map[string]string{
		"a server that never answers the offer": "https://" + startTLS(t, []string{atls.ALPN}),
		"a handler that never answers": serve(t, w.serverConfig(t), func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		}).url,
	} {
		t.Run(name, func(t *testing.T) {
			cc := w.clientConfig(t)
			cc.Patient()
			dialled := make(chan struct{}, 1)
			cc.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				defer func() { dialled <- struct{}{} }()
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
			tr, err := atls.NewTransport(cc)
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				if got, err := get(t.Context(), &http.Client{Transport: tr}, url); err == nil {
					t.Errorf("answered: %q", got)
				}
			})
			<-dialled
			began := time.Now()
			if err := tr.Close(); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			if took := time.Since(began); took > atls.Patience {
				t.Errorf("Close took %s", took)
			}
			if _, err := get(t.Context(), &http.Client{Transport: tr}, url); !errors.Is(err, net.ErrClosed) {
				t.Errorf("a call after Close: %v", err)
			}
		})
	}
}

func TestACallerThatGivesUpEndsItsDialSoon(t *testing.T) {
	w := newFixture(t)
	silent := startTLS(t, []string{atls.ALPN})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	cc := w.clientConfig(t)
	cc.Patient()
	began := time.Now()
	if _, err := get(ctx, dial(t, cc), "https://"+silent); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want the caller's deadline", err)
	}
	if took := time.Since(began); took > atls.Patience {
		t.Errorf("it took %s", took)
	}
}
