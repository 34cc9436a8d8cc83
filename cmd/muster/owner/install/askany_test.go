package install

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// network connects addresses of machines to the joinservices of a test, and records who was dialed.
type network struct {
	sync.Mutex

	at     map[string]string
	dialed []string
}

func (n *network) dial(ctx context.Context, proto, addr string) (net.Conn, error) {
	n.Lock()
	n.dialed = append(n.dialed, addr)
	n.Unlock()
	if to, ok := n.at[addr]; ok {
		addr = to
	}
	return (&net.Dialer{}).DialContext(ctx, proto, addr)
}

// joins runs a joinservice on a machine of the cluster at this address.
func (n *network) joins(t *testing.T, o *ownertest.Owned, m *attesttest.Machine, addr string) server {
	t.Helper()
	m.LockTo(o.ClusterID())
	join := ownertest.Listen(t)
	ownertest.Serve(t, join, m.Attester(attest.PurposeJoinservice), rpc.Serve(joinv1connect.JoinServiceName,
		joinv1connect.JoinServiceHandler(joinv1connect.UnimplementedJoinServiceHandler{}), joinv1connect.NewJoinServiceHandler))
	if n.at == nil {
		n.at = map[string]string{}
	}
	n.at[addr] = join.Addr().String()
	return server{addr, m.ID()}
}

func initializerOf(t *testing.T, o *ownertest.Owned, n *network) *initializer {
	t.Helper()
	i := &initializer{InitConfig: config(o)}
	i.DialContext = n.dial
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	return i
}

// updated calls do when a step reports what it waits for.
type updated struct {
	progress.Reporter
	do func()
}

func (u updated) Update(string) { u.do() }

func TestARefusedJoinserviceDoesNotHideAGoodOne(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ca := attesttest.NewCA(t)
	tampered, good := attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"}), attesttest.NewMachine(t, ca, attesttest.Options{})
	o := ownertest.Own(t, ownertest.ServeFirst(t, good), "k8s.example:6443", attesttest.Policy(t, ca, []*attesttest.Machine{good}, attesttest.ControlPlanes(tampered, good)))
	n := &network{}
	i := initializerOf(t, o, n)
	bad, fine := n.joins(t, o, tampered, "192.168.77.11:30090"), n.joins(t, o, good, "192.168.77.12:30090")
	if at, err := i.askAny(ctx, []server{bad, fine}); err != nil || at != fine.addr {
		t.Errorf("%q, %v", at, err)
	}
	n.dialed = nil
	if _, err := i.askAny(ctx, []server{bad, {addr: bad.addr, machine: good.ID()}}); problem.Explain(err).Reason != "POLICY_REFUSED" || !strings.Contains(err.Error(), bad.addr) || len(n.dialed) != 2 {
		t.Errorf("both are refused, after dialing %v: %v", n.dialed, err)
	}
	// The one that does not answer may be the good one, so it is asked until the end; then both are named.
	gone, end := context.WithCancel(ctx)
	i.Report = updated{i.Report, end}
	n.at["192.168.77.13:30090"] = "127.0.0.1:1"
	if _, err := i.askAny(gone, []server{bad, {addr: "192.168.77.13:30090", machine: good.ID()}}); err == nil || !strings.Contains(err.Error(), bad.addr) || !strings.Contains(err.Error(), "192.168.77.13") {
		t.Errorf("one is refused, and one does not answer: %v", err)
	}
}

// A7: the first machine may have left the owner's list since.
func TestAFirstMachineThatIsNotListedIsNotAsked(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ca := attesttest.NewCA(t)
	first, other := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	o := ownertest.Own(t, ownertest.ServeFirst(t, first), ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{first}, attesttest.ControlPlanes(other)))
	c := o.Cluster()
	c.Stage, c.FirstMachine = ownerdir.StageInstalled, &ownerdir.Machine{ID: first.ID(), NodeName: "node1", Addresses: []string{"192.168.77.11"}}
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	n := &network{}
	n.joins(t, o, first, "192.168.77.11:30090")
	want := n.joins(t, o, other, "192.168.77.12:30090")
	for name, m := range map[string]*attesttest.Machine{"node1": first, "node2": other} {
		if _, err := kube.Enroll(ctx, name, v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane}, keys.DiskSalt{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ownertest.Unenroll(context.WithoutCancel(ctx), name) })
	}
	add(t, "node2")
	node := &corev1.Node{}
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "node2"}, node); err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.77.12"}}
	if err := ownertest.Shared.Client.Status().Update(ctx, node); err != nil {
		t.Fatal(err)
	}
	if at, err := initializerOf(t, o, n).anyJoinservice(ctx, kube); err != nil || at != want.addr || len(n.dialed) != 1 {
		t.Errorf("%q, %v, after dialing %v", at, err, n.dialed)
	}
}
