package owner

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// patience is how long a condition may take on a machine that compiles at the same time.
const patience = 10 * time.Minute

// answer is a first machine's answer to one call of Init.
type answer func(req *initv1.InitRequest, send func(*initv1.InitResponse) error) error

// firstMachine serves init.v1 over the real attested TLS with genuine evidence, and answers as the test configures
// it.
type firstMachine struct {
	*attesttest.Machine
	addr string
	drop func()
	// adopted reports that the machine is a control plane already: it is adopted, and not initialized.
	adopted bool

	mu       sync.Mutex
	answers  []answer
	requests []*initv1.InitRequest
}

// Init implements [initv1connect.InitServiceHandler].
func (f *firstMachine) Init(_ context.Context, req *initv1.InitRequest, stream *connect.ServerStream[initv1.InitResponse]) error {
	return f.next(req, false, stream.Send)
}

// Adopt implements [initv1connect.InitServiceHandler].
func (f *firstMachine) Adopt(_ context.Context, req *initv1.AdoptRequest, stream *connect.ServerStream[initv1.AdoptResponse]) error {
	return f.next(req.GetOrder(), true, func(m *initv1.InitResponse) error { return stream.Send(&initv1.AdoptResponse{Event: m}) })
}

// Restore implements [initv1connect.InitServiceHandler].
func (f *firstMachine) Restore(_ context.Context, req *initv1.RestoreRequest, stream *connect.ServerStream[initv1.RestoreResponse]) error {
	return f.next(req.GetOrder(), false, func(m *initv1.InitResponse) error { return stream.Send(&initv1.RestoreResponse{Event: m}) })
}

func (f *firstMachine) next(req *initv1.InitRequest, adopt bool, send func(*initv1.InitResponse) error) error {
	f.mu.Lock()
	f.requests = append(f.requests, req)
	if len(f.answers) == 0 || adopt != f.adopted {
		f.mu.Unlock()
		return attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "one call too many, or the other one")
	}
	next := f.answers[0]
	f.answers = f.answers[1:]
	f.mu.Unlock()
	return next(req, send)
}

func (f *firstMachine) calls() []*initv1.InitRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*initv1.InitRequest(nil), f.requests...)
}

// serveFirst runs a first machine.
func serveFirst(t *testing.T, m *attesttest.Machine, answers ...answer) *firstMachine {
	t.Helper()
	f := &firstMachine{Machine: m, answers: answers}
	inner := listen(t)
	f.addr, f.drop = inner.Addr().String(), inner.drop
	serve(t, inner, m.Attester(attest.PurposeMachine), rpc.Serve(initv1connect.InitServiceName, initv1connect.InitServiceHandler(f), initv1connect.NewInitServiceHandler))
	return f
}

// serve runs a server that does not appraise its clients, until the test ends.
func serve(t *testing.T, l net.Listener, a attest.Attester, services ...rpc.Service) {
	t.Helper()
	metrics, err := rpc.NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	health := rpc.NewHealth()
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, ATLS: atls.ServerConfig{Attester: a, Appraiser: atls.NoAppraiser}, Services: services,
		Health: health, Metrics: metrics, Log: slog.New(slog.DiscardHandler), Grace: time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	health.SetAll(true)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	})
}

// droppable is a listener whose connections the test can cut, as a network fault would.
type droppable struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func listen(t *testing.T) *droppable {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return &droppable{Listener: l}
}

func (d *droppable) Accept() (net.Conn, error) {
	c, err := d.Listener.Accept()
	if err == nil {
		d.mu.Lock()
		d.conns = append(d.conns, c)
		d.mu.Unlock()
	}
	return c, err
}

func (d *droppable) drop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		_ = c.Close()
	}
	d.conns = nil
}

// owned is an owner's folder for a cluster on machine f, and its output.
type owned struct {
	*ownerdir.Dir
	secrets ownerdir.Secrets
	out     *lockedBuffer
}

func (o *owned) clusterID() keys.ClusterID {
	return keys.NewRoot(o.secrets.Root, o.secrets.Salt).ClusterID(o.secrets.MeasurementSalt)
}

// own creates a folder with the given policy.
func own(t *testing.T, f *firstMachine, endpoint string, policy []byte) *owned {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	d, err := ownerdir.Create(filepath.Join(t.TempDir(), "muster-prod"), ownerdir.New{
		Cluster: ownerdir.Cluster{
			Name: "prod", Endpoint: f.addr, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: endpoint,
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, Stage: ownerdir.StagePrepared, Adopted: f.adopted,
		},
		Secrets: ownerdir.NewSecrets([32]byte{7}), OwnerKey: key, Policy: policy,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	o := &owned{Dir: d, out: &lockedBuffer{}}
	if o.secrets, err = d.Secrets(); err != nil {
		t.Fatal(err)
	}
	return o
}

// config is an InitConfig that reports into o.out.
func (o *owned) config() InitConfig {
	return InitConfig{
		Dir: o.Dir, Log: slog.New(slog.DiscardHandler),
		Report: progress.New(progress.Config{Out: io.Writer(o.out), Format: progress.Plain, Steps: Steps}),
	}
}

// machine runs the part of Init that talks to the first machine.
func (o *owned) machine(t *testing.T) error {
	t.Helper()
	i := &initializer{InitConfig: o.config()}
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return i.machine(ctx)
}

// holds reports whether the text shows a secret of o, as bytes or as digits.
func (o *owned) leaks(text []byte) bool {
	for _, s := range [][]byte{o.secrets.Root[:], o.secrets.Salt[:], o.secrets.Init[:]} {
		if bytes.Contains(text, s) || bytes.Contains(text, hexOf(s)) {
			return true
		}
	}
	return false
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// await waits until the output has text. It may be called from any goroutine.
func (l *lockedBuffer) await(t *testing.T, text string) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(patience); !strings.Contains(l.String(), text); {
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("nobody said %q in %s", text, patience)
			return
		}
	}
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
