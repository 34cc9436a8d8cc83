package kube

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// kubelet returns a client with a certificate of w1 signed by the cluster's CA, and that certificate.
func kubelet(t *testing.T) (client.Client, *x509.Certificate) {
	t.Helper()
	cfg, err := shared.AsUser("system:node:w1", nodecert.Organization)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(cfg.CertData)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	out, err := client.New(cfg, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return out, c
}

// nextOfName returns the claim of another machine that asks for the first one's name, with its own disk.
func nextOfName() Claim {
	next := claim(2)
	next.Disk, next.Addresses = diskTwo, elsewhere(claim(2)).Addresses
	return next
}

// J4: each attempt at a ticket may have got certificates, which any node can read. So the name is held from the last
// attempt on, not from the first.
func TestEachFailedTicketHoldsTheNameAnew(t *testing.T) {
	for name, before := range map[string]func(*testing.T, *sweepFixture){
		"a ticket that was never issued": func(t *testing.T, b *sweepFixture) {
			half(t, b.Kube, claim(1))
			seen(t, b.Kube, b.begun)
		},
		"one that was returned": func(t *testing.T, b *sweepFixture) {
			enroll(t, b.Kube, claim(1), "a")
			seen(t, b.Kube, holds("a"))
			if _, err := b.Withdraw(t.Context(), claim(1).Machine, "a"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newSweepFixture(t)
			before(t, b)
			b.current(t)
			b.clock.pass(DefaultCertificateLife)
			half(t, b.Kube, claim(1))
			b.current(t)
			b.clock.pass(holdMargin + time.Minute)
			next := nextOfName()
			if err := b.Check(t.Context(), next); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_TAKEN {
				t.Errorf("another machine has the name: %v", err)
			}
			next.Node, next.Addresses = "w2", claim(1).Addresses
			if err := b.Check(t.Context(), next); attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
				t.Errorf("another machine has the address: %v", err)
			}
			b.after(t, 0)
			if shared.Node(t, "w1") == nil {
				t.Error("the enrollment has ended")
			}
			b.clock.pass(DefaultCertificateLife)
			if err := b.Check(t.Context(), nextOfName()); err != nil {
				t.Errorf("once every certificate has expired: %v", err)
			}
		})
	}
}

// The same for the rule that ends the enrollment of a vanished worker.
func TestAFailedTicketHoldsAVanishedName(t *testing.T) {
	b := newSweepFixture(t)
	enroll(t, b.Kube, claim(1), "a")
	seen(t, b.Kube, holds("a"))
	b.after(t, 0)
	b.after(t, 61*time.Minute)
	b.vanished(t, vanishedNeverCame)
	b.clock.pass(25 * time.Hour)
	half(t, b.Kube, claim(1))
	b.after(t, 2*time.Minute)
	if shared.Node(t, "w1") == nil {
		t.Error("its enrollment has ended two minutes after certificates were issued")
	}
}

// J4: requests of a kubelet end with its enrollment, by whichever rule that ends.
func TestARequestThatWaitsEndsWithItsEnrollment(t *testing.T) {
	b := newSweepFixture(t)
	old, _ := kubelet(t)
	enroll(t, b.Kube, claim(1), "a")
	seen(t, b.Kube, holds("a"))
	o := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "csr-old"},
		Spec:       certificatesv1.CertificateSigningRequestSpec{Request: request(t), SignerName: signerOf[nodecert.Client], Usages: usagesOf[nodecert.Client]},
	}
	if err := old.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(len(b.requests.of("w1")) == 1, "the request was not seen yet")
	})
	b.after(t, 0)
	b.after(t, 61*time.Minute)
	b.after(t, 25*time.Hour+2*time.Minute)
	if shared.Node(t, "w1") != nil {
		t.Fatal("the enrollment is still there")
	}
	if left := shared.CSRs(t); len(left) > 0 {
		t.Errorf("requests are left: %v", left)
	}
}

// A request that no replica has seen is older than the enrollment of the next machine of the name.
func TestARequestOfBeforeTheEnrollmentIsDenied(t *testing.T) {
	now := time.Now()
	o := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-2 * time.Hour))}}
	o.Spec.Username = nodecert.UserPrefix + "w1"
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1", CreationTimestamp: metav1.NewTime(now)}}
	if err := (&Approver{}).check(o, n); attest.ReasonOf(err) != attestv1.Reason_REASON_CERTIFICATE_RETIRED {
		t.Errorf("%v, want CERTIFICATE_RETIRED", err)
	}
}

// A node that was restored without its status, and has attested since, is not a failed ticket.
func TestANodeThatAttestsIsNotVacant(t *testing.T) {
	b := newSweepFixture(t)
	enroll(t, b.Kube, claim(1), "a")
	b.object(t, true)
	b.status(t, func(s *v1alpha1.AttestedNodeStatus) { s.Ticket, s.LastVerdict, s.Certificates = nil, nil, nil }) // as restored
	b.after(t, 25*time.Hour)
	b.attests(t)
	b.current(t)
	b.object(t, false)
	b.after(t, 0)
	if shared.Node(t, "w1") == nil {
		t.Error("its enrollment has ended, and its certificates live")
	}
}

// A client that claims values of a node, and disconnects before its claim is checked again, blocks nothing of the node.
func TestAClaimThatWasOnlyBegunKeepsNothingFromANode(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	victim := elsewhere(claim(2))
	victim.Node, victim.Disk = "w2", diskTwo
	enroll(t, a, victim, "b")
	seen2 := func() error {
		n := a.cluster.Nodes.ByName("w2")
		return membertest.Want(n != nil && n.Status.Ticket != nil, "w2 is not seen yet")
	}
	membertest.Eventually(t, seen2)
	thief := claim(1)
	thief.Addresses, thief.Disk = victim.Addresses, victim.Disk
	// This is as if its replica had not seen w2 when it wrote, and had then crashed.
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{
		Name: "w1", Finalizers: []string{v1alpha1.RetireCertificates},
		Annotations: map[string]string{v1alpha1.EnrolledByTicket: "true", v1alpha1.AttestationKey: thief.AK, v1alpha1.AskedAt: utc(time.Now())},
	}, Spec: thief.spec()}
	if err := shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	seen(t, a, a.begun)
	if err := a.Check(t.Context(), victim); err != nil {
		t.Errorf("the node asks for a ticket: %v", err)
	}
	if err := a.Check(t.Context(), thief); err == nil {
		t.Error("the thief's claim fits")
	}
}

// Enroll removes an unfinished claim although its caller has disconnected.
func TestAClaimIsLookedAtAgainWhoeverGoesAway(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	ctx, cancel := context.WithCancel(t.Context())
	hung := a.cluster.Client
	a.cluster.Client = after{hung, cancel}
	defer func() { a.cluster.Client = hung }()
	if _, err := a.Enroll(ctx, claim(1)); err != nil {
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

// controlPlane lists a control plane, and returns a function that renews its Lease by a clock that differs by off.
func controlPlane(t *testing.T, name string, off time.Duration) func() {
	t.Helper()
	shared.SetAccess(t, name, func(e nodeaccess.Entry) nodeaccess.Entry {
		e.ControlPlane = true
		return e
	})
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: name}}
	_ = shared.Client.Delete(t.Context(), l.DeepCopy()) // of an earlier test
	renew := func() {
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(off)}
		var err error
		if l.ResourceVersion == "" {
			err = shared.Client.Create(t.Context(), l)
		} else {
			err = shared.Client.Update(t.Context(), l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	renew()
	t.Cleanup(func() { _ = shared.Client.Delete(context.WithoutCancel(t.Context()), l) })
	return renew
}

// looksAgain makes the replica read the clocks again.
func (k *Kube) looksAgain(t *testing.T) {
	t.Helper()
	k.clocks.mu.Lock()
	k.clocks.looked = time.Now().Add(-clocksEvery)
	k.clocks.mu.Unlock()
	k.lookAtClocks(t.Context())
}

// J4: a control plane with a wrong clock neither ends a revocation nor creates one that ends early, while the clock of
// another one is right.
func TestOneWrongClockEndsNoRevocation(t *testing.T) {
	for name, off := range map[string]time.Duration{"ahead": 25 * time.Hour, "behind": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			shared.Reset(t)
			k, _ := replica(t, func(k *Kube) { k.now = func() time.Time { return time.Now().Add(off) } })
			own, other := controlPlane(t, "cp1", off), controlPlane(t, "cp2", 0)
			shared.SetAccess(t, "w1", revoked)
			membertest.Eventually(t, func() error {
				e, _ := k.access.entry("w1")
				cp, _ := k.access.entry("cp2")
				return membertest.Want(e.Revoked != nil && cp.ControlPlane, "the replica's view is old")
			})
			if c := k.clock(); !c.Earliest.IsZero() {
				t.Errorf("before anything is known, revocations lapse by %s", c.Earliest)
			}
			k.lookAtClocks(t.Context())
			if c := k.clock(); !c.Earliest.IsZero() {
				t.Errorf("after one look, revocations lapse by %s", c.Earliest)
			}
			own()
			other()
			k.looksAgain(t)
			c, right := k.clock(), time.Now()
			if c.Earliest.After(right.Add(time.Minute)) || c.Latest.Before(right.Add(-time.Minute)) {
				t.Errorf("at %s: %+v", right, c)
			}
			if err := k.settle(t.Context(), "w1"); err != nil {
				t.Fatal(err)
			}
			if e := shared.Access(t).Entry("w1"); e.Revoked == nil {
				t.Error("the revocation is gone")
			}
			// A control plane that is down does not count.
			k.clocks.mu.Lock()
			is := k.clocks.of["cp2"]
			is.seen = is.seen.Add(-clockRuns)
			k.clocks.of["cp2"] = is
			k.clocks.mu.Unlock()
			if c := k.clock(); c.Earliest.Sub(time.Now().Add(off)).Abs() > time.Minute || c.Latest.Sub(time.Now().Add(off)).Abs() > time.Minute {
				t.Errorf("alone: %+v", c)
			}
		})
	}
}
