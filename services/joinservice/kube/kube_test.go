package kube

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/envtest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

var shared *membertest.Cluster

func TestMain(m *testing.M) {
	envtest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		shared, err = membertest.Start(ctx, "../../../deploy/charts/testdata/rendered.yaml")
		if err != nil {
			return nil, err
		}
		return shared.Stop, nil
	})
}

// replica returns the view of one joinservice, with the rights of a joinservice. Its Enforcer does not run yet.
func replica(t *testing.T, with ...func(*Kube)) (*Kube, *Enforcer) {
	t.Helper()
	api, err := shared.As(t.Context(), clusterinfo.Namespace, "joinservice")
	if err != nil {
		t.Fatal(err)
	}
	c, err := clusterview.Open(api, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	k, err := New(c, audit.NewStream(t.Output()), slog.New(slog.DiscardHandler), DefaultCertificateLife, Leases{Watch: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range with {
		change(k)
	}
	e, err := k.NewEnforcer()
	if err != nil {
		t.Fatal(err)
	}
	serve(t, c.Serve)
	if err := c.Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	return k, e
}

// serve runs f until the test ends.
func serve(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// enforce runs an Enforcer until the test ends, and reports the machines whose connections it cut.
func enforce(t *testing.T, e *Enforcer) <-chan attest.MachineID {
	t.Helper()
	cut := make(chan attest.MachineID, 16)
	serve(t, func(ctx context.Context) error { return e.Serve(ctx, func(m attest.MachineID) { cut <- m }) })
	return cut
}

const (
	diskOne = "5f0c95b6-2a3d-4c7e-9f10-000000000001"
	diskTwo = "5f0c95b6-2a3d-4c7e-9f10-000000000002"
)

func claim(machine byte) Claim {
	return Claim{
		Machine: attest.MachineID{machine}, Node: "w1", Role: v1alpha1.RoleWorker, Disk: diskOne,
		DiskMode: v1alpha1.DiskModePlain, Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}, Boot: Boot{Verified: time.Now()},
	}
}

func ticket(id string) v1alpha1.AttestedNodeStatus {
	return v1alpha1.AttestedNodeStatus{
		LastVerdict: &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()},
		Ticket:      &v1alpha1.Ticket{ID: id, IssuedAt: metav1.Now()},
	}
}

// seen waits until a replica's view of node w1 fits.
func seen(t *testing.T, k *Kube, fits func(*v1alpha1.AttestedNode) bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := k.cluster.Nodes.ByName("w1")
		return membertest.Want(n != nil && fits(n), "the replica sees %+v", n)
	})
}

func holds(id string) func(*v1alpha1.AttestedNode) bool {
	return func(n *v1alpha1.AttestedNode) bool { return n.Status.Ticket != nil && n.Status.Ticket.ID == id }
}

// signed returns the certificate of the ticket with that ID, as far as these tests use it.
func signed(id string) *x509.Certificate { return &x509.Certificate{Raw: []byte(id)} }

// join does what the service does for a ticket, without the steps between.
func join(ctx context.Context, k *Kube, c Claim, id string) error {
	e, err := k.Enroll(ctx, c)
	if err != nil {
		return err
	}
	return e.Record(ctx, c, ticket(id), signed(id), signed(id))
}

func enroll(t *testing.T, k *Kube, c Claim, id string) {
	t.Helper()
	if err := join(t.Context(), k, c, id); err != nil {
		t.Fatal(err)
	}
}

// half is a ticket that writes its claim and then fails.
func half(t *testing.T, k *Kube, c Claim) *Enrollment {
	t.Helper()
	e, err := k.Enroll(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func ban(t *testing.T, banned bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := shared.Node(t, "w1")
		n.Spec.Banned = banned
		return shared.Client.Update(t.Context(), n)
	})
}

// suspend writes the list, not through a replica.
func suspend(t *testing.T, node string, suspended bool) {
	t.Helper()
	shared.SetAccess(t, node, func(e nodeaccess.Entry) nodeaccess.Entry {
		e.Suspended = suspended
		return e
	})
}

// suspended reports whether the node may write nothing.
func suspended(t *testing.T, node string) bool {
	t.Helper()
	return shared.Access(t).Entry(node).Suspended
}

// revoked returns the list's entry of a name whose present certificates are revoked.
func revoked(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{}.Revoke(time.Now()) }

// stays fails the test unless w1 has that ticket and may write.
func stays(t *testing.T, id string) {
	t.Helper()
	if n := shared.Node(t, "w1"); n == nil || !holds(id)(n) || suspended(t, "w1") {
		t.Errorf("enrollment %+v, suspended: %t; want it to stay for ticket %s", n, suspended(t, "w1"), id)
	}
}

// gone fails the test if the enrollment is left.
func gone(t *testing.T) {
	t.Helper()
	if n := shared.Node(t, "w1"); n != nil {
		t.Errorf("left: %+v", n)
	}
}

// hanging is an API server that answers nothing as long as the test runs.
type hanging struct {
	client.Client
	until context.Context // the end of the test
}

func (h hanging) hang(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.until.Done():
		return errors.New("the test is over")
	}
}

func (h hanging) Get(ctx context.Context, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return h.hang(ctx)
}

func (h hanging) Update(ctx context.Context, _ client.Object, _ ...client.UpdateOption) error {
	return h.hang(ctx)
}
