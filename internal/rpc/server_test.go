package rpc_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// keyService returns the answers that the test sets.
type keyService struct {
	disk func(context.Context, *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error)
}

func (k keyService) DeriveDiskKey(ctx context.Context, r *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
	if k.disk != nil {
		return k.disk(ctx, r)
	}
	p, ok := attest.PeerFrom(ctx)
	if !ok {
		return nil, errors.New("served without a peer")
	}
	rpc.Logger(ctx).Info("a key is derived")
	return &kmsv1.DeriveDiskKeyResponse{Key: []byte(p.Machine().String())}, nil
}

func (keyService) DeriveClusterId(context.Context, *kmsv1.DeriveClusterIdRequest) (*kmsv1.DeriveClusterIdResponse, error) {
	return &kmsv1.DeriveClusterIdResponse{ClusterId: make([]byte, 32)}, nil
}

// running is a server, with what is needed to call it.
type running struct {
	t        *testing.T
	url      string
	addr     string
	health   *rpc.Health
	registry *prometheus.Registry
	log      *syncBuffer
	audit    *syncBuffer
	ca       *attesttest.CA
	server   *attesttest.Machine
	client   *attesttest.Machine
	policy   *attest.Policy
	stop     func() error
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func run(t *testing.T, kms keyService, change func(*rpc.Config)) *running {
	t.Helper()
	ca := attesttest.NewCA(t)
	r := &running{
		t: t, ca: ca, health: rpc.NewHealth(), registry: prometheus.NewRegistry(), log: &syncBuffer{}, audit: &syncBuffer{},
		server: attesttest.NewMachine(t, ca, attesttest.Options{}), client: attesttest.NewMachine(t, ca, attesttest.Options{}),
	}
	r.policy = attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{r.server, r.client})
	metrics, err := rpc.NewMetrics(r.registry)
	if err != nil {
		t.Fatal(err)
	}
	public, ok := r.server.Attester(attest.PurposePublic).(rpc.PublicAttester)
	if !ok {
		t.Fatal("the attester cannot share a quote")
	}
	evidence, err := rpc.NewEvidence(public)
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := rpc.Config{
		Listener: l,
		ATLS: atls.ServerConfig{
			Attester:      r.server.Attester(attest.PurposeKMS),
			Verifier:      attesttest.Verifier(t, ca),
			Appraiser:     r.policy.For(attest.Unlocked()),
			ClientPurpose: attest.PurposeJoinservice,
			Generation:    func() int64 { return 0 },
			Limits:        atls.Limits{Rate: 10000, Burst: 10000, SetUpPerSource: 1000},
		},
		Services: []rpc.Service{
			rpc.Serve[kmsv1connect.KeyServiceHandler](kmsv1connect.KeyServiceName, kms, kmsv1connect.NewKeyServiceHandler),
			rpc.Serve[attestv1connect.EvidenceServiceHandler](attestv1connect.EvidenceServiceName, evidence, attestv1connect.NewEvidenceServiceHandler),
		},
		Health:  r.health,
		Metrics: metrics,
		Log:     slog.New(slog.NewJSONHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	unattested, err := audit.NewUnattestedRefusals("test", audit.NewStream(r.audit), cfg.Log, r.registry)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Refused = func(c rpc.Refused) { unattested.Call(c.Procedure, c.Remote, c.Machine, c.Err) }
	if change != nil {
		change(&cfg)
	}
	s, err := rpc.NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.addr = s.Addr().String()
	r.url = "https://" + r.addr
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- s.Run(ctx) }()
	go func() { done <- unattested.Serve(ctx) }()
	r.stop = sync.OnceValue(func() error { cancel(); return errors.Join(<-done, <-done) })
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return r
}

// attested returns a client that sends evidence with that purpose; none if it is empty.
func (r *running) attested(p attest.Purpose) *http.Client {
	r.t.Helper()
	cfg := atls.ClientConfig{
		Attester:    atls.NoAttester,
		Verifier:    attesttest.Verifier(r.t, r.ca),
		Appraiser:   r.policy.For(attest.Unlocked()),
		PeerPurpose: attest.PurposeKMS,
	}
	if p != "" {
		cfg.Attester = r.client.Attester(p)
	}
	tr, err := atls.NewTransport(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = tr.Close() })
	return rpc.HTTPClient(tr)
}

func (r *running) observations() refusaltest.Service {
	return refusaltest.Service{
		Families: func(t testing.TB) []*dto.MetricFamily {
			families, err := r.registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			return families
		},
		Log:   func() []byte { return []byte(r.log.String()) },
		Audit: func() []byte { return []byte(r.audit.String()) },
	}
}

func (r *running) plain(http2 bool) *http.Client {
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// plainFrom returns a client over HTTP/2 with an address of the loopback network.
func (r *running) plainFrom(ip string) *http.Client {
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true,
		DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).DialContext,
	}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func (r *running) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var got []string
			for _, l := range m.GetLabel() {
				got = append(got, l.GetName()+"="+l.GetValue())
			}
			if slices.Equal(got, labels) {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// calls returns the number of calls so far.
func (r *running) calls() (sum float64) {
	r.t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "muster_rpc_requests_total" {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// patience is how long a machine that builds at the same time may take.
const patience = 5 * time.Minute

func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(until) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// With none of these peers the stop would be over at once. One that waits for them takes 5 s at least each time, on a fast
// machine too, so one quick stop shows that it does not.
func TestSilentPeersDoNotHoldUpTheStop(t *testing.T) {
	took, began := time.Hour, time.Now()
	for took > 3*time.Second && !t.Failed() {
		if time.Since(began) > patience {
			t.Fatalf("the stop took %s", took)
		}
		t.Run("one stop", func(t *testing.T) { took = stopBesideSilentPeers(t) })
	}
}

func stopBesideSilentPeers(t *testing.T) (took time.Duration) {
	t.Helper()
	r := run(t, keyService{}, nil)
	var conns []net.Conn
	open := func(protos ...string) net.Conn {
		c, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: protos}}).DialContext(t.Context(), "tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		return c
	}
	open("http/1.1") // each has finished the handshake and sends nothing
	open("h2")
	open(atls.ALPN) // in the exchange
	idle := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url)
	if _, err := idle.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{}); err != nil { // idle after a call
		t.Fatal(err)
	}
	tcp, err := new(net.Dialer).DialContext(t.Context(), "tcp", r.addr) // before the handshake
	if err != nil {
		t.Fatal(err)
	}
	conns = append(conns, tcp)
	wait(t, "both plain connections are handed on", func() bool {
		return r.metric("muster_atls_setups_total", "outcome=plain", "reason=", "side=server") == 2
	})
	began := time.Now()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	took = time.Since(began) // an idle HTTP/2 connection gets GOAWAY and has a second to close
	for i, c := range conns {
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		var timeout net.Error
		if _, err := io.Copy(io.Discard, c); errors.As(err, &timeout) && timeout.Timeout() {
			t.Errorf("connection %d is still open", i)
		}
		_ = c.Close()
	}
	return took
}

func TestACallUnderWayMayEnd(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	r := run(t, keyService{disk: func(context.Context, *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
		close(entered)
		<-leave
		return &kmsv1.DeriveDiskKeyResponse{Key: []byte("done")}, nil
	}}, nil)
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, rpc.ClientOptions()...)
	answer := make(chan error, 1)
	go func() {
		resp, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
		if err == nil && string(resp.GetKey()) != "done" {
			err = errors.New("another answer")
		}
		answer <- err
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	wait(t, "no connection is accepted any more", func() bool {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", r.addr)
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	})
	close(leave)
	if err := <-answer; err != nil {
		t.Errorf("the call that was under way: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func TestAServerSaysWhatIsMissing(t *testing.T) {
	if _, err := rpc.NewServer(rpc.Config{}); err == nil {
		t.Error("a server without anything is made")
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rpc.NewServer(rpc.Config{Listener: l}); err == nil {
		t.Error("a server without services is made")
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is left open: %v", err)
	}
}
