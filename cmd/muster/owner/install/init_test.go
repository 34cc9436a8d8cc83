package install

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// trusts makes the folder's admin.conf one that trusts these authorities.
func trusts(t *testing.T, o *ownertest.Lost, list ...ownertest.Authority) {
	t.Helper()
	text, err := o.Read(ownerdir.AdminConf)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := clientcmd.Load(text)
	if err != nil {
		t.Fatal(err)
	}
	conf.Clusters["c"].CertificateAuthorityData = nil
	for _, a := range list {
		conf.Clusters["c"].CertificateAuthorityData = append(conf.Clusters["c"].CertificateAuthorityData, ownertest.PEMOf(a.Cert)...)
	}
	if text, err = clientcmd.Write(*conf); err != nil {
		t.Fatal(err)
	}
	if err := access.WriteAdminConf(o.Dir, text); err != nil {
		t.Fatal(err)
	}
}

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
			f := ownertest.ServeFirst(t, tt.machine, ownertest.Succeed(tt.machine, ownertest.Kubeconfig(t), nil))
			if tt.policy == nil {
				tt.policy = policy
			}
			o := ownertest.Own(t, f, ownertest.Endpoint(), tt.policy)
			err := machine(t, o)
			if got := rpc.ReasonFrom(err); got != tt.want {
				t.Errorf("got %s: %v", attest.ReasonName(got), err)
			}
			if err == nil || !strings.Contains(err.Error(), tt.say) {
				t.Errorf("%v does not say %q", err, tt.say)
			}
			if problem.Explain(err).Remedy == "" {
				t.Error("nobody says what to do")
			}
			if n := len(f.Calls()); n != 0 {
				t.Errorf("%d requests were sent", n)
			}
			if s := o.Cluster().Stage; s != ownerdir.StagePrepared {
				t.Errorf("stage %s", s)
			}
		})
	}
	t.Run("and the good one is served", func(t *testing.T) {
		f := ownertest.ServeFirst(t, good, ownertest.Succeed(good, ownertest.Kubeconfig(t), nil))
		o := ownertest.Own(t, f, ownertest.Endpoint(), policy)
		if err := machine(t, o); err != nil {
			t.Fatal(err)
		}
		c := o.Cluster()
		if c.Stage != ownerdir.StageInitialized || c.FirstMachine.ID != good.ID() || c.ClusterID != o.ClusterID().String() || c.FirstMachine.NodeName != "node1" || !maps.Equal(c.ControlPlanes, map[string]attest.MachineID{"node1": good.ID()}) {
			t.Errorf("%+v", c)
		}
		if o.Leaks([]byte(o.Out.String())) {
			t.Error("a secret was reported (K3)")
		}
	})
}

func TestALostConnectionIsResumed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m)
	lose := func(req *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
		m.LockTo(ownertest.ClusterIDOf(req))
		err := send(&initv1.InitResponse{Message: &initv1.InitResponse_Progress{Progress: &initv1.Progress{Phase: initv1.Phase_PHASE_LOCKED, Text: "locked"}}})
		f.Drop()
		return err
	}
	again := func(_ *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
		f.Drop()
		return errors.Join(send(&initv1.InitResponse{}))
	}
	f.Answers = []ownertest.Answer{lose, again, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil)}
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	if err := machine(t, o); err != nil {
		t.Fatal(err)
	}
	calls := f.Calls()
	if len(calls) != 3 {
		t.Fatalf("%d calls", len(calls))
	}
	for _, c := range calls {
		if string(c.GetIdempotencyKey()) != string(o.Secrets.IdempotencyKey[:]) || string(c.GetRootSecret()) != string(o.Secrets.Root[:]) {
			t.Error("a call asked for something else")
		}
	}
	if o.Cluster().Stage != ownerdir.StageInitialized {
		t.Errorf("stage %s", o.Cluster().Stage)
	}
}

// stop interrupts init after its first call, with the machine locked to the cluster.
func stop(m *attesttest.Machine) ownertest.Answer {
	return func(req *initv1.InitRequest, _ func(*initv1.InitResponse) error) error {
		m.LockTo(ownertest.ClusterIDOf(req))
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "the disk is full")
	}
}

func TestAnotherRunGoesOnWithTheSameMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m, stop(m), ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	err := machine(t, o)
	if p := problem.Explain(err); p.Reason != "KUBEADM_FAILED" || !strings.Contains(p.Message, "the disk is full") || p.Remedy == "" {
		t.Fatalf("%+v", p)
	}
	if err := machine(t, o); err != nil {
		t.Fatal(err)
	}
	if n := len(f.Calls()); n != 2 {
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
			f := ownertest.ServeFirst(t, m, stop(m))
			o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			if err := machine(t, o); err == nil {
				t.Fatal("no error")
			}
			other := ownertest.ServeFirst(t, swap(t, m), ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
			cfg := config(o)
			cfg.DialContext = dialTo(other.Addr)
			i := &initializer{InitConfig: cfg}
			if err := i.load(); err != nil {
				t.Fatal(err)
			}
			err := i.machine(t.Context())
			if r := rpc.ReasonFrom(err); r != attestv1.Reason_REASON_POLICY_REFUSED && r != attestv1.Reason_REASON_LOCK_FOREIGN {
				t.Errorf("got %v", err)
			}
			if problem.Explain(err).Remedy == "" {
				t.Error("nobody says what to do")
			}
			if n := len(other.Calls()); n != 0 {
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
			f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), change))
			o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			err := machine(t, o)
			if p := problem.Explain(err); p.Reason != "REQUEST_INVALID" || !strings.Contains(p.Remedy, "Don't use this cluster") {
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
	refuse := func(r attestv1.Reason, after time.Duration) ownertest.Answer {
		return func(*initv1.InitRequest, func(*initv1.InitResponse) error) error {
			return attest.RefuseFor(after, r, "so it is")
		}
	}
	for name, tt := range map[string]struct {
		first ownertest.Answer
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
			f := ownertest.ServeFirst(t, m, tt.first, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
			o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			err := machine(t, o)
			if got := rpc.ReasonFrom(err); got != tt.want {
				t.Errorf("got %v", err)
			}
			if n := len(f.Calls()); n != tt.calls {
				t.Errorf("%d calls, want %d", n, tt.calls)
			}
		})
	}
}

func TestAMachineThatIsNotUpYetIsWaitedFor(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	cfg, tries := config(o), 0
	dial := dialTo(f.Addr)
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
	if !strings.Contains(o.Out.String(), "waiting for the machine") {
		t.Errorf("nothing was said:\n%s", o.Out)
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
			f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
			l, open := ownertest.Listen(t), &atomic.Bool{}
			ownertest.Serve(t, l, m.Attester(attest.PurposeMachine), rpc.Serve(initv1connect.MachineServiceName, initv1connect.MachineServiceHandler(opening{tt.status, open}), initv1connect.NewMachineServiceHandler))
			o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			cfg := config(o)
			cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if open.Load() {
					return dialTo(f.Addr)(ctx, network, addr)
				}
				return dialTo(l.Addr().String())(ctx, network, addr)
			}
			i := &initializer{InitConfig: cfg}
			if err := i.load(); err != nil {
				t.Fatal(err)
			}
			err := i.machine(t.Context())
			if !tt.waits {
				if p := problem.Explain(err); rpc.ReasonFrom(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(p.Remedy, "muster recover 127.0.0.1 --directory "+o.Path()) {
					t.Errorf("%v: %+v", err, p)
				}
				if n := len(f.Calls()); n != 0 {
					t.Errorf("%d inits were asked for", n)
				}
				err = i.machine(t.Context()) // the same command again, once the disk is open
			}
			if n := len(f.Calls()); err != nil || n != 1 {
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

// isShut checks that a restore ends only if one API server shows all of that.
func isShut(ctx context.Context, t *testing.T, l *ownertest.Lifecycle, i *initializer, kube *clusterapi.Client, m *backup.Manifest, known *ownerdir.Known) {
	t.Helper()
	want := func(names ...string) {
		t.Helper()
		seen, err := access.ReadState(ctx, kube)
		if err != nil {
			t.Fatal(err)
		}
		if got := i.notShut(seen, m, known); !slices.Equal(got, names) {
			t.Errorf("not shut out: %q, want %q", got, names)
		}
	}
	want("restored") // another API server answers
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "restored"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{0xf1}.String(), Role: v1alpha1.RoleControlPlane}}
	if err := ownertest.Shared.Client.Create(ctx, n); err != nil {
		t.Fatal(err)
	}
	want()
	// A later run leaves alone what has joined since.
	if _, err := i.banAgain(ctx, kube, m, known); err != nil || ownertest.Listed(t).Entry("restored").Revoked != nil {
		t.Errorf("%+v, %v", ownertest.Listed(t).Entry("restored"), err)
	}
	e := &v1alpha1.AttestedNode{}
	if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: "stolen"}, e); err != nil {
		t.Fatal(err)
	}
	e.Spec.Banned = false
	if err := ownertest.Shared.Client.Update(ctx, e); err != nil {
		t.Fatal(err)
	}
	want("stolen")
}

// restoreOn restores by the connections that dial opens, the first with number 1.
func restoreOn(t *testing.T, o *ownertest.Owned, m *backup.Manifest, known *ownerdir.Known, dial func(connection int) string) error {
	t.Helper()
	c := o.Cluster()
	c.Restore = &ownerdir.Restore{SHA256: "0"}
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	cfg, n := config(o), 0
	cfg.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		n++
		return (&net.Dialer{}).DialContext(ctx, network, dial(n))
	}
	i := &initializer{InitConfig: cfg, backup: &initv1.Backup{}}
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	return i.restoreOn(ctx, m, known)
}

// config is an InitConfig that reports into o.out.
func config(o *ownertest.Owned) InitConfig {
	return InitConfig{
		Dir: o.Dir, Log: slog.New(slog.DiscardHandler),
		Report: progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: Steps}),
	}
}

// machine runs the part of Init that talks to the first machine.
func machine(t *testing.T, o *ownertest.Owned) error {
	t.Helper()
	i := &initializer{InitConfig: config(o)}
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	return i.machine(ctx)
}
