// Package servicetest builds the parts of joinservice on a real API server, for tests.
package servicetest

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// Shared is the API server of a package's tests, see [Start].
var Shared *membertest.Cluster

// Start starts the API server, with the chart's objects. It is for kubetest.Verify.
func Start(ctx context.Context) (stop func() error, err error) {
	if Shared, err = membertest.Start(ctx, "../../../deploy/charts/testdata/rendered.yaml"); err != nil {
		return nil, err
	}
	return Shared.Stop, nil
}

// Rooms are the parts of one joinservice, with its rights. They see the API server through informers.
type Rooms struct {
	State    *state.State
	List     *access.List
	Requests *certificates.Requests
	*enroll.Enrollments
}

// New returns the parts of one more joinservice. with is called before the informers run.
func New(t *testing.T, with ...func(*Rooms)) *Rooms {
	t.Helper()
	api, err := Shared.As(t.Context(), clusterinfo.Namespace, "joinservice")
	if err != nil {
		t.Fatal(err)
	}
	c, err := clusterview.Open(api, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	r := &Rooms{}
	if r.State, err = state.New(c, audit.NewStream(t.Output()), slog.New(slog.DiscardHandler), state.DefaultCertificateLife); err != nil {
		t.Fatal(err)
	}
	if r.List, err = access.Watch(r.State); err != nil {
		t.Fatal(err)
	}
	if r.Requests, err = certificates.Watch(r.State, r.List); err != nil {
		t.Fatal(err)
	}
	if r.Enrollments, err = enroll.New(r.State, r.List, r.Requests, enroll.LeaseTimings{Watch: 300 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	for _, change := range with {
		change(r)
	}
	Serve(t, c.Serve)
	if err := c.Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

// Clock is a clock that its test sets.
type Clock struct {
	mu sync.Mutex
	at time.Time
}

// NewClock returns a clock that shows the present time.
func NewClock() *Clock { return &Clock{at: time.Now()} }

// Now returns the time that the clock shows.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

// Pass advances the clock.
func (c *Clock) Pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// Serve runs f until the test ends.
func Serve(t *testing.T, f func(context.Context) error) {
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

// Disks.
const (
	DiskOne = "5f0c95b6-2a3d-4c7e-9f10-000000000001"
	DiskTwo = "5f0c95b6-2a3d-4c7e-9f10-000000000002"
)

// Claim returns the claim of a worker w1 with disk [DiskOne].
func Claim(machine byte) enroll.Claim {
	return enroll.Claim{
		Machine: attest.MachineID{machine}, Node: "w1", Role: v1alpha1.RoleWorker, Disk: DiskOne,
		DiskMode: v1alpha1.DiskModePlain, Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}, Boot: enroll.Boot{Verified: time.Now()},
	}
}

// Ticket returns the status that a ticket with that ID leaves.
func Ticket(id string) v1alpha1.AttestedNodeStatus {
	return v1alpha1.AttestedNodeStatus{
		LastVerdict: &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()},
		Ticket:      &v1alpha1.Ticket{ID: id, IssuedAt: metav1.Now()},
	}
}

// Seen waits until a replica's view of node w1 fits.
func Seen(t *testing.T, k *Rooms, fits func(*v1alpha1.AttestedNode) bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := k.State.Cluster.Nodes.ByName("w1")
		return membertest.Want(n != nil && fits(n), "the replica sees %+v", n)
	})
}

// Holds reports whether an enrollment has that ticket.
func Holds(id string) func(*v1alpha1.AttestedNode) bool {
	return func(n *v1alpha1.AttestedNode) bool { return n.Status.Ticket != nil && n.Status.Ticket.ID == id }
}

// Signed returns the certificate of the ticket with that ID, as far as these tests use it.
func Signed(id string) *x509.Certificate { return &x509.Certificate{Raw: []byte(id)} }

// Join does what the service does for a ticket, without the steps between.
func Join(ctx context.Context, k *Rooms, c enroll.Claim, id string) error {
	e, err := k.Enroll(ctx, c)
	if err != nil {
		return err
	}
	return e.Record(ctx, c, Ticket(id), Signed(id), Signed(id))
}

// Enroll is [Join], and fails the test if that fails.
func Enroll(t *testing.T, k *Rooms, c enroll.Claim, id string) {
	t.Helper()
	if err := Join(t.Context(), k, c, id); err != nil {
		t.Fatal(err)
	}
}

// Half is a ticket that writes its claim and then fails.
func Half(t *testing.T, k *Rooms, c enroll.Claim) *enroll.PendingTicket {
	t.Helper()
	e, err := k.Enroll(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// Ban sets whether w1 is banned.
func Ban(t *testing.T, banned bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := Shared.Node(t, "w1")
		n.Spec.Banned = banned
		return Shared.Client.Update(t.Context(), n)
	})
}

// Suspend writes the list, not through a replica.
func Suspend(t *testing.T, node string, off bool) {
	t.Helper()
	Shared.SetAccess(t, node, func(e nodeaccess.Entry) nodeaccess.Entry {
		e.Suspended = off
		return e
	})
}

// Suspended reports whether the node may write nothing.
func Suspended(t *testing.T, node string) bool {
	t.Helper()
	return Shared.Access(t).Entry(node).Suspended
}

// Revoked returns the list's entry of a name whose present certificates are revoked.
func Revoked(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{}.Revoke(time.Now()) }

// Stays fails the test unless w1 has that ticket and may write.
func Stays(t *testing.T, id string) {
	t.Helper()
	if n := Shared.Node(t, "w1"); n == nil || !Holds(id)(n) || Suspended(t, "w1") {
		t.Errorf("enrollment %+v, suspended: %t; want it to stay for ticket %s", n, Suspended(t, "w1"), id)
	}
}

// Gone fails the test if the enrollment is left.
func Gone(t *testing.T) {
	t.Helper()
	if n := Shared.Node(t, "w1"); n != nil {
		t.Errorf("left: %+v", n)
	}
}

// ControlPlanes returns the listed control planes.
func ControlPlanes(t *testing.T) []string {
	t.Helper()
	l := Shared.Access(t)
	return slices.DeleteFunc(l.Nodes(), func(node string) bool { return !l.Entry(node).ControlPlane })
}

// Elsewhere is the claim of the same machine at another address.
func Elsewhere(c enroll.Claim) enroll.Claim {
	c.Addresses = []netip.Addr{c.Addresses[0].Next().Next().Next()}
	return c
}

// Before runs a function just before the first update of a list.
type Before struct {
	client.Client
	Once *sync.Once
	Do   func()
}

// Update implements [client.Client].
func (b Before) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	if _, list := o.(*corev1.ConfigMap); list {
		b.Once.Do(b.Do)
	}
	return b.Client.Update(ctx, o, opts...)
}
