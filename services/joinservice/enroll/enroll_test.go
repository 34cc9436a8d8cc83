package enroll_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// Certificates that were requested may be signed, and any node can read them. If the name were free then, two machines
// would write under it (J4).
func TestAFailedTicketKeepsNameAndDiskForItsMachine(t *testing.T) {
	now := servicetest.NewClock()
	a := servicetest.New(t, func(k *servicetest.Rooms) { k.State.Now = now.Now })
	servicetest.Shared.Reset(t)
	servicetest.Half(t, a, servicetest.Claim(1))
	servicetest.Seen(t, a, a.Unfinished)
	if err := a.Check(t.Context(), servicetest.Claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
	renamed := servicetest.Claim(1)
	renamed.Node = "w2"
	next := servicetest.Claim(2)
	next.Disk, next.Addresses = servicetest.DiskTwo, servicetest.Elsewhere(next).Addresses
	for _, d := range []time.Duration{0, state.DefaultCertificateLife} {
		now.Pass(d)
		if err := a.Check(t.Context(), next); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_TAKEN {
			t.Errorf("another machine after %s: %v, want NAME_TAKEN", d, err)
		}
		if err := a.Check(t.Context(), renamed); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_MISMATCH {
			t.Errorf("its machine under another name after %s: %v, want NAME_MISMATCH", d, err)
		}
	}
	now.Pass(enroll.HoldMargin + time.Minute)
	if err := a.Check(t.Context(), renamed); err != nil {
		t.Errorf("its machine once every certificate has expired: %v", err)
	}
	servicetest.Enroll(t, a, next, "b")
	if n := servicetest.Shared.Node(t, "w1"); n.Spec.MachineID != next.Machine.String() {
		t.Errorf("enrollment %+v", n.Spec)
	}
}

// The next ticket of the machine finds what a failed one wrote.
func TestATicketAfterAFailedOneIsIssued(t *testing.T) {
	a := servicetest.New(t)
	b := servicetest.New(t)
	servicetest.Shared.Reset(t)
	servicetest.Half(t, a, servicetest.Claim(1))
	servicetest.Seen(t, b, b.Unfinished)
	servicetest.Enroll(t, b, servicetest.Claim(1), "b")
	servicetest.Stays(t, "b")
	servicetest.Half(t, a, servicetest.Claim(1)) // later, and fails
	servicetest.Stays(t, "b")
}

// J4: an address that a machine releases is blocked for others while a certificate for it may be valid, and until then the
// machine can have it back.
func TestAnAddressIsAnybodysOnceNoCertificateForItLives(t *testing.T) {
	now := servicetest.NewClock()
	at := func(k *servicetest.Rooms) { k.State.Now = now.Now }
	a := servicetest.New(t, at)
	b := servicetest.New(t, at)
	servicetest.Shared.Reset(t)
	servicetest.Enroll(t, b, servicetest.Claim(1), "b")
	servicetest.Seen(t, a, servicetest.Holds("b"))
	other, third := servicetest.Claim(2), servicetest.Elsewhere(servicetest.Claim(3))
	other.Node, other.Disk = "w2", servicetest.DiskTwo
	third.Node, third.Disk = "w3", "5f0c95b6-2a3d-4c7e-9f10-000000000003"
	refused := func(c enroll.Claim, when string) {
		t.Helper()
		if _, err := b.Enroll(t.Context(), c); attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
			t.Fatalf("another machine asks for the address %s: %v", when, err)
		}
	}
	servicetest.Half(t, a, servicetest.Elsewhere(servicetest.Claim(1))) // a ticket that fails
	servicetest.Seen(t, b, func(n *v1alpha1.AttestedNode) bool {
		return slices.Equal(n.Spec.Addresses, servicetest.Elsewhere(servicetest.Claim(1)).Spec().Addresses)
	})
	refused(other, "that it had")
	refused(third, "that a failed ticket had a certificate for")
	servicetest.Enroll(t, b, servicetest.Claim(1), "c") // it has it back
	servicetest.Seen(t, b, servicetest.Holds("c"))
	refused(third, "that it has given up again")
	servicetest.Enroll(t, b, servicetest.Elsewhere(servicetest.Claim(1)), "d")
	servicetest.Seen(t, b, servicetest.Holds("d"))
	refused(other, "once the ticket is out")
	now.Pass(state.DefaultCertificateLife)
	refused(other, "while the last certificate for it lives")
	if err := b.Check(t.Context(), servicetest.Claim(1)); err != nil {
		t.Errorf("the machine itself cannot have it back: %v", err)
	}
	now.Pass(enroll.HoldMargin + time.Minute)
	servicetest.Enroll(t, b, other, "e")
}

// A machine cannot collect addresses by asking for others repeatedly.
func TestTheAddressesThatAMachineGivesUpAreBounded(t *testing.T) {
	now := servicetest.NewClock()
	k := servicetest.New(t, func(k *servicetest.Rooms) { k.State.Now = now.Now })
	servicetest.Shared.Reset(t)
	c, had := servicetest.Claim(1), 0
	for {
		id := fmt.Sprint(had)
		if err := servicetest.Join(t.Context(), k, c, id); err != nil {
			if attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
				t.Fatal(err)
			}
			break
		}
		servicetest.Seen(t, k, servicetest.Holds(id))
		had++
		c.Addresses = []netip.Addr{c.Addresses[0].Next()}
	}
	if had != enroll.MaxHeldAddresses {
		t.Errorf("it had %d addresses, want %d at most", had, enroll.MaxHeldAddresses)
	}
	now.Pass(state.DefaultCertificateLife + enroll.HoldMargin + time.Minute)
	servicetest.Enroll(t, k, c, "later")
}

// A ticket cannot be recorded for a machine that was banned, or whose name was removed, since it was enrolled.
func TestATicketThatMeetsABanIsNotIssued(t *testing.T) {
	a := servicetest.New(t)
	for name, meanwhile := range map[string]func(*v1alpha1.AttestedNode){
		"banned":                func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true },
		"removed and made anew": nil,
	} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			membertest.Eventually(t, func() error {
				e, _ := a.List.Entry("w1")
				return membertest.Want(a.State.Cluster.Nodes.ByName("w1") == nil && e.Equal(nodeaccess.Entry{}), "the replica's view is old")
			})
			e := servicetest.Half(t, a, servicetest.Claim(1))
			n := servicetest.Shared.Node(t, "w1")
			if meanwhile != nil {
				meanwhile(n)
				if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
					t.Fatal(err)
				}
			} else {
				servicetest.Shared.Reset(t)
				servicetest.Shared.Enroll(t, "w1", n.Spec)
			}
			if err := e.Record(t.Context(), servicetest.Claim(1), servicetest.Ticket("a"), servicetest.Signed("a"), servicetest.Signed("a")); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
				t.Errorf("%v, want API_UNAVAILABLE: its next attempt is checked again", err)
			}
			if n := servicetest.Shared.Node(t, "w1"); n.Status.Ticket != nil {
				t.Errorf("the ticket is recorded: %+v", n.Status)
			}
		})
	}
}

// A returned ticket suspends its node; the next ticket of the machine lets it write again.
func TestAReturnedTicketSuspendsItsNode(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	b := servicetest.New(t)
	servicetest.Enroll(t, a, servicetest.Claim(1), "a")
	servicetest.Seen(t, a, servicetest.Holds("a"))
	if _, err := a.ReturnTicket(t.Context(), servicetest.Claim(1).Machine, "a"); err != nil {
		t.Fatal(err)
	}
	if !servicetest.Suspended(t, "w1") {
		t.Error("it may write")
	}
	servicetest.Seen(t, b, func(n *v1alpha1.AttestedNode) bool { return n.Status.ReleasedAt != nil })
	membertest.Eventually(t, func() error {
		e, _ := b.List.Entry("w1")
		return membertest.Want(e.Suspended, "the replica's view is old")
	})
	servicetest.Enroll(t, b, servicetest.Claim(1), "b")
	servicetest.Stays(t, "b")
	if n := servicetest.Shared.Node(t, "w1"); n.Status.ReleasedAt != nil {
		t.Error("it is still released")
	}
}

func TestABannedMachineReturnsNothing(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	servicetest.Enroll(t, a, servicetest.Claim(1), "a")
	servicetest.Seen(t, a, servicetest.Holds("a"))
	servicetest.Ban(t, true) // the replica may not have seen it
	if _, err := a.ReturnTicket(t.Context(), servicetest.Claim(1).Machine, "a"); err == nil {
		t.Error("it was returned")
	}
	if n := servicetest.Shared.Node(t, "w1"); n == nil || n.Status.ReleasedAt != nil {
		t.Errorf("enrollment %+v", n)
	}
}

// A Node that keeps an address that its machine had would have connections to its kubelet made to the next machine with it. A machine that has an address is not affected
// by what a kubelet writes.
func TestAnAddressInANodeIsNoOthers(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	w2 := servicetest.Claim(2)
	w2.Node, w2.Disk = "w2", servicetest.DiskTwo
	w2.Addresses = []netip.Addr{servicetest.Claim(1).Addresses[0].Next()}
	object := func(name string, addresses ...string) {
		t.Helper()
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := client.IgnoreAlreadyExists(servicetest.Shared.Client.Create(t.Context(), n)); err != nil {
			t.Fatal(err)
		}
		n.Status.Addresses = nil
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		membertest.Eventually(t, func() error {
			has := slices.Contains(a.State.AddressOwners(w2.Addresses[0]), state.Owner{Kind: state.OwnerNode, Name: name})
			return membertest.Want(has == (len(addresses) > 0), "the replica does not see the Node's addresses")
		})
	}
	try := func(want attestv1.Reason) {
		t.Helper()
		if err := a.Check(t.Context(), w2); attest.ReasonOf(err) != want {
			t.Errorf("%v, want %v", err, want)
		}
	}
	servicetest.Enroll(t, a, servicetest.Claim(1), "a")
	object("w1", w2.Addresses[0].String())
	try(attestv1.Reason_REASON_ADDRESS_REFUSED)
	object("w1")
	try(attestv1.Reason_REASON_ACCEPTED)
	object("legacy", w2.Addresses[0].String()) // of a node that Muster did not enroll
	try(attestv1.Reason_REASON_ADDRESS_REFUSED)
	object("legacy")
	servicetest.Enroll(t, a, w2, "b")
	object("w1", w2.Addresses[0].String())
	try(attestv1.Reason_REASON_ACCEPTED)
}

// Between the read of the enrollment and the write of the list, the owner bans the machine: the list is written again.
func TestABanWhileTheListIsWrittenCounts(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	b := servicetest.New(t)
	servicetest.Enroll(t, a, servicetest.Claim(1), "a")
	servicetest.Suspend(t, "w1", true)
	a.State.Cluster.Client = servicetest.Before{Client: a.State.Cluster.Client, Once: &sync.Once{}, Do: func() {
		servicetest.Ban(t, true)
		servicetest.Shared.SetAccess(t, "w1", servicetest.Revoked)
		if err := b.List.Settle(t.Context(), "w1"); err != nil {
			t.Error(err)
		}
	}}
	if err := a.List.Settle(t.Context(), "w1"); err != nil {
		t.Error(err)
	}
	if e := servicetest.Shared.Access(t).Entry("w1"); !e.Suspended || e.Revoked == nil {
		t.Errorf("the list says %+v", e)
	}
}

// Two machines claim one address at two replicas at the same time: at least one of them is refused, and leaves nothing.
func TestTheLoserOfARaceForAnAddressLeavesNothing(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	b := servicetest.New(t)
	other := servicetest.Claim(2)
	other.Node, other.Disk = "w2", servicetest.DiskTwo
	late, err := a.ReplaceOrUpdate(t.Context(), other, nil) // each has checked, and the address was free
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.ReplaceOrUpdate(t.Context(), servicetest.Claim(1), nil); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(attest.ReasonOf(a.CheckAgainst(other, a.State.Cluster.Nodes.ByName("w2"))) == attestv1.Reason_REASON_ADDRESS_REFUSED, "the replica does not see the other one")
	})
	late.RollBack(t.Context())
	if n := servicetest.Shared.Node(t, "w2"); n != nil || servicetest.Shared.Node(t, "w1") == nil {
		t.Errorf("left: %+v; the other one: %+v", n, servicetest.Shared.Node(t, "w1"))
	}
}

// A changed enrollment that loses the race is restored.
func TestAnEnrollmentThatLosesARaceIsAsItWas(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	servicetest.Enroll(t, a, servicetest.Claim(1), "a")
	servicetest.Seen(t, a, servicetest.Holds("a"))
	e, err := a.Write(t.Context(), servicetest.Elsewhere(servicetest.Claim(1)))
	if err != nil {
		t.Fatal(err)
	}
	e.RollBack(t.Context())
	if n := servicetest.Shared.Node(t, "w1"); !slices.Equal(n.Spec.Addresses, servicetest.Claim(1).Spec().Addresses) || len(n.Annotations[v1alpha1.FormerAddresses]) > 0 || !servicetest.Holds("a")(n) {
		t.Errorf("enrollment %+v, annotations %v", n.Spec, n.Annotations)
	}
}

// A client that claims values of a node, and disconnects before its claim is checked again, blocks nothing of the node.
func TestAClaimThatWasOnlyBegunKeepsNothingFromANode(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	victim := servicetest.Elsewhere(servicetest.Claim(2))
	victim.Node, victim.Disk = "w2", servicetest.DiskTwo
	servicetest.Enroll(t, a, victim, "b")
	seenToo := func() error {
		n := a.State.Cluster.Nodes.ByName("w2")
		return membertest.Want(n != nil && n.Status.Ticket != nil, "w2 is not seen yet")
	}
	membertest.Eventually(t, seenToo)
	thief := servicetest.Claim(1)
	thief.Addresses, thief.Disk = victim.Addresses, victim.Disk
	// This is as if its replica had not seen w2 when it wrote, and had then crashed.
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{
		Name: "w1", Finalizers: []string{v1alpha1.RevokeCertificates},
		Annotations: map[string]string{v1alpha1.EnrolledByTicket: "true", v1alpha1.AttestationKey: thief.AK, v1alpha1.AskedAt: state.UTC(time.Now())},
	}, Spec: thief.Spec()}
	if err := servicetest.Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	servicetest.Seen(t, a, a.Unfinished)
	if err := a.Check(t.Context(), victim); err != nil {
		t.Errorf("the node asks for a ticket: %v", err)
	}
	if err := a.Check(t.Context(), thief); err == nil {
		t.Error("the thief's claim fits")
	}
}

// Enroll removes an unfinished claim although its caller has disconnected.
func TestAClaimIsLookedAtAgainWhoeverGoesAway(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	hung := a.State.Cluster.Client
	a.State.Cluster.Client = after{hung, cancel}
	defer func() { a.State.Cluster.Client = hung }()
	if _, err := a.Enroll(ctx, servicetest.Claim(1)); err != nil {
		t.Errorf("%v", err)
	}
}

// after cancels the caller's context after an object was created.
type after struct {
	client.Client
	end func()
}

func (a after) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	err := a.Client.Create(ctx, o, opts...)
	a.end()
	return err
}

// A name without a holder is not free while its deletion lasts: the certificates may not be revoked yet.
func TestANameThatIsBeingDeletedIsNotExpired(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{v1alpha1.EnrolledByTicket: "true"}}, Status: v1alpha1.AttestedNodeStatus{ReleasedAt: new(metav1.NewTime(time.Now().Add(-30 * 24 * time.Hour)))}}
	if !k.Expired(n) {
		t.Error("released long ago, and not vacant")
	}
	n.DeletionTimestamp = new(metav1.Now())
	if k.Expired(n) {
		t.Error("being deleted, and vacant")
	}
	n.Status.ReleasedAt = nil
	if !enrollment.Suspended(n) {
		t.Error("being deleted, and may write")
	}
}

// A control plane is listed as such when it gets its ticket: its kubelet shows static pods from its first minute.
func TestATicketListsItsControlPlane(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	c := servicetest.Claim(1)
	c.Role = v1alpha1.RoleControlPlane
	servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: c.Role})
	servicetest.Seen(t, a, func(*v1alpha1.AttestedNode) bool { return true })
	servicetest.Enroll(t, a, c, "a")
	if got := servicetest.ControlPlanes(t); !slices.Equal(got, []string{"w1"}) {
		t.Errorf("control planes: %v", got)
	}
}
