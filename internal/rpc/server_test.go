package rpc_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// keyService answers with what the test wants.
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

func (keyService) DeriveClusterId(context.Context, *kmsv1.DeriveClusterIdRequest) (*kmsv1.DeriveClusterIdResponse, error) { //nolint:revive,staticcheck // generated name
	return &kmsv1.DeriveClusterIdResponse{ClusterId: make([]byte, 32)}, nil
}

// running is a server, and what is needed to call it.
type running struct {
	t        *testing.T
	url      string
	addr     string
	health   *rpc.Health
	registry *prometheus.Registry
	log      *syncBuffer
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
		t: t, ca: ca, health: rpc.NewHealth(), registry: prometheus.NewRegistry(), log: &syncBuffer{},
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
			Limits:        atls.Limits{Rate: 10000, Burst: 10000},
		},
		Services: []rpc.Service{
			rpc.Serve[kmsv1connect.KeyServiceHandler](kmsv1connect.KeyServiceName, kms, kmsv1connect.NewKeyServiceHandler),
			rpc.Serve[attestv1connect.EvidenceServiceHandler](attestv1connect.EvidenceServiceName, evidence, attestv1connect.NewEvidenceServiceHandler),
		},
		Health:  r.health,
		Metrics: metrics,
		Log:     slog.New(slog.NewJSONHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
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
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	r.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return r
}

// attested is a client that gives evidence of that purpose; none if it is empty.
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

func (r *running) plain(http2 bool) *http.Client {
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2}
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

func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(10 * time.Second); !ok(); <-tick.C {
		if time.Now().After(until) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

func TestACallKnowsItsCallerAndIsCountedAndLogged(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, rpc.ClientOptions()...)
	resp, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
	if err != nil || string(resp.GetKey()) != r.client.ID().String() {
		t.Fatalf("%v, %v; want the client's machine", resp, err)
	}
	procedure := kmsv1connect.KeyServiceDeriveDiskKeyProcedure
	if got := r.metric("muster_rpc_requests_total", "code=ok", "procedure="+procedure, "reason=ACCEPTED"); got != 1 {
		t.Errorf("%v calls are counted", got)
	}
	if got := r.metric("muster_atls_setups_total", "outcome=accepted", "reason=", "side=server"); got != 1 {
		t.Errorf("%v connections are counted", got)
	}
	found := false
	for line := range strings.Lines(r.log.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if entry["msg"] == "a key is derived" {
			found = entry["machine"] == r.client.ID().String() && entry["procedure"] == procedure
		}
	}
	if !found {
		t.Errorf("the call's logger does not name the caller:\n%s", r.log)
	}
}

func TestErrorsOfHandlersLeaveByTheTable(t *testing.T) {
	for name, tt := range map[string]struct {
		do     func(context.Context) error
		code   connect.Code
		reason attestv1.Reason
		retry  time.Duration
	}{
		"refused on purpose": {
			do:   func(context.Context) error { return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_NODE, "hush") },
			code: connect.CodePermissionDenied, reason: attestv1.Reason_REASON_WORKLOAD_NODE,
		},
		"try again later": {
			do: func(context.Context) error {
				return attest.RefuseFor(4*time.Second, attestv1.Reason_REASON_ROOT_SEALED, "hush")
			},
			code: connect.CodeUnavailable, reason: attestv1.Reason_REASON_ROOT_SEALED, retry: 4 * time.Second,
		},
		"not foreseen": {
			do:   func(context.Context) error { return errors.New("hush") },
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL,
		},
		"a panic": {
			do:   func(context.Context) error { panic("hush") },
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL,
		},
		"a handler that takes too long": {
			do:   func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			code: connect.CodeDeadlineExceeded, reason: attestv1.Reason_REASON_DEADLINE,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, keyService{disk: func(ctx context.Context, _ *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
				return nil, tt.do(ctx)
			}}, func(c *rpc.Config) { c.Timeout = 200 * time.Millisecond })
			c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, rpc.ClientOptions()...)
			_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
			if connect.CodeOf(err) != tt.code || rpc.ReasonFrom(err) != tt.reason || rpc.RetryAfterFrom(err) != tt.retry {
				t.Errorf("%v with %v after %s, want %s with %v after %s", err, rpc.ReasonFrom(err), rpc.RetryAfterFrom(err), tt.code, tt.reason, tt.retry)
			}
			if strings.Contains(err.Error(), "hush") {
				t.Errorf("the cause left: %v", err)
			}
			labels := []string{"code=" + tt.code.String(), "procedure=" + kmsv1connect.KeyServiceDeriveDiskKeyProcedure, "reason=" + attest.ReasonName(tt.reason)}
			if got := r.metric("muster_rpc_requests_total", labels...); got != 1 {
				t.Errorf("%v calls with %v", got, labels)
			}
			if name != "a handler that takes too long" && !strings.Contains(r.log.String(), "hush") {
				t.Errorf("our log does not have the cause:\n%s", r.log)
			}
		})
	}
}

func TestARefusedConnectionHasTheCodeOfItsReason(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeMachine), r.url, rpc.ClientOptions()...)
	_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
	if rpc.ReasonFrom(err) != attestv1.Reason_REASON_BINDING_MISMATCH || connect.CodeOf(err) == connect.CodeUnavailable {
		t.Errorf("%v, want BINDING_MISMATCH, and not unavailable", err)
	}
	wait(t, "the refusal is counted", func() bool {
		return r.metric("muster_atls_setups_total", "outcome=refused", "reason=BINDING_MISMATCH", "side=server") == 1
	})
}

func TestLargeAndBrokenRequestsAreRefused(t *testing.T) {
	r := run(t, keyService{}, func(c *rpc.Config) { c.MaxRequest = 1000 })
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, append(rpc.ClientOptions(), connect.WithSendGzip())...)
	for size, want := range map[int]connect.Code{100: 0, 2000: connect.CodeResourceExhausted, 1 << 20: connect.CodeResourceExhausted} {
		_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{DiskId: strings.Repeat("x", size)})
		if want == 0 && err != nil || want != 0 && connect.CodeOf(err) != want {
			t.Errorf("%d bytes: %v, want %v", size, err, want)
		}
	}
	if got := r.metric("muster_rpc_requests_total", "code=not_handled", "procedure="+kmsv1connect.KeyServiceDeriveDiskKeyProcedure, "reason="); got != 2 {
		t.Errorf("%v requests that reached no handler, want 2", got)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/no/such/path", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.plain(true).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("an unknown path: %s", resp.Status)
	}
	if got := r.metric("muster_rpc_requests_total", "code=not_handled", "procedure=unknown", "reason="); got != 1 {
		t.Errorf("%v requests of unknown paths, want 1", got)
	}
}

func TestHealthIsServedToAnybody(t *testing.T) {
	r := run(t, keyService{}, nil)
	for name, client := range map[string]*http.Client{"attested": r.attested(attest.PurposeJoinservice), "session": r.attested(""), "HTTP/1.1": r.plain(false), "HTTP/2": r.plain(true)} {
		for service, want := range map[string]healthv1.HealthCheckResponse_ServingStatus{
			"":                          healthv1.HealthCheckResponse_NOT_SERVING,
			kmsv1connect.KeyServiceName: healthv1.HealthCheckResponse_NOT_SERVING,
		} {
			got, err := healthv1connect.NewHealthClient(client, r.url).Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
			if err != nil || got.GetStatus() != want {
				t.Errorf("%s: %q is %v, %v; want %v", name, service, got, err, want)
			}
		}
		_, err := healthv1connect.NewHealthClient(client, r.url).Check(t.Context(), &healthv1.HealthCheckRequest{Service: "no.such.Service"})
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: an unknown service: %v, want not_found", name, err)
		}
	}
	r.health.SetAll(true)
	got, err := healthv1connect.NewHealthClient(r.plain(true), r.url, connect.WithGRPC()).Check(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || got.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("over gRPC: %v, %v", got, err)
	}
}

func TestWatchTellsEachChangeUntilTheServerStops(t *testing.T) {
	r := run(t, keyService{}, nil)
	stream, err := healthv1connect.NewHealthClient(r.plain(true), r.url, connect.WithGRPC()).Watch(t.Context(), &healthv1.HealthCheckRequest{Service: kmsv1connect.KeyServiceName})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	next := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if !stream.Receive() || stream.Msg().GetStatus() != want {
			t.Fatalf("%v, %v; want %v", stream.Msg(), stream.Err(), want)
		}
	}
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	r.health.Set(kmsv1connect.KeyServiceName, true)
	next(healthv1.HealthCheckResponse_SERVING)
	r.health.Set("another.Service", true) // changes nothing here
	r.health.Set(kmsv1connect.KeyServiceName, true)
	began := time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	if stream.Receive() || connect.CodeOf(stream.Err()) != connect.CodeUnavailable {
		t.Errorf("%v, want unavailable", stream.Err())
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("a watcher held up the stop for %s", took)
	}
}

func TestReflectionListsWhatIsServed(t *testing.T) {
	r := run(t, keyService{}, nil)
	stream := grpcreflect.NewClient(r.plain(true), r.url, connect.WithGRPC()).NewStream(t.Context())
	defer func() { _, _ = stream.Close() }()
	names, err := stream.ListServices()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range names {
		got = append(got, string(n))
	}
	slices.Sort(got)
	want := []string{healthv1connect.HealthName, attestv1connect.EvidenceServiceName, kmsv1connect.KeyServiceName}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	files, err := stream.FileContainingSymbol("muster.kms.v1.KeyService")
	if err != nil || len(files) == 0 {
		t.Errorf("no descriptor: %v", err)
	}
}

// The command that docs/operate.md shows.
func TestCurlAsksForHealth(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatalf("install curl: %v", err)
	}
	r := run(t, keyService{}, nil)
	r.health.SetAll(true)
	for _, version := range []string{"--http1.1", "--http2"} {
		out, err := exec.CommandContext(t.Context(), curl, "--silent", "--show-error", "--insecure", "--max-time", "10", version, //nolint:gosec // our own server
			"--header", "Content-Type: application/json", "--data", "{}", r.url+"/grpc.health.v1.Health/Check").CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != `{"status":"SERVING"}` {
			t.Errorf("%s: %s, %v", version, out, err)
		}
		out, err = exec.CommandContext(t.Context(), curl, "--silent", "--show-error", "--insecure", "--max-time", "10", version, //nolint:gosec // our own server
			"--header", "Content-Type: application/json", "--data", "{}", "--write-out", " %{http_code}", r.url+kmsv1connect.KeyServiceDeriveDiskKeyProcedure).CombinedOutput()
		if err != nil || !strings.HasSuffix(string(out), " 401") || !strings.Contains(string(out), "SESSION_REQUIRED") {
			t.Errorf("%s: %s, %v; want SESSION_REQUIRED", version, out, err)
		}
	}
}

func TestPublicEvidenceIsSharedAndRationed(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := attestv1connect.NewEvidenceServiceClient(r.plain(true), r.url)
	nonce := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 32) }
	for n, want := range map[int]attestv1.Reason{0: attestv1.Reason_REASON_REQUEST_INVALID, 31: attestv1.Reason_REASON_REQUEST_INVALID, 33: attestv1.Reason_REASON_REQUEST_INVALID} {
		if _, err := c.GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{Nonce: make([]byte, n)}); rpc.ReasonFrom(err) != want {
			t.Errorf("a nonce of %d bytes: %v", n, err)
		}
	}
	quotes, began := r.server.Quotes(), time.Now()
	var wg sync.WaitGroup
	var mu sync.Mutex
	reasons := map[attestv1.Reason]int{}
	verifier := attesttest.Verifier(t, r.ca)
	for i := range 100 {
		wg.Go(func() {
			resp, err := c.GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{Nonce: nonce(i), EventLog: i%2 == 0})
			mu.Lock()
			reasons[rpc.ReasonFrom(err)]++
			mu.Unlock()
			if err != nil {
				if rpc.RetryAfterFrom(err) != time.Second {
					t.Errorf("%v does not say when to try again", err)
				}
				return
			}
			b := attest.Binding(nonce(i))
			if _, err := verifier.Verify(t.Context(), resp.GetEvidence(), attest.NewStatement(attest.PurposePublic, b), b); err != nil {
				t.Errorf("the evidence is not over the caller's nonce: %v", err)
			}
			if _, err := verifier.Verify(t.Context(), resp.GetEvidence(), attest.NewStatement(attest.PurposeMachine, b), b); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
				t.Errorf("public evidence passes for a machine's: %v", err)
			}
			if got := len(resp.GetEvidence().GetTpm2().GetEventLog()) > 0; got != (i%2 == 0) {
				t.Errorf("event log sent: %v", got)
			}
		})
	}
	wg.Wait()
	made, allowed := r.server.Quotes()-quotes, 1+int(time.Since(began)/time.Second)
	if made > allowed {
		t.Errorf("%d quotes in %s", made, time.Since(began))
	}
	accepted, busy := reasons[attestv1.Reason_REASON_ACCEPTED], reasons[attestv1.Reason_REASON_BUSY]
	if accepted == 0 || accepted+busy != 100 || accepted > made*64 {
		t.Errorf("%d quotes for 100 callers: %v", made, reasons)
	}
}

func TestSilentPeersDoNotHoldUpTheStop(t *testing.T) {
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
	open("http/1.1") // each has shaken hands and says no word
	open("h2")
	open(atls.ALPN) // in the exchange
	idle := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url)
	if _, err := idle.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{}); err != nil { // idle after a call
		t.Fatal(err)
	}
	tcp, err := new(net.Dialer).DialContext(t.Context(), "tcp", r.addr) // in no handshake yet
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
	// An idle HTTP/2 connection gets GOAWAY and a second to hang up.
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the stop took %s", took)
	}
	for i, c := range conns {
		if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		var timeout net.Error
		if _, err := io.Copy(io.Discard, c); errors.As(err, &timeout) && timeout.Timeout() {
			t.Errorf("connection %d is still open", i)
		}
		_ = c.Close()
	}
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
