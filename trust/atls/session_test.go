package atls_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// Invariant J1.
func TestARequestKnowsItsPeer(t *testing.T) {
	w := newFixture(t)
	for name, tt := range map[string]struct {
		server func(*atls.ServerConfig)
		client func(*atls.ClientConfig)
		want   string
	}{
		"both attest": {want: w.client.ID().String()},
		"a client that does not attest has a session and no peer": {
			client: func(c *atls.ClientConfig) { c.Attester = atls.NoAttester },
			want:   "session",
		},
		"a server without an appraiser makes no peers": {
			server: func(c *atls.ServerConfig) {
				c.Appraiser, c.Verifier, c.Generation, c.ClientPurpose = atls.NoAppraiser, nil, nil, ""
			},
			want: "session",
		},
	} {
		t.Run(name, func(t *testing.T) {
			sc, cc := w.serverConfig(t), w.clientConfig(t)
			if tt.server != nil {
				tt.server(&sc)
			}
			if tt.client != nil {
				tt.client(&cc)
			}
			var notified atomic.Pointer[attest.Peer]
			cc.OnPeer = func(p attest.Peer) { notified.Store(&p) }
			s := serve(t, sc, whoami)
			ctx, peer := atls.CapturePeer(t.Context())
			if _, ok := peer(); ok {
				t.Error("a peer before the request")
			}
			got, err := get(ctx, dial(t, cc), s.url)
			if err != nil || got != tt.want {
				t.Fatalf("%q, %v; want %q", got, err, tt.want)
			}
			p, ok := peer()
			if !ok || p.Machine() != w.server.ID() || p.Purpose() != attest.PurposeJoinservice {
				t.Errorf("captured %v, %v; want the server", p, ok)
			}
			if q := notified.Load(); q == nil || q.Machine() != w.server.ID() {
				t.Errorf("OnPeer got %v, want the server", q)
			}
			if len(p.Claims().Events()) == 0 {
				t.Error("no event log came")
			}
		})
	}
}

func TestPlainHTTPSWorksBesideIt(t *testing.T) {
	s := serve(t, newFixture(t).serverConfig(t), whoami)
	for name, configure := range map[string]func(*http.Transport){
		"HTTP/1.1": func(*http.Transport) {},
		"HTTP/2":   func(tr *http.Transport) { tr.ForceAttemptHTTP2 = true },
		"no ALPN":  func(tr *http.Transport) { tr.TLSClientConfig.NextProtos = nil },
	} {
		t.Run(name, func(t *testing.T) {
			tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}}
			configure(tr)
			defer tr.CloseIdleConnections()
			if got, err := get(t.Context(), &http.Client{Transport: tr}, s.url); err != nil || got != "plain" {
				t.Fatalf("%q, %v", got, err)
			}
		})
	}
}

// Each refusal is tried on both sides, and the exchange succeeds once the one input is repaired.
func TestRefusalsAreTypedAndNameTheirReason(t *testing.T) {
	w := newFixture(t)
	foreign := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	changed := attesttest.NewMachine(t, w.ca, attesttest.Options{Image: "one byte differs"})
	locked := attesttest.NewMachine(t, w.ca, attesttest.Options{})
	locked.LockTo([32]byte{1})
	for name, tt := range map[string]struct {
		server func(*atls.ServerConfig)
		client func(*atls.ClientConfig)
		want   attestv1.Reason
		remote bool // the server refuses the client
	}{
		"the server booted something else": {
			server: func(c *atls.ServerConfig) { c.Attester = changed.Attester(attest.PurposeJoinservice) },
			want:   attestv1.Reason_REASON_POLICY_REFUSED,
		},
		"the client booted something else": {
			client: func(c *atls.ClientConfig) { c.Attester = changed.Attester(attest.PurposeMachine) },
			want:   attestv1.Reason_REASON_POLICY_REFUSED, remote: true,
		},
		"no root certifies the server": {
			server: func(c *atls.ServerConfig) { c.Attester = foreign.Attester(attest.PurposeJoinservice) },
			want:   attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"no root certifies the client": {
			client: func(c *atls.ClientConfig) { c.Attester = foreign.Attester(attest.PurposeMachine) },
			want:   attestv1.Reason_REASON_EK_UNTRUSTED, remote: true,
		},
		"the client belongs to another cluster": {
			client: func(c *atls.ClientConfig) { c.Attester = locked.Attester(attest.PurposeMachine) },
			want:   attestv1.Reason_REASON_LOCK_FOREIGN, remote: true,
		},
		"a machine is no joinservice": {
			server: func(c *atls.ServerConfig) { c.Attester = w.server.Attester(attest.PurposeMachine) },
			want:   attestv1.Reason_REASON_BINDING_MISMATCH,
		},
		"a key service is no machine": {
			client: func(c *atls.ClientConfig) { c.Attester = w.client.Attester(attest.PurposeKMS) },
			want:   attestv1.Reason_REASON_BINDING_MISMATCH, remote: true,
		},
		"public evidence is refused": {
			client: func(c *atls.ClientConfig) { c.Attester = w.client.Attester(attest.PurposePublic) },
			want:   attestv1.Reason_REASON_BINDING_MISMATCH, remote: true,
		},
		"evidence for an order is refused": {
			client: func(c *atls.ClientConfig) { c.Attester = w.client.Attester(attest.PurposeOrder) },
			want:   attestv1.Reason_REASON_BINDING_MISMATCH, remote: true,
		},
		"a server without evidence": {
			server: func(c *atls.ServerConfig) { c.Attester = atls.NoAttester },
			want:   attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST,
		},
		"a client without evidence, where that is asked for": {
			server: func(c *atls.ServerConfig) { c.RefuseUnattested = true },
			client: func(c *atls.ClientConfig) { c.Attester = atls.NoAttester },
			want:   attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST, remote: true,
		},
		"a server that gives another format": {
			server: func(c *atls.ServerConfig) { c.Attester = formats{c.Attester, 77} },
			want:   attestv1.Reason_REASON_FORMAT_NONE,
		},
		"a client whose TPM does not answer": {
			client: func(c *atls.ClientConfig) { c.Attester = failing{c.Attester, errors.New("the TPM is gone")} },
			want:   attestv1.Reason_REASON_INTERNAL,
		},
		"a server whose TPM does not answer": {
			server: func(c *atls.ServerConfig) { c.Attester = failing{c.Attester, errors.New("the TPM is gone")} },
			want:   attestv1.Reason_REASON_INTERNAL, remote: true,
		},
		"a server that is busy": {
			server: func(c *atls.ServerConfig) {
				c.Attester = failing{c.Attester, attest.RefuseFor(3*time.Second, attestv1.Reason_REASON_BUSY, "too many quotes")}
			},
			want: attestv1.Reason_REASON_BUSY, remote: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, broken := range []bool{true, false} {
				sc, cc := w.serverConfig(t), w.clientConfig(t)
				if broken && tt.server != nil {
					tt.server(&sc)
				}
				if broken && tt.client != nil {
					tt.client(&cc)
				}
				seen := make(chan atls.SetUp, 4)
				sc.Observe = func(s atls.SetUp) { seen <- s }
				got, err := get(t.Context(), dial(t, cc), serve(t, sc, whoami).url)
				if !broken {
					if err != nil || got != w.client.ID().String() {
						t.Fatalf("repaired: %q, %v", got, err)
					}
					continue
				}
				var r *attest.Refusal
				if !errors.As(err, &r) || r.Reason != tt.want || r.Remote != tt.remote {
					t.Fatalf("%v, want %v, remote %v", err, tt.want, tt.remote)
				}
				if tt.want == attestv1.Reason_REASON_BUSY && r.RetryAfter != 3*time.Second {
					t.Errorf("try again after %s, want the 3 s that the server asked for", r.RetryAfter)
				}
				if r.Remote && r.Err != nil {
					t.Errorf("an unattested peer learns more than the reason: %v", r.Err)
				}
				select {
				case s := <-seen:
					if attest.ReasonOf(s.Err) != tt.want {
						t.Errorf("the server observed %v, want %v", s.Err, tt.want)
					}
				case <-time.After(atls.Patience):
					t.Error("the server observed nothing")
				}
			}
		})
	}
}

// formats offers formats that it does not have.
type formats struct {
	attest.Attester
	only attestv1.Format
}

func (f formats) Formats() []attestv1.Format { return []attestv1.Format{f.only} }

// failing is an attester whose TPM fails.
type failing struct {
	attest.Attester
	err error
}

func (f failing) Attest(context.Context, attestv1.Format, attest.Binding) (*attestv1.Evidence, error) {
	return nil, f.err
}

func TestManyFirstCallsMakeOneDial(t *testing.T) {
	w := newFixture(t)
	s := serve(t, w.serverConfig(t), whoami)
	var dials atomic.Int32
	cc := w.clientConfig(t)
	cc.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dials.Add(1)
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	c := dial(t, cc)
	quotes := w.client.Quotes()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if got, err := get(t.Context(), c, s.url); err != nil || got != w.client.ID().String() {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	wg.Wait()
	if dials.Load() != 1 || w.client.Quotes() != quotes+1 {
		t.Errorf("%d dials and %d quotes, want one of each", dials.Load(), w.client.Quotes()-quotes)
	}

	// One refusal also answers all calls that wait for the same dial, and those of the next 250 ms.
	cc.Attester = w.client.Attester(attest.PurposeKMS)
	c = dial(t, cc)
	dials.Store(0)
	began := time.Now()
	for range 20 {
		wg.Go(func() {
			if _, err := get(t.Context(), c, s.url); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
				t.Errorf("%v, want BINDING_MISMATCH", err)
			}
		})
	}
	wg.Wait()
	if most := 1 + int32(time.Since(began)/(250*time.Millisecond)); dials.Load() > most {
		t.Errorf("%d dials were refused, want at most %d", dials.Load(), most)
	}
}

func TestABrokenConnectionIsDialledAnew(t *testing.T) {
	w := newFixture(t)
	s := serve(t, w.serverConfig(t), whoami)
	var mu sync.Mutex
	var conns []net.Conn
	cc := w.clientConfig(t)
	cc.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		mu.Lock()
		conns = append(conns, c)
		mu.Unlock()
		return c, err
	}
	c := dial(t, cc)
	for i := range 3 {
		got, err := get(t.Context(), c, s.url)
		if err != nil { // the request was written before the client noticed that the connection is gone
			got, err = get(t.Context(), c, s.url)
		}
		if err != nil || got != w.client.ID().String() {
			t.Fatalf("round %d: %q, %v", i, got, err)
		}
		mu.Lock()
		if len(conns) != i+1 {
			t.Fatalf("round %d: %d dials", i, len(conns))
		}
		_ = conns[i].Close()
		mu.Unlock()
	}
}

func TestAClientTakesHTTPSOnly(t *testing.T) {
	w := newFixture(t)
	s := serve(t, w.serverConfig(t), whoami)
	c := dial(t, w.clientConfig(t))
	for _, url := range []string{strings.Replace(s.url, "https", "http", 1), "ftp://host/", "https://"} {
		if _, err := get(t.Context(), c, url); err == nil || !strings.Contains(err.Error(), "https://") && !strings.Contains(err.Error(), "no Host") {
			t.Errorf("%s: %v, want an error that says what to do", url, err)
		}
	}
}

func TestAServerThatSpeaksSomethingElseIsRefused(t *testing.T) {
	w := newFixture(t)
	s := serve(t, w.serverConfig(t), whoami)
	conf := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}
	conn, err := (&tls.Dialer{Config: conf}).DialContext(t.Context(), "tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	cert := conn.(*tls.Conn).ConnectionState().PeerCertificates[0]
	_ = conn.Close()
	if cert.PublicKeyAlgorithm.String() != "ECDSA" || cert.CheckSignature(cert.SignatureAlgorithm, cert.RawTBSCertificate, cert.Signature) != nil {
		t.Errorf("certificate with %s, want one with ECDSA that it signed itself", cert.PublicKeyAlgorithm)
	}

	// A TLS server without our protocol: it selects no ALPN, or another one.
	for name, protos := range map[string][]string{"no ALPN": nil, "HTTPS": {"h2", "http/1.1"}} {
		t.Run(name, func(t *testing.T) {
			other := startTLS(t, protos)
			_, err := get(t.Context(), dial(t, w.clientConfig(t)), "https://"+other)
			if err == nil {
				t.Fatal("accepted")
			}
			if protos == nil && attest.ReasonOf(err) != attestv1.Reason_REASON_FORMAT_NONE {
				t.Errorf("%v, want FORMAT_NONE", err)
			}
		})
	}
}

// Invariant A3.
func TestNothingIsConfiguredToCheckNothing(t *testing.T) {
	w := newFixture(t)
	for name, change := range map[string]func(*atls.ServerConfig){
		"no attester":                  func(c *atls.ServerConfig) { c.Attester = nil },
		"no verifier":                  func(c *atls.ServerConfig) { c.Verifier = nil },
		"no appraiser":                 func(c *atls.ServerConfig) { c.Appraiser = nil },
		"no purpose":                   func(c *atls.ServerConfig) { c.ClientPurpose = "" },
		"the purpose public":           func(c *atls.ServerConfig) { c.ClientPurpose = attest.PurposePublic },
		"the purpose order":            func(c *atls.ServerConfig) { c.ClientPurpose = attest.PurposeOrder },
		"an unknown purpose":           func(c *atls.ServerConfig) { c.ClientPurpose = "admin" },
		"no generation":                func(c *atls.ServerConfig) { c.Generation = nil },
		"no log":                       func(c *atls.ServerConfig) { c.Log = nil },
		"nothing":                      func(c *atls.ServerConfig) { *c = atls.ServerConfig{} },
		"no appraiser and no attester": func(c *atls.ServerConfig) { c.Appraiser, c.Attester = atls.NoAppraiser, nil },
	} {
		cfg := w.serverConfig(t)
		change(&cfg)
		inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if l, err := atls.NewListener(inner, cfg); err == nil {
			_ = l.Close()
			t.Errorf("a server with %s is made", name)
		}
		_ = inner.Close()
	}
	for name, change := range map[string]func(*atls.ClientConfig){
		"no attester":        func(c *atls.ClientConfig) { c.Attester = nil },
		"no verifier":        func(c *atls.ClientConfig) { c.Verifier = nil },
		"no appraiser":       func(c *atls.ClientConfig) { c.Appraiser = nil },
		"NoAppraiser":        func(c *atls.ClientConfig) { c.Appraiser = atls.NoAppraiser },
		"no purpose":         func(c *atls.ClientConfig) { c.PeerPurpose = "" },
		"the purpose public": func(c *atls.ClientConfig) { c.PeerPurpose = attest.PurposePublic },
		"the purpose order":  func(c *atls.ClientConfig) { c.PeerPurpose = attest.PurposeOrder },
		"nothing":            func(c *atls.ClientConfig) { *c = atls.ClientConfig{} },
	} {
		cfg := w.clientConfig(t)
		change(&cfg)
		if tr, err := atls.NewTransport(cfg); err == nil {
			_ = tr.Close()
			t.Errorf("a client with %s is made", name)
		}
	}
	if _, err := atls.NoAppraiser.Appraise(t.Context(), attest.Claims{}); err == nil {
		t.Error("NoAppraiser accepts")
	}
}

// startTLS is a TLS 1.3 server that reads and never answers.
func startTLS(t *testing.T, protos []string) string {
	t.Helper()
	cert := selfSigned(t)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: protos, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				b := make([]byte, 4096)
				for {
					if _, err := c.Read(b); err != nil {
						_ = c.Close()
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return l.Addr().String()
}
