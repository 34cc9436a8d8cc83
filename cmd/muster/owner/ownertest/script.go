package ownertest

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
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
	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Remembers writes known.json as a command does that has connected to the cluster. The policy may be one that this version refuses.
func (o *Owned) Remembers(t *testing.T, policy []byte, by ed25519.PrivateKey, nodes map[string]ownerdir.KnownNode) {
	t.Helper()
	json, err := policyfile.ToJSON(policy)
	if err != nil {
		t.Fatal(err)
	}
	signed := attest.SignPolicy(by, json)
	if err := o.Remember(&ownerdir.Known{Policy: ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()}, Nodes: nodes}); err != nil {
		t.Fatal(err)
	}
}

// AdminConf reads the folder's kubeconfig, and the private key in it.
func (o *Owned) AdminConf(t *testing.T) (text, private string) {
	t.Helper()
	b, err := o.Read(ownerdir.AdminConf)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := clientcmd.Load(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), base64.StdEncoding.EncodeToString(conf.AuthInfos["u"].ClientKeyData)
}

// Report returns a reporter that writes to the output of o.
func (o *Owned) Report(steps int) progress.Reporter {
	return progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: steps})
}

// Patience is how long a condition may take on a machine that compiles at the same time.
const Patience = 10 * time.Minute

// Answer is a first machine's answer to one call of Init.
type Answer func(req *initv1.InitRequest, send func(*initv1.InitResponse) error) error

// FirstMachine serves init.v1 over the real attested TLS with genuine evidence, and answers as the test configures
// it.
type FirstMachine struct {
	*attesttest.Machine
	Addr string
	Drop func()
	// Adopted reports that the machine is a control plane already: it is adopted, and not initialized.
	Adopted bool

	mu       sync.Mutex
	Answers  []Answer
	requests []*initv1.InitRequest
}

// Init implements [initv1connect.InitServiceHandler].
func (f *FirstMachine) Init(_ context.Context, req *initv1.InitRequest, stream *connect.ServerStream[initv1.InitResponse]) error {
	return f.next(req, false, stream.Send)
}

// Adopt implements [initv1connect.InitServiceHandler].
func (f *FirstMachine) Adopt(_ context.Context, req *initv1.AdoptRequest, stream *connect.ServerStream[initv1.AdoptResponse]) error {
	return f.next(req.GetOrder(), true, func(m *initv1.InitResponse) error { return stream.Send(&initv1.AdoptResponse{Event: m}) })
}

// Restore implements [initv1connect.InitServiceHandler].
func (f *FirstMachine) Restore(_ context.Context, req *initv1.RestoreRequest, stream *connect.ServerStream[initv1.RestoreResponse]) error {
	return f.next(req.GetOrder(), false, func(m *initv1.InitResponse) error { return stream.Send(&initv1.RestoreResponse{Event: m}) })
}

func (f *FirstMachine) next(req *initv1.InitRequest, adopt bool, send func(*initv1.InitResponse) error) error {
	f.mu.Lock()
	f.requests = append(f.requests, req)
	if len(f.Answers) == 0 || adopt != f.Adopted {
		f.mu.Unlock()
		return attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "one call too many, or the other one")
	}
	next := f.Answers[0]
	f.Answers = f.Answers[1:]
	f.mu.Unlock()
	return next(req, send)
}

// Calls returns the requests that came.
func (f *FirstMachine) Calls() []*initv1.InitRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*initv1.InitRequest(nil), f.requests...)
}

// ServeFirst runs a first machine.
func ServeFirst(t *testing.T, m *attesttest.Machine, answers ...Answer) *FirstMachine {
	t.Helper()
	f := &FirstMachine{Machine: m, Answers: answers}
	inner := Listen(t)
	f.Addr, f.Drop = inner.Addr().String(), inner.Drop
	Serve(t, inner, m.Attester(attest.PurposeMachine), rpc.Serve(initv1connect.InitServiceName, initv1connect.InitServiceHandler(f), initv1connect.NewInitServiceHandler))
	return f
}

// Serve runs a server that does not appraise its clients, until the test ends.
func Serve(t *testing.T, l net.Listener, a attest.Attester, services ...rpc.Service) {
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

// Droppable is a listener whose connections the test can cut, as a network fault would.
type Droppable struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

// Listen returns a listener on a free port of the loopback address.
func Listen(t *testing.T) *Droppable {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return &Droppable{Listener: l}
}

// Accept implements [net.Listener].
func (d *Droppable) Accept() (net.Conn, error) {
	c, err := d.Listener.Accept()
	if err == nil {
		d.mu.Lock()
		d.conns = append(d.conns, c)
		d.mu.Unlock()
	}
	return c, err
}

// Drop cuts all connections.
func (d *Droppable) Drop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		_ = c.Close()
	}
	d.conns = nil
}

// Owned is an owner's folder for a cluster on machine f, and its output.
type Owned struct {
	*ownerdir.Dir
	Secrets ownerdir.Secrets
	Out     *lockedBuffer
}

// ClusterID returns the cluster ID of the folder's secrets.
func (o *Owned) ClusterID() keys.ClusterID {
	return keys.NewRoot(o.Secrets.Root, o.Secrets.Salt).ClusterID(o.Secrets.MeasurementSalt)
}

// Own creates a folder with the given policy.
func Own(t *testing.T, f *FirstMachine, endpoint string, policy []byte) *Owned {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	d, err := ownerdir.Create(filepath.Join(t.TempDir(), "muster-prod"), ownerdir.New{
		Cluster: ownerdir.Cluster{
			Name: "prod", Endpoint: f.Addr, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: endpoint,
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, Stage: ownerdir.StagePrepared, Adopted: f.Adopted,
			Images: machinetest.Images().References(),
		},
		Secrets: ownerdir.NewSecrets([32]byte{7}), OwnerKey: key, Policy: policy,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	o := &Owned{Dir: d, Out: &lockedBuffer{}}
	if o.Secrets, err = d.Secrets(); err != nil {
		t.Fatal(err)
	}
	return o
}

// Leaks reports whether the text shows a secret of o, as bytes or as digits.
func (o *Owned) Leaks(text []byte) bool {
	for _, s := range [][]byte{o.Secrets.Root[:], o.Secrets.Salt[:], o.Secrets.Init[:]} {
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

// Await waits until the output has text. It may be called from any goroutine.
func (l *lockedBuffer) Await(t *testing.T, text string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(Patience); !strings.Contains(l.String(), text); {
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("no output had %q within %s", text, Patience)
			return
		}
	}
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
