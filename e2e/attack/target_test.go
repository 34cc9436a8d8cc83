package attack

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long something may take on a busy computer.
const patience = 5 * time.Minute

// target is a server of all of Muster's services, to be attacked. Its handlers answer nothing: an attack is over when
// one is reached.
type target struct {
	ca             *attesttest.CA
	server, client *attesttest.Machine
	policy         *attest.Policy
	// stolen is the private key of the server's certificate, which the attacker has.
	stolen tls.Certificate
	addr   string
	seen   chan atls.SetUp
	// witnesses are its metrics, log and audit log.
	witnesses refusaltest.Service
}

func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"muster"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func newTarget(t *testing.T, change func(*rpc.Config)) *target {
	t.Helper()
	ca := attesttest.NewCA(t)
	x := &target{
		ca:     ca,
		server: attesttest.NewMachine(t, ca, attesttest.Options{}),
		client: attesttest.NewMachine(t, ca, attesttest.Options{}),
		stolen: certificate(t),
		seen:   make(chan atls.SetUp, 4096),
	}
	x.policy = attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{x.server, x.client})
	registry, logged, recorded := prometheus.NewRegistry(), &buffer{}, &buffer{}
	log := slog.New(slog.NewJSONHandler(io.MultiWriter(logged, t.Output()), &slog.HandlerOptions{Level: slog.LevelWarn}))
	x.witnesses = refusaltest.Service{
		Families: func(t testing.TB) []*dto.MetricFamily {
			families, err := registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			return families
		},
		Log: logged.bytes, Audit: recorded.bytes,
	}
	metrics, err := rpc.NewMetrics(registry)
	if err != nil {
		t.Fatal(err)
	}
	refusals, err := audit.NewUnattestedRefusals("target", audit.NewStream(recorded), log, registry)
	if err != nil {
		t.Fatal(err)
	}
	// The machine that is attacked also answers GetEvidence; here it is the client's.
	public, ok := x.client.Attester(attest.PurposePublic).(rpc.PublicAttester)
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
			Attester:      x.server.Attester(attest.PurposeJoinservice),
			Verifier:      attesttest.Verifier(t, ca),
			Appraiser:     x.policy.For(attest.Unlocked()),
			ClientPurpose: attest.PurposeMachine,
			Generation:    func() int64 { return 0 },
			Limits:        atls.Limits{Rate: 100000, Burst: 100000},
			Certificate:   &x.stolen,
			Observe:       func(s atls.SetUp) { metrics.SetUp(s); refusals.Connection(s, ""); x.seen <- s },
		},
		Services: []rpc.Service{
			rpc.Serve[initv1connect.InitServiceHandler](initv1connect.InitServiceName, initv1connect.UnimplementedInitServiceHandler{}, initv1connect.NewInitServiceHandler),
			rpc.Serve[joinv1connect.JoinServiceHandler](joinv1connect.JoinServiceName, joinv1connect.UnimplementedJoinServiceHandler{}, joinv1connect.NewJoinServiceHandler),
			rpc.Serve[kmsv1connect.KeyServiceHandler](kmsv1connect.KeyServiceName, kmsv1connect.UnimplementedKeyServiceHandler{}, kmsv1connect.NewKeyServiceHandler),
			rpc.Serve[recoverv1connect.RecoverServiceHandler](recoverv1connect.RecoverServiceName, recoverv1connect.UnimplementedRecoverServiceHandler{}, recoverv1connect.NewRecoverServiceHandler),
			rpc.Serve[recoverv1connect.EpochServiceHandler](recoverv1connect.EpochServiceName, recoverv1connect.UnimplementedEpochServiceHandler{}, recoverv1connect.NewEpochServiceHandler),
			rpc.Serve[attestv1connect.EvidenceServiceHandler](attestv1connect.EvidenceServiceName, evidence, attestv1connect.NewEvidenceServiceHandler),
		},
		Health:  rpc.NewHealth(),
		Metrics: metrics,
		Log:     log,
		Refused: func(c rpc.Refused) { refusals.Call(c.Procedure, c.Remote, c.Machine, c.Err) },
	}
	if change != nil {
		change(&cfg)
	}
	s, err := rpc.NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	x.addr = s.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- s.Run(ctx) }()
	go func() { done <- refusals.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, <-done); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return x
}

// buffer collects the output of several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.b.Bytes())
}

// refuses runs an attack that must end with that verdict; metric, log and audit log must record it too (R1).
func (x *target) refuses(t *testing.T, want attestv1.Reason, play func() attestv1.Reason) {
	t.Helper()
	places := refusaltest.Connection()
	places.Beside = []attestv1.Reason{attestv1.Reason_REASON_DEADLINE} // on a busy computer
	refusaltest.Reported(t, x.witnesses, want, places, func() {
		until := time.Now().Add(patience)
		got := play()
		for got != want && got == attestv1.Reason_REASON_DEADLINE && time.Now().Before(until) {
			got = play()
		}
		if got != want {
			t.Errorf("%v, want %v", got, want)
		}
	})
}

// machine returns the client machine's own attester.
func (x *target) machine() attest.Attester { return x.client.Attester(attest.PurposeMachine) }

// transport is an honest client of the target's; change may be nil.
func (x *target) transport(t *testing.T, change func(*atls.ClientConfig)) *http.Client {
	t.Helper()
	cfg := atls.ClientConfig{
		Attester:    x.machine(),
		Verifier:    attesttest.Verifier(t, x.ca),
		Appraiser:   x.policy.For(attest.Unlocked()),
		PeerPurpose: attest.PurposeJoinservice,
	}
	if change != nil {
		change(&cfg)
	}
	tr, err := atls.NewTransport(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tr.Close() })
	return rpc.HTTPClient(tr)
}

// reach asks the address for health: any answer of the server is enough.
func reach(t *testing.T, c *http.Client, addr string) error {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+addr+"/grpc.health.v1.Health/Check", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// insist repeats what took the server too long, or was cut off, as happens on a busy computer.
func insist(t *testing.T, do func() error) error {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(patience); ; <-tick.C {
		err := do()
		if !cutShort(err) || time.Now().After(until) || t.Context().Err() != nil {
			return err
		}
	}
}

// cutShort reports whether a peer did not wait, or had no room: a repetition may succeed.
func cutShort(err error) bool {
	switch rpc.ReasonFrom(err) {
	case attestv1.Reason_REASON_UNSPECIFIED, attestv1.Reason_REASON_DEADLINE, attestv1.Reason_REASON_BUSY:
		return true
	default:
		return false
	}
}

// reaches is reach for a client that the server has a verdict about.
func reaches(t *testing.T, c *http.Client, addr string) error {
	t.Helper()
	return insist(t, func() error { return reach(t, c, addr) })
}

// evil is a TLS server of the attacker's; handle gets each connection, which ends when it returns.
func evil(t *testing.T, conf *tls.Config, handle func(*tls.Conn)) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", conf)
	if err != nil {
		t.Fatal(err)
	}
	return accept(t, l, func(c net.Conn) {
		if tc, ok := c.(*tls.Conn); ok {
			handle(tc)
		}
	})
}

func accept(t *testing.T, l net.Listener, handle func(net.Conn)) string {
	t.Helper()
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
				defer func() { _ = c.Close() }()
				handle(c)
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

// splice copies both ways until one side is done.
func splice(a, b io.ReadWriteCloser) {
	var wg sync.WaitGroup
	for from, to := range map[io.ReadWriteCloser]io.ReadWriteCloser{a: b, b: a} {
		wg.Go(func() {
			_, _ = io.Copy(to, from)
			_ = to.Close()
		})
	}
	wg.Wait()
}
