package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/joinservice/joinlease"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// controlPlane is a machine that the owner has enrolled as a control plane, and its request.
type controlPlane struct {
	*attesttest.Machine
	*joinRequest
	joinv1connect.JoinServiceClient
}

// controlMachine returns a machine that the policy lists as a control plane.
func (s *fixture) controlMachine(t *testing.T) *attesttest.Machine {
	t.Helper()
	if len(s.planned) == 0 {
		t.Fatal("the policy lists no more control planes")
	}
	m := s.planned[0]
	s.planned = s.planned[1:]
	return m
}

func (s *fixture) controlPlane(t *testing.T, name, disk, address string) *controlPlane {
	t.Helper()
	m := s.controlMachine(t)
	s.Enroll(t, name, v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane})
	c := &controlPlane{
		Machine: m, JoinServiceClient: s.dial(t, m.Attester(attest.PurposeMachine)),
		joinRequest: worker(t, named(name, disk, address), func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE }),
	}
	return c
}

func (c *controlPlane) ask(t *testing.T) (*joinv1.IssueJoinTicketResponse, error) {
	t.Helper()
	return c.IssueJoinTicket(t.Context(), c.IssueJoinTicketRequest)
}

// ticket asks until joinservice has seen the enrollment.
func (c *controlPlane) ticket(t *testing.T) *joinv1.IssueJoinTicketResponse {
	t.Helper()
	var ticket *joinv1.IssueJoinTicketResponse
	membertest.Eventually(t, func() (err error) { ticket, err = c.ask(t); return err })
	return ticket
}

func (c *controlPlane) renew(t *testing.T, ticket []byte, done bool) (*joinv1.RenewJoinLeaseResponse, error) {
	t.Helper()
	return c.RenewJoinLease(t.Context(), &joinv1.RenewJoinLeaseRequest{TicketId: ticket, Done: done})
}

// renewed is renew that should pass; a refusal because of a slow machine is repeated.
func (c *controlPlane) renewed(t *testing.T, ticket []byte, done bool) (resp *joinv1.RenewJoinLeaseResponse, err error) {
	t.Helper()
	err = patiently(t, func() (err error) { resp, err = c.renew(t, ticket, done); return err })
	return resp, err
}

func (s *fixture) lease(t *testing.T) *coordinationv1.Lease {
	t.Helper()
	l := &coordinationv1.Lease{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: joinlease.Name}, l); err != nil {
		t.Fatal(err)
	}
	return l
}

// mustWait expects a machine's request to be refused in all places, with a pause and without a trace.
func (s *fixture) mustWait(t *testing.T, c *controlPlane, want attestv1.Reason) {
	t.Helper()
	about := []string{"event", "ticket refused", "machine", c.ID().String()}
	places := refusaltest.Places{Metric: []string{"muster_join_tickets_total", "role", "control-plane"}, Log: about, Audit: about}
	err := refusaltest.Refused(t, s.observations(t), want, places, func() error { _, err := c.ask(t); return err })
	if wait := rpc.RetryAfterFrom(err); wait <= 0 || wait > 10*time.Second {
		t.Errorf("it must wait %s", wait)
	}
	if n := s.Node(t, c.GetNodeName()); n.Spec.DiskID != "" || n.Status.Ticket != nil || s.Access(t).Entry(n.Name).ControlPlane {
		t.Errorf("a refused machine was enrolled: %+v", n)
	}
}

// keptFrom expects the renewal or the release of a join Lease to be refused in all places.
func (s *fixture) keptFrom(t *testing.T, c *controlPlane, ticket []byte, done bool, want attestv1.Reason) {
	t.Helper()
	about := []string{"event", "lease refused", "machine", c.ID().String()}
	places := refusaltest.Places{Metric: []string{"muster_join_lease_renewals_total"}, Log: about, Audit: about}
	_ = refusaltest.Refused(t, s.observations(t), want, places, func() error { _, err := c.renew(t, ticket, done); return err })
}

// known waits until joinservice has seen the enrollment.
func (s *fixture) known(t *testing.T, c *controlPlane) {
	t.Helper()
	membertest.Eventually(t, func() error {
		_, err := c.ask(t)
		return membertest.Want(rpc.ReasonFrom(err) != attestv1.Reason_REASON_NOT_ENROLLED, "%v", err)
	})
}

// Invariant J8.
func TestControlPlanesJoinOneAfterAnother(t *testing.T) {
	s := setUp(t)
	two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
	three := s.controlPlane(t, "cp3", disk2, "192.168.77.13")
	ticket := two.ticket(t)
	if life := ticket.GetLeaseLifetime().AsDuration(); life != joinlease.Life {
		t.Errorf("the turn lasts %s", life)
	}
	if got := ticket.GetControlPlaneAddresses(); len(got) != 1 || got[0] != "192.168.77.11" {
		t.Errorf("other control planes: %v", got)
	}
	l := s.lease(t)
	if want := two.ID().String() + "/cp2"; *l.Spec.HolderIdentity != want || *l.Spec.LeaseDurationSeconds != int32(joinlease.Life/time.Second) {
		t.Errorf("lease %+v, want %s", l.Spec, want)
	}
	s.lasts(t, 600, 0) // longer than the following steps take
	s.known(t, three)
	s.mustWait(t, three, attestv1.Reason_REASON_CONTROL_PLANE_BUSY)
	var again *joinv1.IssueJoinTicketResponse
	err := patiently(t, func() (err error) { again, err = two.ask(t); return err })
	if err != nil || bytes.Equal(again.GetTicketId(), ticket.GetTicketId()) {
		t.Fatalf("the same machine does not get it again: %v", err)
	}
	ticket = again
	s.lasts(t, 600, 0)
	t.Run("a worker does not wait", func(t *testing.T) {
		w := s.ticketFor(t, s.machine(t), worker(t, named("w4", "5f0c95b6-2a3d-4c7e-9f10-000000000004", "192.168.77.14")))
		if w.GetLeaseLifetime() != nil || len(w.GetControlPlaneAddresses()) > 0 {
			t.Errorf("a worker has a turn: %v", w)
		}
	})
	t.Run("its machine renews it on another connection", func(t *testing.T) {
		before := s.lease(t).Spec.RenewTime
		two.LockTo(s.ID) // as it is at this point
		resp, err := two.renewed(t, ticket.GetTicketId(), false)
		if err != nil || resp.GetLifetime().AsDuration() != joinlease.Life {
			t.Fatalf("%v %v", resp, err)
		}
		if !before.Before(s.lease(t).Spec.RenewTime) {
			t.Error("it was not renewed")
		}
		s.lasts(t, 600, 0)
	})
	t.Run("no other machine renews or ends it", func(t *testing.T) {
		for name, tt := range map[string]struct {
			caller *controlPlane
			id     []byte
			want   attestv1.Reason
		}{
			"another machine":              {three, ticket.GetTicketId(), attestv1.Reason_REASON_CONTROL_PLANE_BUSY},
			"with another ticket":          {two, make([]byte, 16), attestv1.Reason_REASON_TICKET_UNKNOWN},
			"with an ID of another length": {two, ticket.GetTicketId()[1:], attestv1.Reason_REASON_TICKET_UNKNOWN},
		} {
			for _, done := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, done %t", name, done), func(t *testing.T) { s.keptFrom(t, tt.caller, tt.id, done, tt.want) })
			}
		}
		s.mustWait(t, three, attestv1.Reason_REASON_CONTROL_PLANE_BUSY)
	})
	t.Run("its end lets the next one in", func(t *testing.T) {
		if _, err := two.renewed(t, ticket.GetTicketId(), true); err != nil {
			t.Fatal(err)
		}
		if !s.recorded(t, func(r audit.Record) bool {
			return r.Event == "turn ended" && r.Ticket == hex.EncodeToString(ticket.GetTicketId()) && r.Node == "cp2" && r.Reason == "ACCEPTED"
		}) {
			t.Error("no record")
		}
		if _, err := two.renew(t, ticket.GetTicketId(), false); rpc.ReasonFrom(err) != attestv1.Reason_REASON_TICKET_UNKNOWN {
			t.Errorf("it was renewed after its end: %v", err)
		}
		next := three.ticket(t)
		s.lasts(t, 600, 0)
		if got := next.GetControlPlaneAddresses(); len(got) != 2 {
			t.Errorf("other control planes: %v", got)
		}
		if n := *s.lease(t).Spec.LeaseTransitions; n != 2 {
			t.Errorf("%d transitions", n)
		}
		s.busyAgain(t, two)
	})
}

// busyAgain is for a machine that is a control plane already.
func (s *fixture) busyAgain(t *testing.T, c *controlPlane) {
	t.Helper()
	if _, err := c.ask(t); rpc.ReasonFrom(err) != attestv1.Reason_REASON_CONTROL_PLANE_BUSY {
		t.Errorf("%v, want CONTROL_PLANE_BUSY", err)
	}
}

// joinservice measures how long it has seen no change, by its own clock: times in the Lease by another machine's clock end
// it neither early nor late (J8).
func TestATurnThatIsNotRenewedRunsOut(t *testing.T) {
	for name, off := range map[string]time.Duration{"its clock is 3 h behind": -3 * time.Hour, "its clock is 3 h ahead": 3 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t)
			two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
			three := s.controlPlane(t, "cp3", disk2, "192.168.77.13")
			ticket := two.ticket(t)
			s.lasts(t, 600, off) // longer than the following steps take
			began := time.Now()
			s.known(t, three)
			s.busyAgain(t, three)
			renewed := time.Now()
			s.lasts(t, 3, off) // a renewal: the wait starts again when joinservice has seen it
			membertest.Eventually(t, func() error {
				_, err := three.ask(t)
				if err != nil && rpc.ReasonFrom(err) != attestv1.Reason_REASON_CONTROL_PLANE_BUSY && !tooSlow(err) {
					t.Errorf("%v, want CONTROL_PLANE_BUSY until it is its turn", err)
				}
				return err
			})
			if waited := time.Since(renewed); waited < 3*time.Second {
				t.Errorf("it went to another machine after %s (%s after it was taken)", waited, time.Since(began))
			}
			if !s.join.Logged("level", "WARN", "lease", joinlease.Name, "from", two.ID().String()+"/cp2") {
				t.Error("the log does not say that a turn was lost")
			}
			if _, err := two.renew(t, ticket.GetTicketId(), false); rpc.ReasonFrom(err) != attestv1.Reason_REASON_CONTROL_PLANE_BUSY {
				t.Errorf("the machine that lost it: %v, want CONTROL_PLANE_BUSY", err)
			}
		})
	}
}

// lasts renews the join Lease as its machine's joinservice does, for that many seconds by a clock that is off.
func (s *fixture) lasts(t *testing.T, seconds int32, off time.Duration) {
	t.Helper()
	l, now := s.lease(t), metav1.NewMicroTime(time.Now().Add(off))
	l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = &now, &seconds
	if err := s.Client.Update(t.Context(), l); err != nil {
		t.Fatal(err)
	}
}

func TestATurnEndsWithItsTicket(t *testing.T) {
	free := func(t *testing.T, s *fixture) {
		t.Helper()
		if l := s.lease(t); l.Spec.HolderIdentity != nil {
			t.Errorf("%s still has its turn", *l.Spec.HolderIdentity)
		}
	}
	t.Run("returned", func(t *testing.T) {
		s := setUp(t)
		two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
		s.returned(t, two.Machine, two.ticket(t))
		free(t, s)
	})
	t.Run("failed", func(t *testing.T) {
		s := setUp(t)
		two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
		ticket := two.ticket(t)
		if _, err := two.renewed(t, ticket.GetTicketId(), true); err != nil {
			t.Fatal(err)
		}
		s.mayNotApprove(t)
		membertest.Eventually(t, func() error {
			_, err := two.ask(t)
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_API_UNAVAILABLE, "%v, want API_UNAVAILABLE", err)
		})
		free(t, s)
	})
	t.Run("of a banned machine it is not renewed", func(t *testing.T) {
		s := setUp(t)
		two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
		ticket := two.ticket(t)
		two.JoinServiceClient = s.overOneConnection(t, two.Attester(attest.PurposeMachine)) // a connection from before the ban
		if _, err := two.renewed(t, ticket.GetTicketId(), false); err != nil {
			t.Fatal(err)
		}
		n := s.Node(t, "cp2")
		n.Spec.Banned = true
		if err := s.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		membertest.Eventually(t, func() error {
			_, err := two.renew(t, ticket.GetTicketId(), false)
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_BANNED, "%v, want BANNED", err)
		})
	})
	t.Run("of a forgotten machine it is not renewed", func(t *testing.T) {
		s := setUp(t)
		two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
		ticket := two.ticket(t)
		if _, err := two.renewed(t, ticket.GetTicketId(), false); err != nil {
			t.Fatal(err)
		}
		s.forget(t, "cp2")
		membertest.Eventually(t, func() error {
			_, err := two.renew(t, ticket.GetTicketId(), false)
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_TICKET_UNKNOWN, "%v, want TICKET_UNKNOWN", err)
		})
	})
}

// mayNotApprove removes joinservice's right to approve certificates until the test ends.
func (s *fixture) mayNotApprove(t *testing.T) {
	t.Helper()
	role := &unstructured.Unstructured{}
	role.SetGroupVersionKind(schema.GroupVersionKind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRole"})
	if err := s.Client.Get(t.Context(), client.ObjectKey{Name: "muster:joinservice"}, role); err != nil {
		t.Fatal(err)
	}
	rules := role.Object["rules"].([]any)
	write := func(ctx context.Context, rules []any) error {
		if err := s.Client.Get(ctx, client.ObjectKeyFromObject(role), role); err != nil {
			return err
		}
		role.Object["rules"] = rules
		return s.Client.Update(ctx, role)
	}
	if err := write(t.Context(), slices.DeleteFunc(slices.Clone(rules), func(r any) bool { return slices.Contains(r.(map[string]any)["resources"].([]any), any("signers")) })); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := write(context.WithoutCancel(t.Context()), rules); err != nil {
			t.Error(err)
		}
	})
}

// Invariant J8.
func TestOfFiveWhoAskAtOnceAllGetTheirTurn(t *testing.T) {
	s := setUp(t)
	// A machine that is too slow to renew its turn loses it to the next one.
	lost := func() int {
		return bytes.Count(s.join.Log.Bytes(), []byte(`"msg":"a join Lease has expired and another machine takes it"`))
	}
	var mu sync.Mutex
	held, most := 0, 0
	var refused []error
	var wg sync.WaitGroup
	for i := range 5 {
		digit := string(rune('2' + i))
		c := s.controlPlane(t, "cp"+digit, "5f0c95b6-2a3d-4c7e-9f10-00000000000"+digit, "192.168.77.1"+digit)
		wg.Go(func() {
			ticket := c.ticket(t)
			mu.Lock()
			held++
			most = max(most, held)
			mu.Unlock()
			_, renewal := c.renewed(t, ticket.GetTicketId(), false)
			mu.Lock()
			held--
			mu.Unlock()
			_, end := c.renewed(t, ticket.GetTicketId(), true)
			if err := errors.Join(renewal, end); err != nil {
				mu.Lock()
				refused = append(refused, fmt.Errorf("%s: %w", c.GetNodeName(), err))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if n := lost(); most > 1+n || len(refused) > n {
		t.Errorf("%d had their turn at once, and %d lost it; refused: %v", most, n, refused)
	}
}

// J6, A7: an object of the cluster is not sufficient, the owner's signature is required.
func TestAControlPlaneThatThePolicyDoesNotListGetsNothing(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane})
	client := s.dial(t, m.Attester(attest.PurposeMachine))
	s.seen(t, client, m)
	w := worker(t, named("cp2", disk2, "192.168.77.13"), func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE })
	s.refused(t, client, m, w, attestv1.Reason_REASON_SERVER_NOT_LISTED)
	if n := s.Node(t, "cp2"); n.Spec.DiskID != "" || s.Access(t).Entry("cp2").ControlPlane {
		t.Errorf("enrollment %+v, and it is listed as a control plane: %t", n.Spec, s.Access(t).Entry("cp2").ControlPlane)
	}
	s.listed = append(s.listed, m)
	s.inForce(t, s.policy(t, func(p *attestv1.Policy) { p.Serial = 2 }))
	c := &controlPlane{Machine: m, JoinServiceClient: client, joinRequest: w}
	ticket := s.ticketFor(t, m, w).GetTicketId()
	if _, err := c.renewed(t, ticket, false); err != nil {
		t.Error(err)
	}
	// Nor does it keep others from joining.
	s.listed = s.listed[:len(s.listed)-1]
	s.inForce(t, s.policy(t, func(p *attestv1.Policy) { p.Serial = 3 }))
	for _, done := range []bool{false, true} {
		if _, err := c.renewed(t, ticket, done); rpc.ReasonFrom(err) != attestv1.Reason_REASON_SERVER_NOT_LISTED {
			t.Errorf("renewal of the join Lease, done %t: %v, want SERVER_NOT_LISTED", done, err)
		}
	}
}
