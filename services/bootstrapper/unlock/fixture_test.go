package unlock_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a machine that builds at the same time may take.
const patience = 5 * time.Minute

const diskID = "5f0c95b6-2a3d-4c7e-9f10-000000000001"

var (
	clusterID = [32]byte(bytes.Repeat([]byte{0xC1}, 32))
	right     = bytes.Repeat([]byte{0xD1}, 32)
	wrong     = bytes.Repeat([]byte{0xD2}, 32)
)

// volume is a state disk whose key is known.
type volume struct {
	key []byte // nil: the right one

	mu     sync.Mutex
	state  disk.State
	broken error // the error of State
	opens  int
	closed int
	tried  int
	format error
	wrote  bool
}

func (v *volume) ID() (keys.DiskID, error) { return keys.ParseDiskID(diskID) }

func (v *volume) State() (disk.State, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state, v.broken
}

func (v *volume) Format(_ context.Context, progress func(done, total uint64)) error {
	for done := range uint64(33) {
		progress(done<<20, 32<<20)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.format; err != nil {
		v.format = nil
		return err
	}
	v.state, v.wrote = disk.StateOpen, true
	return nil
}

func (v *volume) Unlock(_ context.Context, key keys.Disk) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tried++
	opener := right
	if v.key != nil {
		opener = v.key
	}
	if !bytes.Equal(key.Expose(), opener) {
		return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "%w", disk.ErrWrongKey)
	}
	v.state = disk.StateOpen
	v.opens++
	return nil
}

func (v *volume) Close(context.Context) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state = disk.StateLocked
	v.closed++
	return nil
}

func (v *volume) set(change func(*volume)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change(v)
}

// buffer holds a log.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.b.Bytes())
}

// fixture is one machine that has rebooted.
type fixture struct {
	t           testing.TB
	ca          *attesttest.CA
	machine     *attesttest.Machine
	image       *metadata.Image
	owner       ed25519.PrivateKey
	disk        *volume
	log         *buffer
	screen      string
	recovery    unlock.Recovery
	timing      unlock.Timing
	appraisedBy *journal.File // the policy by which the sender of the key was appraised
	desired     component.DesiredFile
	root        string

	planes []*attesttest.Machine // that the cluster's policy lists as control planes
	next   int                   // index of the one that like returns next

	mu         sync.Mutex
	meta       metadata.Machine
	unreadable error
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	ca := attesttest.NewCA(t)
	pub, priv, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &fixture{
		t: t, ca: ca, machine: attesttest.NewMachine(t, ca, attesttest.Options{}), owner: priv, disk: &volume{state: disk.StateLocked}, log: &buffer{},
		image:  &metadata.Image{StateDisk: metadata.StateDisk{Mode: "luks", Path: "/dev/vda"}, TPM: metadata.TPM{Bank: "sha256"}, OwnerKeys: attest.OwnerKeys{pub}, EKRoots: ca.Roots()},
		meta:   metadata.Machine{Name: "node2", Role: "worker", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}},
		screen: filepath.Join(t.TempDir(), "console"), appraisedBy: journal.Open(filepath.Join(t.TempDir(), "policy")), root: t.TempDir(), desired: component.DesiredFile(filepath.Join(t.TempDir(), "desired")),
		planes: []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})},
		timing: unlock.Timing{Stagger: 20 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond, Dial: 5 * time.Second, Ticket: 20 * time.Second},
	}
	w.image.Listen.Init, w.image.Listen.Metrics, w.image.Listen.Recover = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	if err := os.WriteFile(w.screen, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *fixture) metadata() (*metadata.Machine, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.meta
	return &m, w.unreadable
}

func (w *fixture) set(change func(*fixture)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(w)
}

func verifier(roots []*x509.Certificate) (attest.Verifier, error) {
	return tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
}

func (w *fixture) config() unlock.Config {
	w.t.Helper()
	c, err := console.Open(w.screen)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return unlock.Config{
		Image: w.image, Metadata: w.metadata, Root: w.root, Disk: w.disk, TPM: w.machine, Attester: w.machine.Attester(attest.PurposeMachine), NewVerifier: verifier,
		Policy: w.appraisedBy, Desired: w.desired, Recovery: w.recovery, Console: c, Timing: w.timing, Log: slog.New(slog.NewJSONHandler(w.log, nil)),
	}
}

// lines returns what the console shows.
func (w *fixture) lines() []string {
	w.t.Helper()
	b, err := os.ReadFile(w.screen)
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(b), "\r\n"), "\r\n")
}

// running is one run of an unlocker.
type running struct {
	*unlock.Unlocker
	metrics *prometheus.Registry
	stop    context.CancelFunc
	done    chan error
}

func (w *fixture) boot() *running {
	w.t.Helper()
	return w.bootWith(w.config())
}

func (w *fixture) bootWith(cfg unlock.Config) *running {
	w.t.Helper()
	r := &running{metrics: prometheus.NewRegistry(), done: make(chan error, 1)}
	cfg.Metrics = r.metrics
	var err error
	if r.Unlocker, err = unlock.New(cfg); err != nil {
		w.t.Fatal(err)
	}
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.WithoutCancel(w.t.Context()))
	go func() { r.done <- r.Run(ctx) }()
	w.t.Cleanup(func() {
		r.stop()
		if err := r.end(w.t); err != nil && !errors.Is(err, context.Canceled) {
			w.t.Error(err)
		}
	})
	return r
}

// end waits until it ends by itself.
func (r *running) end(t testing.TB) error {
	t.Helper()
	select {
	case err := <-r.done:
		r.done <- err
		return err
	case <-time.After(patience):
		t.Fatal("unlocking does not end")
		return nil
	}
}

func (r *running) families(t testing.TB) []*dto.MetricFamily {
	t.Helper()
	f, err := r.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// bootFailing boots the machine, whose attempts must fail with the reason in the metric and in the log.
func (w *fixture) bootFailing(want attestv1.Reason) *running {
	w.t.Helper()
	r := w.boot()
	begun := false
	s := refusaltest.Service{
		Families: func(t testing.TB) []*dto.MetricFamily {
			if !begun { // it starts by itself: what it reports from then on counts
				return nil
			}
			return r.families(t)
		},
		Log: func() []byte {
			if !begun {
				return nil
			}
			return w.log.Bytes()
		},
	}
	refusaltest.Reported(w.t, s, want, refusaltest.Places{Metric: []string{"muster_unlock_attempts_total"}, Log: []string{"msg", "not unlocked yet"}}, func() { begun = true })
	return r
}

// joinservice is a cluster's joinservice, on a machine of its own: real attested TLS, and scripted answers.
type joinservice struct {
	joinv1connect.UnimplementedJoinServiceHandler

	addr string

	mu       sync.Mutex
	answer   func(*joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error)
	requests []*joinv1.IssueRejoinTicketRequest
	peers    []attest.Peer
}

func (j *joinservice) IssueRejoinTicket(ctx context.Context, req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.requests = append(j.requests, req)
	if p, ok := attest.PeerFrom(ctx); ok {
		j.peers = append(j.peers, p)
	}
	return j.answer(req)
}

func (j *joinservice) script(answer func(*joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.answer = answer
}

func (j *joinservice) asked() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.requests)
}

func gives(key []byte) func(*joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
	return func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
		resp := &joinv1.IssueRejoinTicketResponse{
			TicketId: bytes.Repeat([]byte{7}, 16), DiskKey: key, ClusterId: clusterID[:], Images: machinetest.Images().References(), ControlPlaneEndpoint: "192.168.77.1:6443",
		}
		for _, name := range component.Authorities(req.GetRole() == joinv1.Role_ROLE_CONTROL_PLANE) {
			resp.Authorities = append(resp.Authorities, &joinv1.ControlPlaneFile{Path: name, Content: []byte(authority)})
		}
		return resp, nil
	}
}

const authority = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n"

func refuses(r attestv1.Reason, again time.Duration) func(*joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
	return func(*joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
		return nil, attest.RefuseFor(again, r, "details that are for the joinservice's log")
	}
}

// cluster starts a joinservice on a machine. It presents a policy that owner signed and that lists the machine, with the changes, and accepts what the
// policy does. The fixture's machine has its address.
func (w *fixture) cluster(on *attesttest.Machine, owner ed25519.PrivateKey, changes ...func(*attestv1.Policy)) *joinservice {
	t := w.t
	t.Helper()
	j := &joinservice{answer: gives(right)}
	accepted := []*attesttest.Machine{w.machine}
	planes := w.planes
	if !slices.Contains(planes, on) {
		planes = append(slices.Clone(planes), on)
	}
	signed := attest.SignPolicy(owner, attesttest.Policy(t, w.ca, accepted, slices.Insert(changes, 0, attesttest.ControlPlanes(planes...))...))
	on.LockTo(clusterID)
	attester, err := evidence.WithPolicy(on.Attester(attest.PurposeJoinservice), func() *attestv1.SignedPolicy { return signed })
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	j.addr = l.Addr().String()
	calls, err := rpc.NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: rpc.NewHealth(), Metrics: calls, Log: slog.New(slog.DiscardHandler), Grace: time.Second,
		ATLS: atls.ServerConfig{
			Attester: attester, Verifier: attesttest.Verifier(t, w.ca), ClientPurpose: attest.PurposeMachine, Generation: func() int64 { return 0 },
			Appraiser: attesttest.ParsedPolicy(t, w.ca, accepted).For(attest.Unlocked()),
		},
		Services: []rpc.Service{rpc.Serve[joinv1connect.JoinServiceHandler](joinv1connect.JoinServiceName, j, joinv1connect.NewJoinServiceHandler)},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	w.set(func(w *fixture) { w.meta.JoinEndpoints = append(w.meta.JoinEndpoints, j.addr) })
	return j
}

// like returns another machine with the same boot measurements, a control plane.
func (w *fixture) like() *attesttest.Machine {
	w.t.Helper()
	if w.next == len(w.planes) {
		w.t.Fatal("there are no more control planes")
	}
	w.next++
	return w.planes[w.next-1]
}

// logged waits for a line of the log that has the attribute, and returns its value.
func (w *fixture) logged(name string) (value string) {
	w.t.Helper()
	eventually(w.t, "the log has "+name, func() bool {
		_, rest, ok := strings.Cut(string(w.log.Bytes()), `"`+name+`":"`)
		value, _, _ = strings.Cut(rest, `"`)
		return ok
	})
	return value
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

// lockedTo fails unless PCR 15 of the machine is that of the cluster.
func (w *fixture) lockedTo(cluster keys.ClusterID) {
	w.t.Helper()
	if got := w.machine.PCRs()[attest.LockPCR]; !bytes.Equal(got, attest.LockValue(crypto.SHA256, cluster)) {
		w.t.Errorf("PCR 15 is %x, which is not that of cluster %s", got, cluster)
	}
}

func metric(t testing.TB, r *running, reason attestv1.Reason) float64 {
	t.Helper()
	return refusaltest.Sum(r.families(t), "muster_unlock_attempts_total", "reason", attest.ReasonName(reason))
}
