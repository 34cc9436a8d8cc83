package recovery

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	waitingDisk = "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"
	otherDisk   = "00000000-5b7e-4c1d-8a6f-0123456789ab"
)

// reaction is how a waiting machine answers one call of Recover.
type reaction func(send func(recoverv1.State) error) error

// waitingMachine serves recover.v1 over the real attested TLS with genuine evidence, and answers as the test
// configures it.
type waitingMachine struct {
	*attesttest.Machine
	addr string
	l    *ownertest.Droppable
	gone atomic.Bool // it does not listen any more

	mu        sync.Mutex
	disk      string
	nonce     []byte // 32 bytes, by default
	reactions []reaction
	asked     int // how often a recovery was requested
	described int
	fits      func(*recoverv1.RecoverRequest) bool
}

// Describe implements [recoverv1connect.RecoverServiceHandler].
func (w *waitingMachine) Describe(context.Context, *recoverv1.DescribeRequest) (*recoverv1.DescribeResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.described++
	return &recoverv1.DescribeResponse{DiskId: w.disk, Nonce: w.nonce}, nil
}

// Recover implements [recoverv1connect.RecoverServiceHandler].
func (w *waitingMachine) Recover(_ context.Context, req *recoverv1.RecoverRequest, stream *connect.ServerStream[recoverv1.RecoverResponse]) error {
	w.mu.Lock()
	w.asked++
	if len(w.reactions) == 0 || w.fits != nil && !w.fits(req) {
		w.mu.Unlock()
		return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "one call too many, or other secrets")
	}
	next, disk := w.reactions[0], w.disk
	w.reactions = w.reactions[1:]
	w.mu.Unlock()
	return next(func(s recoverv1.State) error { return stream.Send(&recoverv1.RecoverResponse{State: s, DiskId: disk}) })
}

func (w *waitingMachine) calls() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked
}

func serveWaiting(t *testing.T, m *attesttest.Machine, reactions ...reaction) *waitingMachine {
	t.Helper()
	w := &waitingMachine{Machine: m, reactions: reactions, disk: waitingDisk, nonce: make([]byte, 32), l: ownertest.Listen(t)}
	w.addr = w.l.Addr().String()
	ownertest.Serve(t, w.l, m.Attester(attest.PurposeMachine), rpc.Serve(recoverv1connect.RecoverServiceName, recoverv1connect.RecoverServiceHandler(w), recoverv1connect.NewRecoverServiceHandler))
	return w
}

// opens is the reaction of a machine whose disk the key opens.
func opens(send func(recoverv1.State) error) error {
	return errors.Join(send(recoverv1.State_STATE_RECEIVED), send(recoverv1.State_STATE_WAITING), send(recoverv1.State_STATE_TRYING), send(recoverv1.State_STATE_OPENED))
}

func refuses(r attestv1.Reason, after time.Duration) reaction {
	return func(send func(recoverv1.State) error) error {
		return errors.Join(send(recoverv1.State_STATE_RECEIVED), attest.RefuseFor(after, r, "cause"))
	}
}

// knows creates the folder of a cluster that was initialized on machine m, with its disk.
func knows(t *testing.T, w *waitingMachine, m *attesttest.Machine, disk string, policy []byte) *ownertest.Owned {
	t.Helper()
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: w.addr}, "192.0.2.1:6443", policy)
	c := o.Cluster()
	c.Stage, c.ClusterID = ownerdir.StageInstalled, o.ClusterID().String()
	c.FirstMachine = &ownerdir.Machine{ID: m.ID(), DiskID: disk, DiskSalt: keys.DiskSalt{3}.String()}
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	w.fits = func(r *recoverv1.RecoverRequest) bool {
		id, err := keys.ParseDiskID(w.disk)
		if err != nil {
			return false
		}
		want, err := keys.NewRoot(o.Secrets.Root, o.Secrets.Salt).Disk(id, keys.DiskSalt{3})
		if err != nil {
			return false
		}
		own, err := o.OwnerKey()
		if err != nil {
			return false
		}
		have, err := ownerorder.ParseRecovery(r, id, ownerorder.Nonce(w.nonce), attest.OwnerKeys{own.Public().(ed25519.PublicKey)})
		return err == nil && bytes.Equal(have.Key.Expose(), want.Expose()) && have.Cluster == o.ClusterID() && have.Software != nil && have.Software.Endpoint == o.Cluster().ControlPlaneEndpoint
	}
	return o
}

func recoverFrom(t *testing.T, o *ownertest.Owned, w *waitingMachine, machine *attest.MachineID) (*Recovery, error) {
	t.Helper()
	return recoverDisk(t, o, w, machine, "")
}

// recoverDisk names the disk; empty: it doesn't.
func recoverDisk(t *testing.T, o *ownertest.Owned, w *waitingMachine, machine *attest.MachineID, disk string) (*Recovery, error) {
	t.Helper()
	var named *keys.DiskID
	if disk != "" {
		id, err := keys.ParseDiskID(disk)
		if err != nil {
			t.Fatal(err)
		}
		named = &id
	}
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		if w.gone.Load() {
			return nil, &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	return Recover(ctx, RecoverConfig{
		Dir: o.Dir, Addr: w.addr, Machine: machine, Disk: named, DialContext: dial, Report: progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: RecoverSteps}),
	})
}

func TestRecoverNamesEachStateAndWhoseDiskIsOpen(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m, opens, func(send func(recoverv1.State) error) error { return send(recoverv1.State_STATE_OPEN_ALREADY) })
	o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m}))
	r, err := recoverFrom(t, o, w, nil)
	if err != nil {
		t.Fatal(err)
	}
	if *r != (Recovery{Machine: m.ID().String(), DiskID: waitingDisk}) {
		t.Errorf("%+v", r)
	}
	at := 0
	for _, state := range []string{"connected: " + w.addr, "appraised: machine " + m.ID().String(), "received: ", "waiting: ", "trying: the key of disk " + waitingDisk, "opened: disk " + waitingDisk} {
		i := strings.Index(o.Out.String()[at:], state)
		if i < 0 {
			t.Fatalf("%q is not told, or not in its order:\n%s", state, o.Out)
		}
		at += i
	}
	if o.Leaks([]byte(o.Out.String())) {
		t.Error("a secret is in the report")
	}
	if r, err = recoverFrom(t, o, w, nil); err != nil || !r.Already {
		t.Errorf("%+v %v, want that it was open already", r, err)
	}
}

// A6: the key is sent to exactly this machine, as it is before its state is open.
func TestAMachineThatIsNotTheExpectedOneGetsNoSecrets(t *testing.T) {
	ca := attesttest.NewCA(t)
	first, second := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	booted := attesttest.NewMachine(t, ca, attesttest.Options{})
	booted.LockTo([32]byte{9})
	policy := policyOf(t, ca, []*attesttest.Machine{first}, attesttest.ControlPlanes(first, second, booted))
	for name, tt := range map[string]struct {
		there    *attesttest.Machine
		expected *attesttest.Machine // by --machine-id; nil: the first one
		want     attestv1.Reason
		remedy   string
	}{
		"another control plane that nobody named":  {there: second, want: attestv1.Reason_REASON_POLICY_REFUSED, remedy: "--machine-id"},
		"the first one where another was named":    {there: first, expected: second, want: attestv1.Reason_REASON_POLICY_REFUSED, remedy: "--machine-id"},
		"another image":                            {there: attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"}), want: attestv1.Reason_REASON_POLICY_REFUSED, remedy: "Don't trust"},
		"a TPM that no listed root certifies":      {there: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), want: attestv1.Reason_REASON_EK_UNTRUSTED, remedy: "ekRoots"},
		"a machine whose state is open":            {there: booted, expected: booted, want: attestv1.Reason_REASON_LOCK_FOREIGN, remedy: "no recovery"},
		"the first one, which the folder knows of": {there: first, want: attestv1.Reason_REASON_ACCEPTED},
	} {
		t.Run(name, func(t *testing.T) {
			w := serveWaiting(t, tt.there, opens)
			o := knows(t, w, first, waitingDisk, policy)
			var expected *attest.MachineID
			if tt.expected != nil {
				id := tt.expected.ID()
				expected = &id
			}
			_, err := recoverFrom(t, o, w, expected)
			if got := rpc.ReasonFrom(err); got != tt.want {
				t.Fatalf("%s: %v", attest.ReasonName(got), err)
			}
			if tt.want == attestv1.Reason_REASON_ACCEPTED {
				return
			}
			if w.calls() != 0 {
				t.Error("the machine was asked")
			}
			if remedy := problem.Explain(err).Remedy; !strings.Contains(remedy, tt.remedy) {
				t.Errorf("the remedy is %q", remedy)
			}
		})
	}
}

func TestWhatAWaitingMachineRefusesSaysWhatToDo(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := policyOf(t, ca, []*attesttest.Machine{m})
	for name, tt := range map[string]struct {
		known  string
		answer reaction
		remedy string
	}{
		"a key that opens nothing": {waitingDisk, refuses(attestv1.Reason_REASON_RECOVERY_SECRET_INVALID, 0), "Use the owner's folder"},
		"another owner's image":    {waitingDisk, refuses(attestv1.Reason_REASON_OWNER_SIGNATURE, 0), "the owner whose key is in the image"},
		"a damaged disk":           {waitingDisk, refuses(attestv1.Reason_REASON_STATE_DISK, 0), "docs/state-disk.md"},
	} {
		t.Run(name, func(t *testing.T) {
			w := serveWaiting(t, m, tt.answer, opens)
			o := knows(t, w, m, tt.known, policy)
			_, err := recoverFrom(t, o, w, nil)
			if err == nil || !strings.Contains(problem.Explain(err).Remedy, tt.remedy) {
				t.Errorf("%v; the remedy is %q", err, problem.Explain(err).Remedy)
			}
			if w.calls() != 1 {
				t.Errorf("asked %d times", w.calls())
			}
			if _, err := recoverFrom(t, o, w, nil); err != nil {
				t.Errorf("repaired: %v", err)
			}
		})
	}
}

// A machine that asks for a retry is asked again; so is one whose connection breaks.
func TestRecoverComesBack(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m, refuses(attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, 10*time.Millisecond), refuses(attestv1.Reason_REASON_BUSY, 10*time.Millisecond))
	w.reactions = append(w.reactions, func(send func(recoverv1.State) error) error {
		err := send(recoverv1.State_STATE_TRYING)
		w.l.Drop()
		return err
	}, opens)
	o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m}))
	if _, err := recoverFrom(t, o, w, nil); err != nil {
		t.Fatal(err)
	}
	if w.calls() != 4 {
		t.Errorf("asked %d times, want 4", w.calls())
	}
}

// The answer was lost with the connection, and the machine does not listen any more: the error explains that.
func TestAMachineThatIsGoneAfterTryingWasProbablyRecovered(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m)
	o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m}))
	w.reactions = []reaction{func(send func(recoverv1.State) error) error {
		err := send(recoverv1.State_STATE_TRYING)
		o.Out.Await(t, "trying") // that it was sent does not mean that it was received
		w.gone.Store(true)
		w.l.Drop()
		return err
	}}
	_, err := recoverFrom(t, o, w, nil)
	if err == nil || !strings.Contains(err.Error(), "tried the key") || !strings.Contains(problem.Explain(err).Remedy, "kubectl get nodes") {
		t.Errorf("%v: %s", err, problem.Explain(err).Remedy)
	}
}

func TestAMachineThatSaysNonsenseIsNotBelieved(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m, opens)
	w.disk = "\x1b[2J not a disk"
	o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m}))
	refused := func() {
		t.Helper()
		if _, err := recoverFrom(t, o, w, nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_REQUEST_INVALID || w.calls() != 0 {
			t.Errorf("%v, asked %d times", err, w.calls())
		}
	}
	refused()
	w.disk, w.nonce = waitingDisk, w.nonce[1:]
	refused()
	w.nonce = append(w.nonce, 0)
	if _, err := recoverFrom(t, o, w, nil); err != nil {
		t.Errorf("repaired: %v", err)
	}
}

func TestAFolderThatKnowsNoMachineRecoversNoneUnnamed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m, opens)
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: w.addr}, "192.0.2.1:6443", policyOf(t, ca, []*attesttest.Machine{m}))
	if _, err := recoverFrom(t, o, w, nil); err == nil || w.calls() != 0 {
		t.Errorf("%v, asked %d times", err, w.calls())
	}
	id := m.ID()
	if _, err := recoverFrom(t, o, w, &id); rpc.ReasonFrom(err) != attestv1.Reason_REASON_DISK_MISMATCH || w.calls() != 0 {
		t.Errorf("named, with a disk that nobody knows: %v", err)
	}
	if _, err := recoverDisk(t, o, w, &id, waitingDisk); rpc.ReasonFrom(err) != attestv1.Reason_REASON_DISK_ERASED || w.calls() != 0 { // K4
		t.Errorf("both named, without the disk's salt: %v", err)
	}
}

func TestEveryStateOfARecoveryHasAName(t *testing.T) {
	for n := range recoverv1.State_name {
		if text := stateText(recoverv1.State(n), waitingDisk); text == "" || strings.Contains(text, "STATE") {
			t.Errorf("%d: %q", n, text)
		}
	}
}

// B8: the machine gets both lists that it may run during an upgrade of Kubernetes, and none if the owner says so.
func TestARecoveryHasTheListsOfTheFolder(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	opened := func(send func(recoverv1.State) error) error { return send(recoverv1.State_STATE_OPENED) }
	w := serveWaiting(t, m, opened, opened, opened, opened, opened)
	o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m}))
	var got *recoverv1.Software
	w.fits = func(r *recoverv1.RecoverRequest) bool { got = r.GetSoftware(); return true }
	release := func(name string) clusterinfo.Release {
		c := versions.Component{URL: "http://mirror/" + name, SHA256: strings.Repeat("0", 64), Path: "/usr/local/bin/kubelet", Mode: 0o755}
		return clusterinfo.Release{KubernetesVersion: "1.36.1", Components: []versions.Component{c}, Images: machinetest.Images().References()}
	}
	now, next := release("now"), release("next")
	for name, tt := range map[string]struct {
		upgrade     *clusterinfo.Release
		cfg         RecoverConfig
		list, other string // what they name; empty: nothing
	}{
		"no upgrade":               {list: "now"},
		"an upgrade":               {upgrade: &next, list: "now", other: "next"},
		"only workers are left":    {upgrade: &now, list: "now"},
		"the folder is the newest": {cfg: RecoverConfig{ReplaceSoftware: true}, list: "now"},
		"uncompared":               {cfg: RecoverConfig{Uncompared: true}},
	} {
		c := o.Cluster()
		c.Components, c.Upgrade, c.Adopted = now.Components, tt.upgrade, true
		if err := o.Save(c); err != nil {
			t.Fatal(err)
		}
		tt.cfg.Dir, tt.cfg.Addr = o.Dir, w.addr
		tt.cfg.Report = progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: RecoverSteps})
		if _, err := Recover(t.Context(), tt.cfg); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if (got == nil) != tt.cfg.Uncompared {
			t.Errorf("%s: %v", name, got)
		}
		if got == nil {
			continue
		}
		if !strings.Contains(got.GetList(), "mirror/"+tt.list) || (tt.other == "") != (got.GetOther() == "") || !strings.Contains(got.GetOther(), tt.other) || got.GetEndpoint() != c.ControlPlaneEndpoint || !got.GetAdopted() || got.GetReplace() != tt.cfg.ReplaceSoftware {
			t.Errorf("%s: %v", name, got)
		}
	}

	c := o.Cluster()
	c.Images = nil
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	asked := w.calls()
	if _, err := recoverFrom(t, o, w, nil); err == nil || !strings.Contains(problem.Remedy(err), "--uncompared") || w.calls() != asked {
		t.Errorf("a folder without images: %v", err)
	}
}

// A machine with an image from before there were lists of software ignores them, so that the signature seems wrong to it. The owner is told how to recover it.
func TestAMachineOfAnEarlierImageIsRecovered(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := serveWaiting(t, m)
	o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m}))
	own, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	disk, err := keys.ParseDiskID(waitingDisk)
	if err != nil {
		t.Fatal(err)
	}
	var verdict error
	w.fits = func(r *recoverv1.RecoverRequest) bool {
		known := &recoverv1.RecoverRequest{ClusterId: r.GetClusterId(), DiskKey: r.GetDiskKey(), Signature: r.GetSignature()}
		_, verdict = ownerorder.ParseRecovery(known, disk, ownerorder.Nonce(w.nonce), attest.OwnerKeys{own.Public().(ed25519.PublicKey)})
		return true
	}
	earlier := func(send func(recoverv1.State) error) error {
		if verdict != nil {
			return verdict
		}
		return send(recoverv1.State_STATE_OPENED)
	}
	w.reactions = []reaction{earlier, earlier}
	_, err = recoverFrom(t, o, w, nil)
	if rpc.ReasonFrom(err) != attestv1.Reason_REASON_OWNER_SIGNATURE || !strings.Contains(problem.Remedy(err), "--uncompared") || !strings.Contains(problem.Remedy(err), "again") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	report := progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: RecoverSteps})
	if _, err := Recover(t.Context(), RecoverConfig{Dir: o.Dir, Addr: w.addr, Uncompared: true, Report: report}); err != nil {
		t.Errorf("uncompared: %v", err)
	}
}
