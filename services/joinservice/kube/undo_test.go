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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/trust/attest"
)

// A replica that stalls and gives up takes nothing from a ticket that another one gave the same
// machine, whichever of the two wrote first (J4).
func TestAFailedTicketLeavesWhatAnotherReliesOn(t *testing.T) {
	a, _ := replica(t)
	b, _ := replica(t)
	for name, tt := range map[string]struct {
		late func(t *testing.T) *Enrolment // that fails in the end
		want string                        // the ticket that then stands
	}{
		"a later one": {func(t *testing.T) *Enrolment {
			late := enrol(t, a, claim(1), "a")
			seen(t, b, holds("a"))
			enrol(t, b, claim(1), "b")
			return late
		}, "b"},
		"a later one, while it has not written its status": {func(t *testing.T) *Enrolment {
			late := half(t, a, claim(1), "a")
			seen(t, b, func(*v1alpha1.AttestedNode) bool { return true })
			enrol(t, b, claim(1), "b")
			return late
		}, "b"},
		"one that it replaced": {func(t *testing.T) *Enrolment {
			late := half(t, a, claim(1), "a")
			seen(t, b, func(*v1alpha1.AttestedNode) bool { return true })
			enrol(t, b, claim(1), "b")
			if err := late.finish(t.Context(), claim(1), ticket("a")); err != nil {
				t.Fatal(err)
			}
			return late
		}, "b"},
		"an earlier one, whose addresses it changed": {func(t *testing.T) *Enrolment {
			enrol(t, b, claim(1), "b")
			seen(t, a, holds("b"))
			c := claim(1)
			c.Addresses = append(slices.Clone(c.Addresses), c.Addresses[0].Next())
			return enrol(t, a, c, "a")
		}, "b"},
		"an earlier one, whose addresses it gives up": {func(t *testing.T) *Enrolment {
			enrol(t, b, claim(1), "b")
			seen(t, a, holds("b"))
			return enrol(t, a, elsewhere(claim(1)), "a")
		}, "b"},
		"an earlier one, while it has not written its status": {func(t *testing.T) *Enrolment {
			enrol(t, b, claim(1), "b")
			seen(t, a, holds("b"))
			return half(t, a, elsewhere(claim(1)), "a")
		}, "b"},
	} {
		t.Run(name, func(t *testing.T) {
			shared.Reset(t)
			membertest.Eventually(t, func() error {
				return membertest.Want(a.cluster.Nodes.ByName("w1") == nil && b.cluster.Nodes.ByName("w1") == nil, "the replicas see what is gone")
			})
			late := tt.late(t)
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			late.Undo(ended) // its caller has hung up
			stays(t, tt.want)
			if n := shared.Node(t, "w1"); !slices.Equal(n.Spec.Addresses, []string{"192.168.77.12"}) {
				t.Errorf("addresses %v", n.Spec.Addresses)
			}
		})
	}
}

// elsewhere is the claim of the same machine at another address.
func elsewhere(c Claim) Claim {
	c.Addresses = []netip.Addr{c.Addresses[0].Next().Next().Next()}
	return c
}

// J4: an address that a machine gives up is nobody else's while a certificate for it can live, and until the ticket is out it
// can go back.
func TestAnAddressIsAnybodysOnceNoCertificateForItLives(t *testing.T) {
	now := &clock{at: time.Now()}
	at := func(k *Kube) { k.now = now.now }
	a, _ := replica(t, at)
	b, _ := replica(t, at)
	shared.Reset(t)
	enrol(t, b, claim(1), "b").Keep(t.Context())
	seen(t, a, holds("b"))
	other, third := claim(2), elsewhere(claim(3))
	other.Node, other.Disk = "w2", diskTwo
	third.Node, third.Disk = "w3", "5f0c95b6-2a3d-4c7e-9f10-000000000003"
	refused := func(c Claim, when string) {
		t.Helper()
		if _, err := b.Enrol(t.Context(), c, ticket("c")); attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
			t.Fatalf("another machine asks for the address %s: %v", when, err)
		}
	}
	for _, out := range []bool{false, true} {
		moving := enrol(t, a, elsewhere(claim(1)), "a")
		moving.File()
		seen(t, b, holds("a"))
		refused(other, "while the ticket is made")
		want := claim(1).Addresses[0]
		if out {
			want = elsewhere(claim(1)).Addresses[0]
			moving.Keep(t.Context())
		} else {
			moving.Undo(t.Context())
		}
		if n := shared.Node(t, "w1"); !slices.Equal(n.Spec.Addresses, []string{want.String()}) {
			t.Errorf("out: %t, and the addresses are %v", out, n.Spec.Addresses)
		}
		seen(t, a, func(n *v1alpha1.AttestedNode) bool { return len(n.Spec.Addresses) == 1 })
		seen(t, b, func(n *v1alpha1.AttestedNode) bool { return len(n.Spec.Addresses) == 1 })
		if !out { // any node may have read the certificate in its request
			refused(third, "that a failed ticket had a certificate for")
		}
	}
	refused(other, "once the ticket is out")
	now.pass(DefaultCertificateLife)
	refused(other, "while the last certificate for it lives")
	if err := b.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("the machine itself cannot have it back: %v", err)
	}
	now.pass(holdMargin + time.Minute)
	enrol(t, b, other, "c")
}

// A machine can't collect addresses by asking for others again and again.
func TestTheAddressesThatAMachineGivesUpAreBounded(t *testing.T) {
	now := &clock{at: time.Now()}
	k, _ := replica(t, func(k *Kube) { k.now = now.now })
	shared.Reset(t)
	c, had := claim(1), 0
	for {
		id := fmt.Sprint(had)
		e, err := k.Enrol(t.Context(), c, ticket(id))
		if err != nil {
			if attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
				t.Fatal(err)
			}
			break
		}
		e.Keep(t.Context())
		seen(t, k, func(n *v1alpha1.AttestedNode) bool { return holds(id)(n) && len(n.Spec.Addresses) == 1 })
		had++
		c.Addresses = []netip.Addr{c.Addresses[0].Next()}
	}
	if had != maxAddresses {
		t.Errorf("it had %d addresses, want %d at most", had, maxAddresses)
	}
	now.pass(DefaultCertificateLife + holdMargin + time.Minute)
	enrol(t, k, c, "later")
}

// Once all have failed nothing is left, in whatever order they do.
func TestTheLastOfTheFailedTicketsTakesTheEnrolmentBack(t *testing.T) {
	a, _ := replica(t)
	b, _ := replica(t)
	for name, order := range map[string][]int{"the first one first": {0, 1}, "the last one first": {1, 0}} {
		t.Run(name, func(t *testing.T) {
			shared.Reset(t)
			membertest.Eventually(t, func() error {
				return membertest.Want(a.cluster.Nodes.ByName("w1") == nil, "the replica sees what is gone")
			})
			one := enrol(t, a, claim(1), "a")
			seen(t, b, holds("a"))
			both := []*Enrolment{one, enrol(t, b, claim(1), "b")}
			both[order[0]].Undo(t.Context())
			if shared.Node(t, "w1") == nil || shared.Listed(t)["w1"] == "" {
				t.Fatal("one of them still stands")
			}
			// A verdict that comes between is nobody's ticket.
			if err := a.WriteVerdict(t.Context(), claim(1).Machine, v1alpha1.Verdict{Reason: "POLICY_REFUSED", Time: metav1.Now()}); err != nil {
				t.Fatal(err)
			}
			both[order[1]].Undo(t.Context())
			gone(t)
		})
	}
}

// Once certificates were asked for they may be signed, and be read by any node. A name that was anybody's
// then would be written under by two machines (J4).
func TestAFailedTicketWhoseCertificatesWereAskedForKeepsItsName(t *testing.T) {
	a, _ := replica(t)
	shared.Reset(t)
	one := enrol(t, a, claim(1), "a")
	one.File()
	two := enrol(t, a, claim(1), "b")
	one.Undo(t.Context())
	two.Undo(t.Context()) // it had asked for nothing
	n := shared.Node(t, "w1")
	if n == nil || n.Status.ReleasedAt == nil || n.Status.Ticket != nil || shared.Listed(t)["w1"] != "" {
		t.Fatalf("left: %+v, listed %v; want it released", n, shared.Listed(t))
	}
	seen(t, a, func(n *v1alpha1.AttestedNode) bool { return n.Status.ReleasedAt != nil })
	if err := a.Check(t.Context(), claim(2)); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_TAKEN {
		t.Errorf("another machine: %v, want NAME_TAKEN", err)
	}
	if err := a.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
}

// A node that was in the cluster before Muster keeps its place, and its name, until the owner lets go of it.
func TestTheOwnersWordOnAnUnattestedNodeStands(t *testing.T) {
	b := newBroom(t)
	setListed(t, "w1", enrolled.Unattested)
	for range 3 {
		b.after(t, time.Minute)
	}
	if err := b.settle(t.Context(), "w1", false); err != nil {
		t.Fatal(err)
	}
	if have := shared.Listed(t)["w1"]; have != enrolled.Unattested {
		t.Errorf("listed as %q, want %q", have, enrolled.Unattested)
	}
	if err := b.Check(t.Context(), claim(1)); attest.ReasonOf(err) != attestv1.Reason_REASON_NODE_EXISTS {
		t.Errorf("a machine that asks for the name: %v, want NODE_EXISTS", err)
	}
}

func TestAFailedTicketLeavesABan(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	late := enrol(t, a, claim(1), "a")
	ban(t, true)
	late.Undo(t.Context())
	if n := shared.Node(t, "w1"); n == nil || !n.Spec.Banned {
		t.Errorf("the ban is gone: %+v", n)
	}
	if listed := shared.Listed(t); len(listed) > 0 {
		t.Errorf("%v may write", listed)
	}
}

// What was returned stays held since then, though tickets failed on it (J2, J4).
func TestAFailedTicketLeavesAnEnrolmentReleasedAsItWas(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	enrol(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	if _, err := a.Withdraw(t.Context(), claim(1).Machine, "a"); err != nil {
		t.Fatal(err)
	}
	since := shared.Node(t, "w1").Status.ReleasedAt
	seen(t, a, func(n *v1alpha1.AttestedNode) bool { return n.Status.ReleasedAt != nil })
	one := enrol(t, a, claim(1), "b")
	seen(t, b, holds("b"))
	two := enrol(t, b, claim(1), "c")
	if shared.Node(t, "w1").Status.ReleasedAt != nil || shared.Listed(t)["w1"] == "" {
		t.Error("the machine did not get its enrolment again")
	}
	one.Undo(t.Context())
	two.Undo(t.Context())
	if n := shared.Node(t, "w1"); n == nil || n.Status.Ticket != nil || !n.Status.ReleasedAt.Equal(since) || len(shared.Listed(t)) > 0 {
		t.Errorf("enrolment %+v, listed %v; want it released since %s", n, shared.Listed(t), since)
	}
}

// An enrolment of the owner's loses what the failed ticket added, and the node its place.
func TestAFailedTicketLeavesTheOwnersEnrolmentAsItWas(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	c := claim(1)
	shared.Enrol(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: c.Role})
	seen(t, a, func(*v1alpha1.AttestedNode) bool { return true })
	enrol(t, a, c, "a").Undo(t.Context())
	if n := shared.Node(t, "w1"); n == nil || n.Spec.DiskID != "" || len(n.Spec.Addresses) > 0 || n.Status.Ticket != nil || n.Status.ReleasedAt != nil || len(shared.Listed(t)) > 0 {
		t.Errorf("enrolment %+v, listed %v", n, shared.Listed(t))
	}
}

func TestABannedMachineReturnsNothing(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	enrol(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	ban(t, true) // which may not have reached the replica
	if _, err := a.Withdraw(t.Context(), claim(1).Machine, "a"); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
		t.Errorf("%v, want BANNED", err)
	}
	if n := shared.Node(t, "w1"); n == nil || n.Status.ReleasedAt != nil {
		t.Errorf("enrolment %+v", n)
	}
}

// J4: who enrolled under the name meanwhile stays.
func TestTheListIsStruckForOneMachineOnly(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	setListed(t, "w1", "next")
	if err := a.strike(t.Context(), "w1", "former"); !apierrors.IsInvalid(err) || shared.Listed(t)["w1"] != "next" {
		t.Errorf("%v, listed %v", err, shared.Listed(t))
	}
	if err := a.strike(t.Context(), "w1", "next"); err != nil || len(shared.Listed(t)) > 0 {
		t.Errorf("%v, listed %v", err, shared.Listed(t))
	}
	if err := a.strike(t.Context(), "w1", "next"); !apierrors.IsInvalid(err) {
		t.Errorf("struck twice: %v", err)
	}
	if err := a.settle(t.Context(), "w1", false); err != nil { // there is nothing to strike
		t.Error(err)
	}
}

// Whatever stands on the list, it ends as the enrolment says.
func TestTheListFollowsTheEnrolment(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	enrol(t, a, claim(1), "a")
	for name, spoil := range map[string]func() error{
		"it was struck by one who came late": func() error { return a.strike(t.Context(), "w1", claim(1).Machine.String()) },
		"another machine stands there":       func() error { setListed(t, "w1", claim(2).Machine.String()); return nil },
		"all is well":                        func() error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			if err := spoil(); err != nil {
				t.Fatal(err)
			}
			if err := a.settle(t.Context(), "w1", false); err != nil {
				t.Error(err)
			}
			stays(t, "a")
		})
	}
}

// A node that is banned while its ticket is being made comes to the list after the ban.
func TestANodeThatWasBannedBeforeItWasListedIsStruck(t *testing.T) {
	shared.Reset(t)
	a, e := replica(t)
	enrol(t, a, claim(1), "a")
	enforce(t, e)
	struck := func() {
		membertest.Eventually(t, func() error {
			return membertest.Want(len(shared.Listed(t)) == 0, "who may write: %v", shared.Listed(t))
		})
	}
	ban(t, true)
	struck()
	setListed(t, "w1", claim(1).Machine.String())
	struck()
	ban(t, false)
	membertest.Eventually(t, func() error {
		return membertest.Want(shared.Listed(t)["w1"] == claim(1).Machine.String(), "it may not write again: %v", shared.Listed(t))
	})
}

// Connections of a banned machine end though the API server answers nothing, neither to the ban's
// own request nor to others'.
func TestABanCutsConnectionsBeforeAnyRequest(t *testing.T) {
	shared.Reset(t)
	a, e := replica(t)
	enrol(t, a, claim(1), "a")
	seen(t, a, holds("a"))
	a.cluster.Client = hanging{a.cluster.Client, t.Context()}
	e.mu.Lock()
	e.add("other", false) // from before, and hangs
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

// A kubelet writes its Node's addresses itself, and could keep those of others from them.
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
	enrol(t, a, claim(1), "a")
	object("w1")
	if err := a.Check(t.Context(), w2); err != nil {
		t.Errorf("w1 has taken the address of w2: %v", err)
	}
	// What Muster did not enrol has no other place where its addresses stand.
	object("legacy")
	refused()
	shared.Enrol(t, "legacy", v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{9}.String(), Role: v1alpha1.RoleControlPlane})
	membertest.Eventually(t, func() error {
		return membertest.Want(a.cluster.Nodes.ByName("legacy") != nil, "the replica does not see the enrolment")
	})
	refused() // nor has one whose enrolment names none yet
}

// What a replica last saw of the list may be older than the strike that it has to make good.
func TestANewTicketIsListedThoughAnOldViewSaysItIs(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	a.enrolled.set(&corev1.ConfigMap{Data: map[string]string{"w1": claim(1).Machine.String()}})
	enrol(t, a, claim(1), "a")
	stays(t, "a")
}

// before does something just before the first patch of a list.
type before struct {
	client.Client
	once *sync.Once
	do   func()
}

func (b before) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.PatchOption) error {
	b.once.Do(b.do)
	return b.Client.Patch(ctx, o, p, opts...)
}

// The strike that a failed ticket owes comes when the same machine has been enrolled anew.
func TestALateStrikeIsMadeGood(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	setListed(t, "w1", claim(1).Machine.String())
	a.cluster.Client = before{a.cluster.Client, &sync.Once{}, func() { enrol(t, b, claim(1), "b") }}
	if err := a.settle(t.Context(), "w1", false); err != nil {
		t.Error(err)
	}
	stays(t, "b")
}
