package atls_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// fixture is two machines of one operator, and the policy that accepts both.
type fixture struct {
	ca             *attesttest.CA
	server, client *attesttest.Machine
	policy         *attest.Policy
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	ca := attesttest.NewCA(t)
	w := &fixture{ca: ca, server: attesttest.NewMachine(t, ca, attesttest.Options{}), client: attesttest.NewMachine(t, ca, attesttest.Options{})}
	w.policy = attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{w.server, w.client})
	return w
}

// generations adds a generation to the appraisals of a policy, as in a cluster.
type generations struct {
	attest.Appraiser
	now func() int64
}

func (g generations) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	a, err := g.Appraiser.Appraise(ctx, c)
	a.Generation = g.now()
	return a, err
}

func (w *fixture) serverConfig(t *testing.T) atls.ServerConfig {
	return atls.ServerConfig{
		Attester:      w.server.Attester(attest.PurposeJoinservice),
		Verifier:      attesttest.Verifier(t, w.ca),
		Appraiser:     w.policy.For(attest.Unlocked()),
		ClientPurpose: attest.PurposeMachine,
		Generation:    func() int64 { return 0 },
		Limits:        atls.Limits{Rate: 10000, Burst: 10000},
		Log:           slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

func (w *fixture) clientConfig(t *testing.T) atls.ClientConfig {
	return atls.ClientConfig{
		Attester:    w.client.Attester(attest.PurposeMachine),
		Verifier:    attesttest.Verifier(t, w.ca),
		Appraiser:   w.policy.For(attest.Unlocked()),
		PeerPurpose: attest.PurposeJoinservice,
	}
}

// service is a listener with the two servers behind it, as in internal/rpc.
type service struct {
	*atls.Listener
	url string
}

// whoami answers with the peer's machine ID, "session", or "plain".
func whoami(w http.ResponseWriter, r *http.Request) {
	answer := "plain"
	if _, ok := atls.SessionFrom(r.Context()); ok {
		answer = "session"
	}
	if p, ok := attest.PeerFrom(r.Context()); ok {
		answer = p.Machine().String()
	}
	if r.TLS != nil && answer != "plain" {
		answer = "a session shows its TLS"
	}
	_, _ = io.Copy(io.Discard, r.Body)
	_, _ = io.WriteString(w, answer)
}

func serve(t *testing.T, cfg atls.ServerConfig, handler http.HandlerFunc) *service {
	t.Helper()
	inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := atls.NewListener(inner, cfg)
	if err != nil {
		t.Fatal(err)
	}
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	both := new(http.Protocols)
	both.SetHTTP1(true)
	both.SetHTTP2(true)
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	attested := &http.Server{Handler: l.Handler(handler), Protocols: h2, ConnContext: l.ConnContext, ReadHeaderTimeout: 5 * time.Second, ErrorLog: quiet}
	plain := &http.Server{Handler: l.Handler(handler), ConnContext: l.ConnContext, Protocols: both, ReadHeaderTimeout: 5 * time.Second, ErrorLog: quiet}
	var wg sync.WaitGroup
	for srv, on := range map[*http.Server]net.Listener{attested: l.Attested(), plain: l.Plain()} {
		wg.Go(func() {
			if err := srv.Serve(on); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
				t.Errorf("serve: %v", err)
			}
		})
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		_ = attested.Close()
		_ = plain.Close()
		wg.Wait()
	})
	return &service{Listener: l, url: "https://" + inner.Addr().String()}
}

func dial(t *testing.T, cfg atls.ClientConfig) *http.Client {
	t.Helper()
	tr, err := atls.NewTransport(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tr.Close() })
	return &http.Client{Transport: tr}
}

func get(ctx context.Context, c *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// waitFor waits for a condition.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(atls.Patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", atls.Patience, what)
		}
	}
}
