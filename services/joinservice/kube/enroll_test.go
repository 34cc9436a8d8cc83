package kube

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
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
)

// elsewhere is the claim of the same machine at another address.
func elsewhere(c Claim) Claim {
	c.Addresses = []netip.Addr{c.Addresses[0].Next().Next().Next()}
	return c
}

// Certificates that were requested may be signed, and any node can read them. If the name were free then, two machines
// would write under it (J4).
func TestAFailedTicketKeepsNameAndDiskForItsMachine(t *testing.T) {
	now := &clock{at: time.Now()}
	a, _ := replica(t, func(k *Kube) { k.now = now.now })
	shared.Reset(t)
	half(t, a, claim(1))
	seen(t, a, a.begun)
	if err := a.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
	renamed := claim(1)
	renamed.Node = "w2"
	next := claim(2)
	next.Disk, next.Addresses = diskTwo, elsewhere(next).Addresses
	for _, d := range []time.Duration{0, DefaultCertificateLife} {
		now.pass(d)
		if err := a.Check(t.Context(), next); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_TAKEN {
			t.Errorf("another machine after %s: %v, want NAME_TAKEN", d, err)
		}
		if err := a.Check(t.Context(), renamed); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_MISMATCH {
			t.Errorf("its machine under another name after %s: %v, want NAME_MISMATCH", d, err)
		}
	}
	now.pass(holdMargin + time.Minute)
	if err := a.Check(t.Context(), renamed); err != nil {
		t.Errorf("its machine once every certificate has expired: %v", err)
	}
	enroll(t, a, next, "b")
	if n := shared.Node(t, "w1"); n.Spec.MachineID != next.Machine.String() {
		t.Errorf("enrollment %+v", n.Spec)
	}
}

// The next ticket of the machine finds what a failed one wrote.
func TestATicketAfterAFailedOneIsIssued(t *testing.T) {
	a, _ := replica(t)
	b, _ := replica(t)
	shared.Reset(t)
	half(t, a, claim(1))
	seen(t, b, b.begun)
	enroll(t, b, claim(1), "b")
	stays(t, "b")
	half(t, a, claim(1)) // later, and fails
	stays(t, "b")
}

// J4: an address that a machine releases is blocked for others while a certificate for it may be valid, and until then the
// machine can have it back.
func TestAnAddressIsAnybodysOnceNoCertificateForItLives(t *testing.T) {
	now := &clock{at: time.Now()}
	at := func(k *Kube) { k.now = now.now }
	a, _ := replica(t, at)
	b, _ := replica(t, at)
	shared.Reset(t)
	enroll(t, b, claim(1), "b")
	seen(t, a, holds("b"))
	other, third := claim(2), elsewhere(claim(3))
	other.Node, other.Disk = "w2", diskTwo
	third.Node, third.Disk = "w3", "5f0c95b6-2a3d-4c7e-9f10-000000000003"
	refused := func(c Claim, when string) {
		t.Helper()
		if _, err := b.Enroll(t.Context(), c); attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
			t.Fatalf("another machine asks for the address %s: %v", when, err)
		}
	}
	half(t, a, elsewhere(claim(1))) // a ticket that fails
	seen(t, b, func(n *v1alpha1.AttestedNode) bool {
		return slices.Equal(n.Spec.Addresses, elsewhere(claim(1)).spec().Addresses)
	})
	refused(other, "that it had")
	refused(third, "that a failed ticket had a certificate for")
	enroll(t, b, claim(1), "c") // it has it back
	seen(t, b, holds("c"))
	refused(third, "that it has given up again")
	enroll(t, b, elsewhere(claim(1)), "d")
	seen(t, b, holds("d"))
	refused(other, "once the ticket is out")
	now.pass(DefaultCertificateLife)
	refused(other, "while the last certificate for it lives")
	if err := b.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("the machine itself cannot have it back: %v", err)
	}
	now.pass(holdMargin + time.Minute)
	enroll(t, b, other, "e")
}

// A machine cannot collect addresses by asking for others repeatedly.
func TestTheAddressesThatAMachineGivesUpAreBounded(t *testing.T) {
	now := &clock{at: time.Now()}
	k, _ := replica(t, func(k *Kube) { k.now = now.now })
	shared.Reset(t)
	c, had := claim(1), 0
	for {
		id := fmt.Sprint(had)
		if err := join(t.Context(), k, c, id); err != nil {
			if attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
				t.Fatal(err)
			}
			break
		}
		seen(t, k, holds(id))
		had++
		c.Addresses = []netip.Addr{c.Addresses[0].Next()}
	}
	if had != maxAddresses {
		t.Errorf("it had %d addresses, want %d at most", had, maxAddresses)
	}
	now.pass(DefaultCertificateLife + holdMargin + time.Minute)
	enroll(t, k, c, "later")
}

// A node that is older than Muster keeps its access and its name until the owner removes it.
func TestAnUnattestedNodeGoesOnUntilTheOwnerForgetsIt(t *testing.T) {
	b := newSweepFixture(t)
	unattested := func(e nodeaccess.Entry) nodeaccess.Entry {
		e.Unattested = true
		return e
	}
	shared.SetAccess(t, "w1", unattested)
	for range 3 {
		b.after(t, time.Minute)
	}
	if e := shared.Access(t).Entry("w1"); !e.Equal(unattested(nodeaccess.Entry{})) {
		t.Errorf("the list says %+v", e)
	}
	if err := b.Check(t.Context(), claim(1)); attest.ReasonOf(err) != attestv1.Reason_REASON_NODE_EXISTS {
		t.Errorf("a machine that asks for the name: %v, want NODE_EXISTS", err)
	}
}

// A ticket cannot be recorded for a machine that was banned, or whose name was removed, since it was enrolled.
func TestATicketThatMeetsABanIsNotIssued(t *testing.T) {
	a, _ := replica(t)
	for name, meanwhile := range map[string]func(*v1alpha1.AttestedNode){
		"banned":                func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true },
		"removed and made anew": nil,
	} {
		t.Run(name, func(t *testing.T) {
			shared.Reset(t)
			membertest.Eventually(t, func() error {
				e, _ := a.access.entry("w1")
				return membertest.Want(a.cluster.Nodes.ByName("w1") == nil && e.Equal(nodeaccess.Entry{}), "the replica's view is old")
			})
			e := half(t, a, claim(1))
			n := shared.Node(t, "w1")
			if meanwhile != nil {
				meanwhile(n)
				if err := shared.Client.Update(t.Context(), n); err != nil {
					t.Fatal(err)
				}
			} else {
				shared.Reset(t)
				shared.Enroll(t, "w1", n.Spec)
			}
			if err := e.Record(t.Context(), claim(1), ticket("a"), signed("a"), signed("a")); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
				t.Errorf("%v, want API_UNAVAILABLE: its next attempt is checked again", err)
			}
			if n := shared.Node(t, "w1"); n.Status.Ticket != nil {
				t.Errorf("the ticket is recorded: %+v", n.Status)
			}
		})
	}
}

// A returned ticket suspends its node; the next ticket of the machine lets it write again.
func TestAReturnedTicketSuspendsItsNode(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	enroll(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	if _, err := a.Withdraw(t.Context(), claim(1).Machine, "a"); err != nil {
		t.Fatal(err)
	}
	if !suspended(t, "w1") {
		t.Error("it may write")
	}
	seen(t, b, func(n *v1alpha1.AttestedNode) bool { return n.Status.ReleasedAt != nil })
	membertest.Eventually(t, func() error {
		e, _ := b.access.entry("w1")
		return membertest.Want(e.Suspended, "the replica's view is old")
	})
	enroll(t, b, claim(1), "b")
	stays(t, "b")
	if n := shared.Node(t, "w1"); n.Status.ReleasedAt != nil {
		t.Error("it is still released")
	}
}

func TestABannedMachineReturnsNothing(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	enroll(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	ban(t, true) // the replica may not have seen it
	if _, err := a.Withdraw(t.Context(), claim(1).Machine, "a"); err == nil {
		t.Error("it was returned")
	}
	if n := shared.Node(t, "w1"); n == nil || n.Status.ReleasedAt != nil {
		t.Errorf("enrollment %+v", n)
	}
}

// Whatever the list has, it ends as in the enrollment, also if several replicas write it.
func TestTheListFollowsTheEnrollment(t *testing.T) {
	shared.Reset(t)
	a, e := replica(t)
	b, other := replica(t)
	enroll(t, a, claim(1), "a")
	seen(t, b, holds("a"))
	enforce(t, e)
	enforce(t, other)
	is := func(want bool) {
		t.Helper()
		membertest.Eventually(t, func() error { return membertest.Want(suspended(t, "w1") == want, "suspended: %t", !want) })
	}
	ban(t, true)
	is(true)
	suspend(t, "w1", false) // by hand
	is(true)
	ban(t, false)
	is(false)
	suspend(t, "w1", true)
	is(false)
}

// Connections of a banned machine are closed even if the API server answers nothing, neither to the ban's own request nor
// to others'.
func TestABanCutsConnectionsBeforeAnyRequest(t *testing.T) {
	shared.Reset(t)
	a, e := replica(t)
	enroll(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	a.cluster.Client = hanging{a.cluster.Client, t.Context()}
	e.mu.Lock()
	e.add("other") // from before; it hangs
	e.mu.Unlock()
	cut := enforce(t, e)
	ban(t, true)
	select {
	case m := <-cut:
		if m != claim(1).Machine {
			t.Errorf("cut %s", m)
		}
	case <-time.After(30 * time.Second):
		t.Error("the machine is still connected")
	}
}

// A kubelet writes its Node's addresses itself, and could block the addresses of others with them.
func TestAnEnrolledNodeBlocksNoAddressThroughItsNode(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	w2 := claim(2)
	w2.Node, w2.Disk = "w2", "5f0c95b6-2a3d-4c7e-9f10-000000000002"
	w2.Addresses = []netip.Addr{claim(1).Addresses[0].Next()}
	object := func(name string) {
		t.Helper()
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := shared.Client.Create(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: w2.Addresses[0].String()}}
		if err := shared.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		membertest.Eventually(t, func() error {
			return membertest.Want(slices.Contains(a.addresses.of(w2.Addresses[0]), owner{ownerNode, name}), "the replica does not see the Node's address")
		})
	}
	refused := func() {
		t.Helper()
		if err := a.Check(t.Context(), w2); attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
			t.Errorf("%v, want ADDRESS_REFUSED", err)
		}
	}
	enroll(t, a, claim(1), "a")
	object("w1")
	if err := a.Check(t.Context(), w2); err != nil {
		t.Errorf("w1 has taken the address of w2: %v", err)
	}
	// For a node that Muster did not enroll, its Node is the only place of its addresses.
	object("legacy")
	refused()
	shared.Enroll(t, "legacy", v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{9}.String(), Role: v1alpha1.RoleControlPlane})
	membertest.Eventually(t, func() error {
		return membertest.Want(a.cluster.Nodes.ByName("legacy") != nil, "the replica does not see the enrollment")
	})
	refused() // the same for one whose enrollment has none yet
}

// The replica that issues a ticket may not have seen yet that older certificates of the name were revoked: whichever it
// sees first, the ticket's certificate may finally write (J4).
func TestATicketUnderARevokedNameMayWriteInTheEnd(t *testing.T) {
	for name, unseen := range map[string]bool{"seen": false, "not seen yet": true} {
		t.Run(name, func(t *testing.T) {
			shared.Reset(t)
			a, e := replica(t)
			shared.SetAccess(t, "w1", revoked)
			membertest.Eventually(t, func() error {
				e, _ := a.access.entry("w1")
				return membertest.Want(e.Revoked != nil, "the replica's view is old")
			})
			if unseen {
				a.access.mu.Lock()
				a.access.list = nodeaccess.New(false)
				a.access.mu.Unlock()
			}
			enroll(t, a, claim(1), "a")
			allowed := func() bool {
				r := shared.Access(t).Entry("w1").Revoked
				return r != nil && r.Allows(nodeaccess.ID(signed("a")))
			}
			if unseen == allowed() {
				t.Fatalf("with the ticket, its certificate is allowed: %t", !unseen)
			}
			if !unseen {
				return
			}
			enforce(t, e)
			suspend(t, "w9", true) // the list changes, and the replica sees it
			membertest.Eventually(t, func() error { return membertest.Want(allowed(), "the ticket's certificate may not write") })
		})
	}
}

// before runs a function just before the first update of a list.
type before struct {
	client.Client
	once *sync.Once
	do   func()
}

func (b before) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	if _, list := o.(*corev1.ConfigMap); list {
		b.once.Do(b.do)
	}
	return b.Client.Update(ctx, o, opts...)
}

// Between the read of the enrollment and the write of the list, the owner bans the machine: the list is written again.
func TestABanWhileTheListIsWrittenCounts(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	enroll(t, a, claim(1), "a")
	suspend(t, "w1", true)
	a.cluster.Client = before{a.cluster.Client, &sync.Once{}, func() {
		ban(t, true)
		shared.SetAccess(t, "w1", revoked)
		if err := b.settle(t.Context(), "w1"); err != nil {
			t.Error(err)
		}
	}}
	if err := a.settle(t.Context(), "w1"); err != nil {
		t.Error(err)
	}
	if e := shared.Access(t).Entry("w1"); !e.Suspended || e.Revoked == nil {
		t.Errorf("the list says %+v", e)
	}
}

// Two machines claim one address at two replicas at the same time: at least one of them is refused, and leaves nothing.
func TestTheLoserOfARaceForAnAddressLeavesNothing(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	other := claim(2)
	other.Node, other.Disk = "w2", diskTwo
	late, err := a.writeOver(t.Context(), other, nil) // each has checked, and the address was free
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.writeOver(t.Context(), claim(1), nil); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(attest.ReasonOf(a.check(other, a.cluster.Nodes.ByName("w2"))) == attestv1.Reason_REASON_ADDRESS_REFUSED, "the replica does not see the other one")
	})
	late.giveUp(t.Context())
	if n := shared.Node(t, "w2"); n != nil || shared.Node(t, "w1") == nil {
		t.Errorf("left: %+v; the other one: %+v", n, shared.Node(t, "w1"))
	}
}

// A changed enrollment that loses the race is restored.
func TestAnEnrollmentThatLosesARaceIsAsItWas(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	enroll(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	e, err := a.write(t.Context(), elsewhere(claim(1)))
	if err != nil {
		t.Fatal(err)
	}
	e.giveUp(t.Context())
	if n := shared.Node(t, "w1"); !slices.Equal(n.Spec.Addresses, claim(1).spec().Addresses) || len(n.Annotations[v1alpha1.FormerAddresses]) > 0 || !holds("a")(n) {
		t.Errorf("enrollment %+v, annotations %v", n.Spec, n.Annotations)
	}
}
