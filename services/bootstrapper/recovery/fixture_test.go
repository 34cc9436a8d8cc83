package recovery

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a condition may take on a busy machine.
const patience = 5 * time.Minute

const diskID = "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"

// lock is a disk that one key opens.
type lock struct {
	key []byte
	// before, if not nil, runs before a key is tried, and can return an error of the disk.
	before func(context.Context) error

	mu    sync.Mutex
	open  bool
	to    []keys.ClusterID  // the cluster of each key that was tried
	with  component.Desired // what came with the last one
	tried int
	trial bool
}

func (l *lock) try(ctx context.Context, key keys.Disk, cluster keys.ClusterID, desired component.Desired) error {
	l.mu.Lock()
	if l.trial {
		panic("two keys are tried at one time")
	}
	l.trial = true
	l.tried++
	l.to, l.with = append(l.to, cluster), desired
	open := l.open
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.trial = false
		l.mu.Unlock()
	}()
	if l.before != nil {
		if err := l.before(ctx); err != nil {
			return err
		}
	}
	switch {
	case open:
		return ErrOpen
	case !bytes.Equal(key.Expose(), l.key):
		return ErrWrongKey
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = true
	return nil
}

func (l *lock) state() (open bool, tried int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open, l.tried
}

type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.buf.Bytes())
}

// fixture is a machine in its initramfs, with its recovery server on loopback, and its owner's secrets.
type fixture struct {
	t         testing.TB
	own       attest.Attester // the machine's own evidence, for a joinservice
	appraiser func() (attest.Verifier, *attest.Policy)
	lock      *lock
	logged    *logBuffer
	metrics   *prometheus.Registry
	server    *Server
	addr      string
	stop      func() error
}

var (
	rightKey = bytes.Repeat([]byte{0xAB}, 32)
	wrongKey = bytes.Repeat([]byte{0xEE}, 32)
	cluster  = keys.ClusterID{0xC1}
	ownerKey = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{0xCD}, 32))
	// bootNonce is that of all fixtures' machines.
	bootNonce = ownerorder.Nonce{0xB0}
)

// signed returns a request that an owner has signed for a disk.
func signed(key []byte, id string, cluster keys.ClusterID, owner ed25519.PrivateKey) *recoverv1.RecoverRequest {
	return signedFor(bootNonce, key, id, cluster, owner)
}

func signedFor(boot ownerorder.Nonce, key []byte, id string, cluster keys.ClusterID, owner ed25519.PrivateKey) *recoverv1.RecoverRequest {
	k, err := keys.ParseDisk(key)
	if err != nil {
		panic(err)
	}
	d, err := keys.ParseDiskID(id)
	if err != nil {
		panic(err)
	}
	return ownerorder.Recovery{Cluster: cluster, Disk: d, Key: k, Nonce: boot, Software: software()}.Wire(owner)
}

// software returns what the owner's folder lists.
func software() *ownerorder.Software {
	return &ownerorder.Software{List: listOf("kubelet"), Endpoint: "192.168.77.1:6443"}
}

// listOf returns a list with these programs.
func listOf(names ...string) string {
	l := versions.NewList()
	for _, n := range names {
		l.Components = append(l.Components, versions.Component{URL: "http://mirror/" + n, SHA256: strings.Repeat("0", 64), Path: "/usr/local/bin/" + n, Mode: 0o755})
	}
	l.Images = machinetest.Images().References()
	text, err := json.Marshal(l)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func request() *recoverv1.RecoverRequest { return signed(rightKey, diskID, cluster, ownerKey) }

func wrong() *recoverv1.RecoverRequest { return signed(wrongKey, diskID, cluster, ownerKey) }

func newFixture(t testing.TB) *fixture {
	t.Helper()
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	return newFixtureOf(t, m.Attester(attest.PurposeMachine), func() (attest.Verifier, *attest.Policy) {
		return attesttest.Verifier(t, ca), attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m})
	})
}

// newFixtureOf returns a machine that attests by a, and that the owner's program appraises by appraiser.
func newFixtureOf(t testing.TB, a attest.Attester, appraiser func() (attest.Verifier, *attest.Policy)) *fixture {
	t.Helper()
	id, err := keys.ParseDiskID(diskID)
	if err != nil {
		t.Fatal(err)
	}
	w := &fixture{t: t, own: a, appraiser: appraiser, lock: &lock{key: rightKey}, logged: &logBuffer{}, metrics: prometheus.NewRegistry()}
	calls, err := rpc.NewMetrics(w.metrics)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewJSONHandler(w.logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.server, err = New(Config{DiskID: id, OwnerKeys: attest.OwnerKeys{ownerKey.Public().(ed25519.PublicKey)}, Try: w.lock.try, Attester: a, Challenges: atls.NewChallengeQueue(), Calls: calls, Metrics: w.metrics, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	w.server.nonce = bootNonce
	w.server.queue = newQueue(time.Now, 0) // wrong keys in a row, without a second between them
	w.run()
	return w
}

func (w *fixture) run() {
	l, err := new(net.ListenConfig).Listen(w.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() { done <- w.server.Run(ctx, l) }()
	w.stop = sync.OnceValue(func() error { cancel(); return <-done })
	w.t.Cleanup(func() {
		if err := w.stop(); err != nil {
			w.t.Errorf("server: %v", err)
		}
	})
}

// from returns a client with this loopback address, which is a source of its own.
func (w *fixture) from(ip string) *http.Client {
	w.t.Helper()
	return w.fromDialer((&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).DialContext)
}

func (w *fixture) fromDialer(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Client {
	w.t.Helper()
	verifier, policy := w.appraiser()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: atls.NoAttester, Verifier: verifier, PeerPurpose: attest.PurposeMachine, DialContext: dial, Appraiser: policy.For(attest.Unlocked()),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = transport.Close() })
	return rpc.HTTPClient(transport)
}

// recover calls Recover, and passes each state to each.
func (w *fixture) recover(ctx context.Context, c *http.Client, req *recoverv1.RecoverRequest, each func(recoverv1.State)) ([]recoverv1.State, error) {
	stream, err := recoverv1connect.NewRecoverServiceClient(c, "https://"+w.addr, rpc.ClientOptions()...).Recover(ctx, req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	var states []recoverv1.State
	for stream.Receive() {
		m := stream.Msg()
		if m.GetDiskId() != diskID {
			w.t.Errorf("disk %q", m.GetDiskId())
		}
		states = append(states, m.GetState())
		if each != nil {
			each(m.GetState())
		}
	}
	if !slices.IsSorted(states) {
		w.t.Errorf("states fall: %v", states)
	}
	return states, stream.Err()
}

func (w *fixture) observations() refusaltest.Service {
	return refusaltest.Service{
		Families: func(t testing.TB) []*dto.MetricFamily {
			families, err := w.metrics.Gather()
			if err != nil {
				t.Fatal(err)
			}
			return families
		},
		Log: func() []byte { return w.logged.bytes() },
	}
}

// refusedPlaces returns where the refusal of a recovery is reported.
func refusedPlaces() refusaltest.Places {
	return refusaltest.Places{
		Metric: []string{"muster_recovery_attempts_total"},
		Log:    []string{"msg", "call refused", "level", "WARN", "procedure", recoverv1connect.RecoverServiceRecoverProcedure},
	}
}

// opens checks that the owner's recovery works, whatever unattested clients did.
func (w *fixture) opens(t *testing.T, c *http.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		_, err := w.recover(ctx, c, request(), nil)
		if err == nil {
			break
		}
		// A slow machine ends a call too late, or the connection.
		late := []attestv1.Reason{attestv1.Reason_REASON_DEADLINE, attestv1.Reason_REASON_UNSPECIFIED}
		if rpc.RetryAfterFrom(err) == 0 && !slices.Contains(late, rpc.ReasonFrom(err)) {
			t.Fatalf("the owner: %v", err)
		}
		select {
		case <-time.After(10 * time.Millisecond): // its place in the queue is kept meanwhile
		case <-ctx.Done():
			t.Fatalf("the owner is kept out: %v", err)
		}
	}
	if open, _ := w.lock.state(); !open {
		t.Error("the disk is not open")
	}
	select {
	case <-w.server.Recovered():
	case <-ctx.Done():
		t.Error("Recovered does not report that the disk is open")
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

var errDisk = errors.New("read error")
