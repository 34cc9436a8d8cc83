package owner

import (
	"context"
	"encoding/hex"
	"errors"
	"maps"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

func hexOf(b []byte) []byte { return hex.AppendEncode(nil, b) }

// succeed acts as a machine: it locks itself to the cluster and returns its result, which change may make wrong.
func succeed(m *attesttest.Machine, kubeconfig []byte, change func(*initv1.InitResult)) answer {
	return func(req *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
		id := clusterIDOf(req)
		if !locked(m) {
			m.LockTo(id)
		}
		err := send(&initv1.InitResponse{Message: &initv1.InitResponse_Progress{Progress: &initv1.Progress{Phase: initv1.Phase_PHASE_KUBEADM, Text: "kubeadm init"}}})
		if err != nil {
			return err
		}
		machine := m.ID()
		r := &initv1.InitResult{
			Kubeconfig: kubeconfig, ClusterId: id[:], MachineId: machine[:], NodeName: "node1",
			DiskId: "0191e0a8-7b1c-7000-8000-0123456789ab", Addresses: []string{"192.168.77.11"},
		}
		if change != nil {
			change(r)
		}
		return send(&initv1.InitResponse{Message: &initv1.InitResponse_Result{Result: r}})
	}
}

func clusterIDOf(req *initv1.InitRequest) keys.ClusterID {
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetRootSecret(), req.GetSalt())
	if err != nil {
		return keys.ClusterID{}
	}
	return root.ClusterID([32]byte(req.GetMeasurementSalt()))
}

func locked(m *attesttest.Machine) bool {
	for _, b := range m.PCRs()[attest.LockPCR] {
		if b != 0 {
			return true
		}
	}
	return false
}

func kubeconfig(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile(shared.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func endpoint() string { return strings.TrimPrefix(shared.Admin.Host, "https://") }

// A6: the verdict on the machine comes first, and nothing is sent without it.
func TestAMachineThatIsRefusedIsSentNothing(t *testing.T) {
	ca := attesttest.NewCA(t)
	good := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := attesttest.Policy(t, ca, []*attesttest.Machine{good})
	lockedMachine := attesttest.NewMachine(t, ca, attesttest.Options{})
	lockedMachine.LockTo([32]byte{9})
	for name, tt := range map[string]struct {
		machine *attesttest.Machine
		policy  []byte
		want    attestv1.Reason
		say     string
	}{
		"another image": {
			machine: attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"}), want: attestv1.Reason_REASON_POLICY_REFUSED, say: "PCR 4",
		},
		"a TPM that no listed root certifies": {
			machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), want: attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"a machine of another cluster": {
			machine: lockedMachine, want: attestv1.Reason_REASON_LOCK_FOREIGN,
		},
		"a machine that the owner did not list": {
			machine: attesttest.NewMachine(t, ca, attesttest.Options{}), want: attestv1.Reason_REASON_POLICY_REFUSED,
			policy: attesttest.Policy(t, ca, []*attesttest.Machine{good}, func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{good.ID().String()} }),
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := serveFirst(t, tt.machine, succeed(tt.machine, kubeconfig(t), nil))
			if tt.policy == nil {
				tt.policy = policy
			}
			o := own(t, f, endpoint(), tt.policy)
			err := o.machine(t)
			if got := rpc.ReasonFrom(err); got != tt.want {
				t.Errorf("got %s: %v", attest.ReasonName(got), err)
			}
			if err == nil || !strings.Contains(err.Error(), tt.say) {
				t.Errorf("%v does not say %q", err, tt.say)
			}
			if Explain(err).Remedy == "" {
				t.Error("nobody says what to do")
			}
			if n := len(f.calls()); n != 0 {
				t.Errorf("%d requests were sent", n)
			}
			if s := o.Cluster().Stage; s != ownerdir.StagePrepared {
				t.Errorf("stage %s", s)
			}
		})
	}
	t.Run("and the good one is served", func(t *testing.T) {
		f := serveFirst(t, good, succeed(good, kubeconfig(t), nil))
		o := own(t, f, endpoint(), policy)
		if err := o.machine(t); err != nil {
			t.Fatal(err)
		}
		c := o.Cluster()
		if c.Stage != ownerdir.StageInitialized || c.FirstMachine.ID != good.ID() || c.ClusterID != o.clusterID().String() || c.FirstMachine.NodeName != "node1" || !maps.Equal(c.ControlPlanes, map[string]attest.MachineID{"node1": good.ID()}) {
			t.Errorf("%+v", c)
		}
		if o.leaks([]byte(o.out.String())) {
			t.Error("a secret was reported (K3)")
		}
	})
}

func TestALostConnectionIsResumed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := serveFirst(t, m)
	lose := func(req *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
		m.LockTo(clusterIDOf(req))
		err := send(&initv1.InitResponse{Message: &initv1.InitResponse_Progress{Progress: &initv1.Progress{Phase: initv1.Phase_PHASE_LOCKED, Text: "locked"}}})
		f.drop()
		return err
	}
	again := func(_ *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
		f.drop()
		return errors.Join(send(&initv1.InitResponse{}))
	}
	f.answers = []answer{lose, again, succeed(m, kubeconfig(t), nil)}
	o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	if err := o.machine(t); err != nil {
		t.Fatal(err)
	}
	calls := f.calls()
	if len(calls) != 3 {
		t.Fatalf("%d calls", len(calls))
	}
	for _, c := range calls {
		if string(c.GetIdempotencyKey()) != string(o.secrets.IdempotencyKey[:]) || string(c.GetRootSecret()) != string(o.secrets.Root[:]) {
			t.Error("a call asked for something else")
		}
	}
	if o.Cluster().Stage != ownerdir.StageInitialized {
		t.Errorf("stage %s", o.Cluster().Stage)
	}
}

// stop interrupts init after its first call, with the machine locked to the cluster.
func stop(m *attesttest.Machine) answer {
	return func(req *initv1.InitRequest, _ func(*initv1.InitResponse) error) error {
		m.LockTo(clusterIDOf(req))
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "the disk is full")
	}
}

func TestAnotherRunGoesOnWithTheSameMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := serveFirst(t, m, stop(m), succeed(m, kubeconfig(t), nil))
	o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	err := o.machine(t)
	if p := Explain(err); p.Reason != "KUBEADM_FAILED" || !strings.Contains(p.Message, "the disk is full") || p.Remedy == "" {
		t.Fatalf("%+v", p)
	}
	if err := o.machine(t); err != nil {
		t.Fatal(err)
	}
	if n := len(f.calls()); n != 2 {
		t.Errorf("%d calls", n)
	}
}

// Once a machine may hold the secrets, no other machine receives them, nor does the same one after it joined another
// cluster.
func TestAnotherRunRefusesAnotherMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, swap := range map[string]func(t *testing.T, m *attesttest.Machine) *attesttest.Machine{
		"one that the policy accepts": func(t *testing.T, _ *attesttest.Machine) *attesttest.Machine {
			return attesttest.NewMachine(t, ca, attesttest.Options{})
		},
		"the same one, locked to another cluster": func(_ *testing.T, m *attesttest.Machine) *attesttest.Machine {
			m.Reboot()
			m.LockTo([32]byte{9})
			return m
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := serveFirst(t, m, stop(m))
			o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			if err := o.machine(t); err == nil {
				t.Fatal("no error")
			}
			other := serveFirst(t, swap(t, m), succeed(m, kubeconfig(t), nil))
			cfg := o.config()
			cfg.DialContext = dialTo(other.addr)
			i := &initializer{InitConfig: cfg}
			if err := i.load(); err != nil {
				t.Fatal(err)
			}
			err := i.machine(t.Context())
			if r := rpc.ReasonFrom(err); r != attestv1.Reason_REASON_POLICY_REFUSED && r != attestv1.Reason_REASON_LOCK_FOREIGN {
				t.Errorf("got %v", err)
			}
			if Explain(err).Remedy == "" {
				t.Error("nobody says what to do")
			}
			if n := len(other.calls()); n != 0 {
				t.Errorf("%d requests were sent", n)
			}
		})
	}
}

func TestAResultThatDoesNotFitIsRefused(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, change := range map[string]func(*initv1.InitResult){
		"another machine's ID": func(r *initv1.InitResult) { r.MachineId = make([]byte, 32) },
		"another cluster's ID": func(r *initv1.InitResult) { r.ClusterId = make([]byte, 32) },
		"no cluster ID":        func(r *initv1.InitResult) { r.ClusterId = nil },
		"a name that is none":  func(r *initv1.InitResult) { r.NodeName = "../node1" },
		"a disk that is none":  func(r *initv1.InitResult) { r.DiskId = "disk" },
		"no address":           func(r *initv1.InitResult) { r.Addresses = nil },
		"an address with zone": func(r *initv1.InitResult) { r.Addresses = []string{"fe80::1%eth0"} },
		"no kubeconfig":        func(r *initv1.InitResult) { r.Kubeconfig = nil },
		"a kubeconfig that runs a program": func(r *initv1.InitResult) {
			r.Kubeconfig = []byte(strings.Replace(string(r.GetKubeconfig()), "  user:\n", "  user:\n    exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, interactiveMode: Never}\n", 1))
		},
		"a kubeconfig for another server": func(r *initv1.InitResult) {
			r.Kubeconfig = []byte(strings.Replace(string(r.GetKubeconfig()), "https://127.0.0.1", "https://127.0.0.2", 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := serveFirst(t, m, succeed(m, kubeconfig(t), change))
			o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			err := o.machine(t)
			if p := Explain(err); p.Reason != "REQUEST_INVALID" || !strings.Contains(p.Remedy, "Don't use this cluster") {
				t.Errorf("%+v", p)
			}
			if o.Cluster().Stage != ownerdir.StageRequested {
				t.Errorf("stage %s", o.Cluster().Stage)
			}
			if _, err := os.Stat(o.File(ownerdir.AdminConf)); err == nil {
				t.Error("the kubeconfig was kept")
			}
		})
	}
}

func TestWhatIsTriedAgain(t *testing.T) {
	ca := attesttest.NewCA(t)
	refuse := func(r attestv1.Reason, after time.Duration) answer {
		return func(*initv1.InitRequest, func(*initv1.InitResponse) error) error {
			return attest.RefuseFor(after, r, "so it is")
		}
	}
	for name, tt := range map[string]struct {
		first answer
		calls int
		want  attestv1.Reason
	}{
		"a wrong init secret is told once":  {refuse(attestv1.Reason_REASON_INIT_SECRET_INVALID, 0), 1, attestv1.Reason_REASON_INIT_SECRET_INVALID},
		"a locked machine is left":          {refuse(attestv1.Reason_REASON_NODE_LOCKED, 0), 1, attestv1.Reason_REASON_NODE_LOCKED},
		"a fault of the machine is told":    {refuse(attestv1.Reason_REASON_INTERNAL, 0), 1, attestv1.Reason_REASON_INTERNAL},
		"a machine that is not ready waits": {refuse(attestv1.Reason_REASON_NOT_READY, 0), 2, attestv1.Reason_REASON_ACCEPTED},
		"a hint is followed":                {refuse(attestv1.Reason_REASON_COMPONENT_UNAVAILABLE, time.Millisecond), 2, attestv1.Reason_REASON_ACCEPTED},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := serveFirst(t, m, tt.first, succeed(m, kubeconfig(t), nil))
			o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			err := o.machine(t)
			if got := rpc.ReasonFrom(err); got != tt.want {
				t.Errorf("got %v", err)
			}
			if n := len(f.calls()); n != tt.calls {
				t.Errorf("%d calls, want %d", n, tt.calls)
			}
		})
	}
}

func TestAMachineThatIsNotUpYetIsWaitedFor(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := serveFirst(t, m, succeed(m, kubeconfig(t), nil))
	o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	cfg, tries := o.config(), 0
	dial := dialTo(f.addr)
	cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if tries++; tries < 3 {
			return nil, errors.New("no route to host")
		}
		return dial(ctx, network, addr)
	}
	i := &initializer{InitConfig: cfg}
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	if err := i.machine(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(o.out.String(), "waiting for the machine") {
		t.Errorf("nothing was said:\n%s", o.out)
	}
}

// opening is `bootstrapper unlock`, which serves no init, and exits after a request.
type opening struct {
	status *initv1.GetStatusResponse
	done   *atomic.Bool
}

func (o opening) GetStatus(context.Context, *initv1.GetStatusRequest) (*initv1.GetStatusResponse, error) {
	o.done.Store(true)
	return o.status, nil
}

func TestAMachineWhoseStateDiskIsNotOpenIsWaitedForOrRecovered(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, tt := range map[string]struct {
		status *initv1.GetStatusResponse
		waits  bool
	}{
		"it formats its disk":                         {&initv1.GetStatusResponse{Phase: initv1.Phase_PHASE_FORMATTING}, true},
		"it has just booted":                          {&initv1.GetStatusResponse{Phase: initv1.Phase_PHASE_UNLOCKING}, true},
		"it was made in half, and nobody has its key": {&initv1.GetStatusResponse{Phase: initv1.Phase_PHASE_UNLOCKING, LastReason: attestv1.Reason_REASON_NOT_READY}, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := serveFirst(t, m, succeed(m, kubeconfig(t), nil))
			l, open := listen(t), &atomic.Bool{}
			serve(t, l, m.Attester(attest.PurposeMachine), rpc.Serve(initv1connect.MachineServiceName, initv1connect.MachineServiceHandler(opening{tt.status, open}), initv1connect.NewMachineServiceHandler))
			o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			cfg := o.config()
			cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if open.Load() {
					return dialTo(f.addr)(ctx, network, addr)
				}
				return dialTo(l.Addr().String())(ctx, network, addr)
			}
			i := &initializer{InitConfig: cfg}
			if err := i.load(); err != nil {
				t.Fatal(err)
			}
			err := i.machine(t.Context())
			if !tt.waits {
				if p := Explain(err); rpc.ReasonFrom(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(p.Remedy, "muster recover 127.0.0.1 --directory "+o.Path()) {
					t.Errorf("%v: %+v", err, p)
				}
				if n := len(f.calls()); n != 0 {
					t.Errorf("%d inits were asked for", n)
				}
				err = i.machine(t.Context()) // the same command again, once the disk is open
			}
			if n := len(f.calls()); err != nil || n != 1 {
				t.Errorf("%d calls, %v", n, err)
			}
		})
	}
}

func TestEveryPhaseHasAName(t *testing.T) {
	for n, name := range initv1.Phase_name {
		if p := initv1.Phase(n); p != initv1.Phase_PHASE_UNSPECIFIED && phases[p] == "" {
			t.Errorf("%s has no name in the owner's report", name)
		}
	}
}
