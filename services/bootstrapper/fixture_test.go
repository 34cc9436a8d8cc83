package bootstrapper_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

var errDead = errors.New("the machine is dead")

// fixture is one machine with its disk, TPM and programs, which outlive its bootstrapper, and its mirror.
type fixture struct {
	t       testing.TB
	root    string
	ca      *attesttest.CA
	tpm     *attesttest.Machine
	machine *machinetest.Machine
	journal *journal.File
	image   *metadata.Image
	signer  ed25519.PrivateKey // the image has its public key
	meta    metadata.Machine
	// unreadable is the error of reading the metadata.
	unreadable error
	mirror     string
	logged     *logBuffer
	now        func() time.Time // the machine's clock; nil: the real time
	screen     string           // file that stands for the machine's console; empty: none
	// etcdDown, if set, returns the error of the cluster's etcd.
	etcdDown func() error
	// adopted means that the administrator's kubeconfig names the address of a real control plane; the API server is the fixture's.
	adopted bool
	// counter is the TPM's counter; nil: that of tpm.
	counter epoch.Counter
	// linger is for tests that call again after a result was sent; 0: that of timing.
	linger time.Duration
	// renewal is for the test of the time that a node with valid certificates waits for new ones; 0: that of timing.
	renewal time.Duration
	// leaseRenewal is the pause between two renewals of a join lease; 0: a third of its life.
	leaseRenewal time.Duration
	// stopReattesting stops what the last reattest started.
	stopReattesting func()

	mu    sync.Mutex
	left  int    // effects until the machine stops; negative: it does not stop
	at    string // the effect at which it stops; empty: none
	steps []string
	die   context.CancelFunc
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

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

var kubeadmBinary = []byte("#!kubeadm")

// mirror serves kubeadm. It runs as long as the tests, and its address is on disks.
var mirror = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(kubeadmBinary) }))

func newFixture(t testing.TB, name string) *fixture {
	t.Helper()
	ca := attesttest.NewCA(t)
	image := &metadata.Image{StateDisk: metadata.StateDisk{Mode: "plain", Path: "/var/lib/muster/state"}, TPM: metadata.TPM{Bank: "sha256"}, EKRoots: ca.Roots()}
	image.Kubeadm.CRISocket = "unix:///run/containerd/containerd.sock"
	public, signer := ownerKey(t)
	image.OwnerKeys = attest.OwnerKeys{public}
	w := newMachine(t, ca, attesttest.NewMachine(t, ca, attesttest.Options{}), image)
	w.signer = signer
	w.meta = metadata.Machine{Name: name, Role: "control-plane", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.11")}}
	return w
}

// newMachine returns a machine with an empty disk.
func newMachine(t testing.TB, ca *attesttest.CA, tpm *attesttest.Machine, image *metadata.Image) *fixture {
	t.Helper()
	w := &fixture{t: t, root: t.TempDir(), ca: ca, tpm: tpm, image: image, mirror: mirror.URL, left: -1, logged: &logBuffer{}}
	w.machine = &machinetest.Machine{Root: w.root, API: machinetest.NewAPIServer(t), Step: w.step}
	// The API server is a static pod: it runs only while the kubelet does.
	w.machine.API.Up = func() bool { return w.machine.Running(machine.UnitKubelet) }
	w.journal = journal.Open(filepath.Join(w.root, "journal"))
	return w
}

func (w *fixture) components() []*initv1.Component {
	sum := sha256.Sum256(kubeadmBinary)
	return []*initv1.Component{{Url: w.mirror + "/kubeadm", Sha256: sum[:], Path: "/usr/local/bin/kubeadm", Mode: 0o755}}
}

// step counts an effect of the machine, and stops the machine if it is its last.
func (w *fixture) step(name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.steps = append(w.steps, name)
	if w.left == 0 || name == w.at {
		w.die()
		return errDead
	}
	if w.left > 0 {
		w.left--
	}
	return nil
}

// did reports whether the machine has had the effect since dieAfter.
func (w *fixture) did(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.steps, name)
}

// dieAfter makes the machine stop after n more effects.
func (w *fixture) dieAfter(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left, w.at, w.steps = n, "", nil
}

// These are the fixture's effects. The machine can stop before or after each of them.
type dyingJournal struct {
	*journal.File
	w *fixture
}

func (j dyingJournal) Save(r journal.Record) error {
	if err := j.w.step("before the journal says " + r.Step.String()); err != nil {
		return err
	}
	if err := j.File.Save(r); err != nil {
		return err
	}
	return j.w.step("after the journal says " + r.Step.String())
}

type dyingTPM struct {
	*attesttest.Machine
	w *fixture
}

func (d dyingTPM) Measure(ctx context.Context, pcr int, data []byte) error {
	if err := d.w.step("before PCR 15 is extended"); err != nil {
		return err
	}
	if err := d.Machine.Measure(ctx, pcr, data); err != nil {
		return err
	}
	return d.w.step("after PCR 15 is extended")
}

// counted returns the TPM with the fixture's counter.
func (d dyingTPM) counted() epoch.Counter {
	if d.w.counter != nil {
		return d.w.counter
	}
	return d.Machine
}

func (d dyingTPM) Counter(ctx context.Context) (uint64, error) { return d.counted().Counter(ctx) }

func (d dyingTPM) DefineCounter(ctx context.Context) (uint64, error) {
	if err := d.w.step("before the counter is defined"); err != nil {
		return 0, err
	}
	n, err := d.counted().DefineCounter(ctx)
	return n, errors.Join(err, d.w.step("after the counter is defined"))
}

func (d dyingTPM) IncrementCounter(ctx context.Context) (uint64, error) {
	if err := d.w.step("before the counter is incremented"); err != nil {
		return 0, err
	}
	n, err := d.counted().IncrementCounter(ctx)
	return n, errors.Join(err, d.w.step("after the counter is incremented"))
}

func (w *fixture) writeState(ctx context.Context, kubeconfig []byte, s clusterobjects.State) error {
	if err := w.step("before the cluster's objects"); err != nil {
		return err
	}
	if !w.machine.Running(machine.UnitKubelet) { // the API server is a pod of the kubelet
		return errors.New("the API server does not answer: no kubelet runs")
	}
	if w.adopted {
		kubeconfig = w.machine.API.Kubeconfig()
	}
	if err := clusterobjects.Write(ctx, kubeconfig, s); err != nil {
		return err
	}
	return w.step("after the cluster's objects")
}

// cleanEtcd is the fake cluster's etcd.
func (w *fixture) cleanEtcd(ctx context.Context, t etcd.Target) ([]etcd.Member, error) {
	if len(t.ControlPlanes) != 1 || len(t.CAKey) == 0 || len(t.CACert) == 0 || !slices.Equal(t.Own, w.meta.Addresses) {
		return nil, fmt.Errorf("asked to clean %v for %v", t.ControlPlanes, t.Own)
	}
	if w.etcdDown != nil {
		if err := w.etcdDown(); err != nil {
			return nil, err
		}
	}
	if !w.machine.Member() {
		return nil, nil
	}
	return []etcd.Member{{ID: 7, PeerURLs: []string{"https://192.168.77.11:2380"}}}, w.machine.LeaveEtcd(ctx)
}

func timing() provision.Timing {
	return provision.Timing{
		Stagger: 20 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond, Dial: patience, Ticket: patience,
		Linger: 50 * time.Millisecond, Unclaimed: patience, Kubeadm: patience, Reset: patience, ClusterState: patience,
		Renewal: patience,
	}
}

func verifier(roots []*x509.Certificate) (attest.Verifier, error) {
	return tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
}

// running is one run of the bootstrapper.
type running struct {
	addr    string
	metrics *prometheus.Registry
	stop    context.CancelFunc
	done    chan error
}

// boot starts the bootstrapper with its init server on a port of loopback.
func (w *fixture) boot() *running {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	w.mu.Lock()
	w.die = cancel
	w.mu.Unlock()
	log := slog.New(slog.NewJSONHandler(w.logged, nil))
	r := &running{metrics: prometheus.NewRegistry(), stop: cancel, done: make(chan error, 1)}
	meta, unreadable, waits := w.meta, w.unreadable, timing()
	waits.Linger, waits.Renewal, waits.LeaseRenewal = max(waits.Linger, w.linger), cmp.Or(w.renewal, waits.Renewal), w.leaseRenewal
	screen, err := console.Open(w.screen)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = screen.Close() })
	calls, err := rpc.NewMetrics(r.metrics)
	if err != nil {
		w.t.Fatal(err)
	}
	b, err := bootstrapper.New(ctx, bootstrapper.Config{WriteClusterState: w.writeState, CleanEtcd: w.cleanEtcd, Config: provision.Config{
		Image: w.image, Metadata: func() (*metadata.Machine, error) { m := meta; return &m, unreadable }, Journal: dyingJournal{w.journal, w}, Machine: w.machine, Root: w.root,
		TPM: dyingTPM{w.tpm, w}, Attester: w.tpm.Attester(attest.PurposeMachine), NewVerifier: verifier,
		Components: component.DefaultLimits, Timing: waits, Metrics: r.metrics, Calls: calls, Log: log, Now: w.now, Console: screen,
	}})
	if err != nil {
		w.t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	r.addr = l.Addr().String()
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: rpc.NewHealth(), Metrics: calls, Log: log, Grace: time.Second,
		ATLS: atls.ServerConfig{Attester: w.tpm.Attester(attest.PurposeMachine), Appraiser: atls.NoAppraiser},
		Services: []rpc.Service{
			rpc.Serve[initv1connect.InitServiceHandler](initv1connect.InitServiceName, b.InitServer(), initv1connect.NewInitServiceHandler),
			rpc.Serve[initv1connect.MachineServiceHandler](initv1connect.MachineServiceName, b, initv1connect.NewMachineServiceHandler),
		},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	go func() {
		served := make(chan error, 1)
		serving, stop := context.WithCancel(ctx)
		go func() { served <- server.Run(serving) }()
		err := b.Run(ctx)
		stop()
		r.done <- errors.Join(err, <-served)
		cancel()
	}()
	return r
}

// end waits until the bootstrapper ends by itself.
func (r *running) end(t testing.TB) error {
	t.Helper()
	select {
	case err := <-r.done:
		return err
	case <-time.After(patience):
		t.Fatal("the bootstrapper does not end")
		return nil
	}
}

// kill stops the bootstrapper as a signal does.
func (r *running) kill(t testing.TB) {
	t.Helper()
	r.stop()
	_ = r.end(t)
}

// owner returns a client of init that appraises the machine by a policy for what it booted.
func (w *fixture) owner(r *running) (initv1connect.InitServiceClient, func()) {
	w.t.Helper()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: atls.NoAttester, Verifier: attesttest.Verifier(w.t, w.ca), PeerPurpose: attest.PurposeMachine,
		Appraiser: attesttest.ParsedPolicy(w.t, w.ca, []*attesttest.Machine{w.tpm}).For(attest.AnyLock()),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return initv1connect.NewInitServiceClient(rpc.HTTPClient(transport), "https://"+r.addr, rpc.ClientOptions()...), func() { _ = transport.Close() }
}

// outcome is the result that a caller of init received.
type outcome struct {
	progress []*initv1.Progress
	result   *initv1.InitResult
	err      error
}

func (w *fixture) init(ctx context.Context, r *running, req *initv1.InitRequest) outcome {
	w.t.Helper()
	return w.initWatched(ctx, r, req, func() {})
}

// initWatched is init that calls progressed for each message of progress.
func (w *fixture) initWatched(ctx context.Context, r *running, req *initv1.InitRequest, progressed func()) (out outcome) {
	w.t.Helper()
	client, done := w.owner(r)
	defer done()
	stream, err := client.Init(ctx, req)
	if err != nil {
		return outcome{err: err}
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		m := stream.Msg()
		if p := m.GetProgress(); p != nil {
			out.progress = append(out.progress, p)
			progressed()
		}
		if m.GetResult() != nil {
			out.result = m.GetResult()
		}
	}
	out.err = stream.Err()
	if out.err == nil && out.result == nil {
		out.err = errors.New("the stream ended without a result")
	}
	return out
}

// adopt sends the owner's adoption request.
func (w *fixture) adopt(ctx context.Context, r *running, req *initv1.InitRequest) outcome {
	w.t.Helper()
	client, done := w.owner(r)
	defer done()
	stream, err := client.Adopt(ctx, &initv1.AdoptRequest{Order: req})
	return lastOf(stream, err, (*initv1.AdoptResponse).GetEvent)
}

// restore sends the owner's request to restore a cluster.
func (w *fixture) restore(ctx context.Context, r *running, req *initv1.RestoreRequest) outcome {
	w.t.Helper()
	client, done := w.owner(r)
	defer done()
	stream, err := client.Restore(ctx, req)
	return lastOf(stream, err, (*initv1.RestoreResponse).GetEvent)
}

func lastOf[T any](stream *connect.ServerStreamForClient[T], err error, event func(*T) *initv1.InitResponse) (out outcome) {
	if err != nil {
		return outcome{err: err}
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if m := event(stream.Msg()); m.GetResult() != nil {
			out.result = m.GetResult()
		}
	}
	out.err = stream.Err()
	return out
}

// allowInit writes the hash of the init secret into the metadata.
func (w *fixture) allowInit() {
	h := sha256.Sum256(bytes.Repeat([]byte{0xEE}, 32))
	w.meta.InitSecretHash = &h
}

func (w *fixture) request() *initv1.InitRequest {
	req := &initv1.InitRequest{
		IdempotencyKey: bytes.Repeat([]byte{1}, 16), InitSecret: bytes.Repeat([]byte{0xEE}, 32), RootSecret: bytes.Repeat([]byte{0xAB}, 32), Salt: bytes.Repeat([]byte{0xCD}, 32), MeasurementSalt: bytes.Repeat([]byte{0xDE}, 32), DiskSalt: bytes.Repeat([]byte{0xDF}, 32),
		ClusterName: "demo", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.168.77.1:6443", PodCidrs: []string{"10.244.0.0/16"}, ServiceCidrs: []string{"10.96.0.0/16"},
		ApiServerSans: []string{"api.example.com"}, Components: w.components(), Images: machinetest.Images().References(),
	}
	w.sign(req, false)
	return req
}

func (w *fixture) record() journal.Record {
	w.t.Helper()
	r, err := w.journal.Load()
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func (w *fixture) exists(path string) bool {
	_, err := os.Stat(filepath.Join(w.root, path))
	return err == nil
}

// reboot stops all processes, and clears memory and the TPM's registers.
func (w *fixture) reboot() {
	w.t.Helper()
	if err := w.machine.Reboot(); err != nil {
		w.t.Fatal(err)
	}
	w.tpm.Reboot()
}

func reason(err error) string { return attest.ReasonName(rpc.ReasonFrom(err)) }

func ownerKey(t testing.TB) (ed25519.PublicKey, ed25519.PrivateKey) {
	t.Helper()
	pub, priv, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return pub, priv
}

// text returns a result as text, without the values that differ between two inits.
func text(r *initv1.InitResult) string {
	return fmt.Sprintf("%x %x %s %s %v %s", r.GetClusterId(), r.GetMachineId(), r.GetNodeName(), r.GetDiskId(), r.GetAddresses(), r.GetKubeconfig())
}
