package enroll_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// J4, J7: what the owner does while the certificate is being signed counts, also if no older one is revoked.
func TestABanDuringARenewalKeepsTheCertificate(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		meanwhile func(t *testing.T, n *v1alpha1.AttestedNode)
		want      attestv1.Reason
	}{
		"nothing happens": {func(*testing.T, *v1alpha1.AttestedNode) {}, attestv1.Reason_REASON_ACCEPTED},
		"it is banned": {func(t *testing.T, n *v1alpha1.AttestedNode) {
			t.Helper()
			n.Spec.Banned = true
			if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}, attestv1.Reason_REASON_BANNED},
		"it is forgotten": {func(t *testing.T, n *v1alpha1.AttestedNode) {
			t.Helper()
			if err := servicetest.Shared.Client.Delete(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}, attestv1.Reason_REASON_BANNED},
	} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			k := servicetest.New(t)
			c := servicetest.Claim(1)
			servicetest.Enroll(t, k, c, "a")
			r, err := k.BeginRenewal(t.Context(), c, servicetest.Ticket("b"))
			if err != nil {
				t.Fatal(err)
			}
			tt.meanwhile(t, servicetest.Shared.Node(t, c.Node))
			got := attestv1.Reason_REASON_ACCEPTED
			if err := r.Allow(t.Context(), cert); err != nil {
				got = attest.ReasonOf(err)
			}
			if got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// lookingAtLease runs a function when a Lease is read for the first time.
type lookingAtLease struct {
	client.Client
	once *sync.Once
	do   func()
}

func (l lookingAtLease) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if _, ok := o.(*coordinationv1.Lease); ok {
		l.once.Do(l.do)
	}
	return l.Client.Get(ctx, key, o, opts...)
}

// lateWrite is a client of an etcd with a slow disk: the write of a kubelet is committed when a later write is.
type lateWrite struct {
	client.Client

	do func()
}

func (l lateWrite) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	if _, ok := o.(*coordinationv1.Lease); ok {
		l.do()
	}
	return l.Client.Create(ctx, o, opts...)
}

// J11: the kubelet of the boot before writes its Lease in time, and etcd commits that after the watch: its disk is slow, which reads do not show.
func TestAWriteOfTheLeaseThatIsCommittedLateCounts(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	c := servicetest.Claim(1)
	c.Boot = enroll.Boot{Reset: 1, Secret: keys.NewBootSecret(), Verified: time.Now()}
	servicetest.Enroll(t, k, c, "a")
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: c.Node}}
	lease.Spec.RenewTime = new(metav1.NowMicro())
	if err := servicetest.Shared.Client.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = servicetest.Shared.Client.Delete(context.WithoutCancel(t.Context()), lease) })
	c.Boot.Reset, c.Boot.Secret = 2, keys.NewBootSecret()
	for _, runs := range []bool{true, true, false} { // from the second time on, the Lease of this check exists
		direct := k.State.Cluster.Client
		k.State.Cluster.Client = lateWrite{direct, func() {
			if !runs {
				return
			}
			lease.Spec.RenewTime = new(metav1.NewMicroTime(lease.Spec.RenewTime.Add(time.Second)))
			if err := servicetest.Shared.Client.Update(t.Context(), lease); err != nil {
				t.Error(err)
			}
		}}
		_, err := k.BeginRenewal(t.Context(), c, servicetest.Ticket("b"))
		if reason := attest.ReasonOf(err); runs && reason != attestv1.Reason_REASON_MACHINE_CLONED || !runs && err != nil {
			t.Errorf("its kubelet runs: %v, %v", runs, err)
		}
		k.State.Cluster.Client = direct
	}
}

// growing is a client of an etcd with a slow disk. It answers the first read after the check's write late. The write of a kubelet is committed when the
// check's second write is.
type growing struct {
	client.Client

	late    time.Duration
	creates int
	do      func()
}

func (g *growing) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	if _, ok := o.(*coordinationv1.Lease); ok {
		if g.creates++; g.creates == 2 {
			g.do()
		}
	}
	return g.Client.Create(ctx, o, opts...)
}

func (g *growing) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if _, ok := o.(*coordinationv1.Lease); ok && g.creates == 1 && g.late > 0 {
		answer := time.NewTimer(g.late)
		defer answer.Stop()
		g.late = 0
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-answer.C:
		}
	}
	return g.Client.Get(ctx, key, o, opts...)
}

// J11: a slow read makes the watch longer. What the kubelet of the boot before writes until the end of the longer one counts, also if it is committed late.
func TestAWriteInALongerWatchThatIsCommittedLateCounts(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	c := servicetest.Claim(1)
	c.Boot = enroll.Boot{Reset: 1, Secret: keys.NewBootSecret(), Verified: time.Now()}
	servicetest.Enroll(t, k, c, "a")
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: c.Node}}
	lease.Spec.RenewTime = new(metav1.NowMicro())
	if err := servicetest.Shared.Client.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = servicetest.Shared.Client.Delete(context.WithoutCancel(t.Context()), lease) })
	c.Boot.Reset, c.Boot.Secret = 2, keys.NewBootSecret()
	g := &growing{Client: k.State.Cluster.Client, late: 500 * time.Millisecond, do: func() {
		lease.Spec.RenewTime = new(metav1.NewMicroTime(lease.Spec.RenewTime.Add(time.Second)))
		if err := servicetest.Shared.Client.Update(t.Context(), lease); err != nil {
			t.Error(err)
		}
	}}
	k.State.Cluster.Client = g
	if _, err := k.BeginRenewal(t.Context(), c, servicetest.Ticket("b")); attest.ReasonOf(err) != attestv1.Reason_REASON_MACHINE_CLONED {
		t.Errorf("its kubelet runs: %v, after %d writes", err, g.creates)
	}
}

// J11: while one replica checks whether the previous boot has ended, another replica records another boot.
func TestNoCertificatesForABootAfterOneThatNobodyHasLookedFor(t *testing.T) {
	servicetest.Shared.Reset(t)
	k, other := servicetest.New(t), servicetest.New(t)
	c := servicetest.Claim(1)
	c.Boot = enroll.Boot{Reset: 1, Secret: keys.NewBootSecret(), Verified: time.Now()}
	servicetest.Enroll(t, k, c, "a")
	servicetest.Seen(t, other, func(n *v1alpha1.AttestedNode) bool { return n != nil && n.Status.Boot != nil })
	between, later := c.Boot, c
	between.Reset, between.Secret = 2, keys.NewBootSecret()
	later.Boot.Reset, later.Boot.Secret = 3, keys.NewBootSecret()
	k.State.Cluster.Client = lookingAtLease{k.State.Cluster.Client, &sync.Once{}, func() {
		if _, _, err := other.Reattest(t.Context(), c.Machine, between, servicetest.Ticket("")); err != nil {
			t.Error(err)
		}
	}}
	if _, err := k.BeginRenewal(t.Context(), later, servicetest.Ticket("b")); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
		t.Errorf("%v, want API_UNAVAILABLE", err)
	}
	if b := servicetest.Shared.Node(t, c.Node).Status.Boot; b.ResetCount != 2 || b.EarlierEnded {
		t.Errorf("recorded is %+v", b)
	}
	if _, err := k.BeginRenewal(t.Context(), later, servicetest.Ticket("b")); err != nil { // after it has checked again
		t.Error(err)
	}
	if b := servicetest.Shared.Node(t, c.Node).Status.Boot; b.ResetCount != 3 || !b.EarlierEnded {
		t.Errorf("recorded is %+v", b)
	}
}

// J11: the attester and the bootstrapper of one machine ask at the same time, after it has booted without usable certificates.
func TestCertificatesForAMachineThatAttestsMeanwhile(t *testing.T) {
	const grace = time.Hour
	for name, tt := range map[string]struct {
		since    time.Duration // the previous boot was recorded so long ago
		attests  []uint32      // the boots that attest while the renewal checks the previous one
		before   bool          // they attest before it
		asks     uint32        // the boot that asks; 0: 3
		want     attestv1.Reason
		recorded int64
	}{
		"during the check":                    {2 * grace, []uint32{3}, false, 0, attestv1.Reason_REASON_ACCEPTED, 3},
		"twice":                               {2 * grace, []uint32{3, 3}, false, 0, attestv1.Reason_REASON_ACCEPTED, 3},
		"before it":                           {2 * grace, []uint32{3}, true, 0, attestv1.Reason_REASON_ACCEPTED, 3},
		"before it, soon after another boot":  {grace / 2, []uint32{3}, true, 0, attestv1.Reason_REASON_BUSY, 3},
		"before it, as a boot after another":  {2 * grace, []uint32{2, 3}, true, 0, attestv1.Reason_REASON_BUSY, 3},
		"before it, and a later boot asks":    {2 * grace, []uint32{3}, true, 4, attestv1.Reason_REASON_BUSY, 3},
		"during it, as a boot after another":  {2 * grace, []uint32{2, 3}, false, 0, attestv1.Reason_REASON_API_UNAVAILABLE, 3},
		"during it, as another boot, a later": {2 * grace, []uint32{4}, false, 0, attestv1.Reason_REASON_VERDICT_OLD, 4},
	} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			k, other := servicetest.New(t), servicetest.New(t)
			c := servicetest.Claim(1)
			c.Boot = enroll.Boot{Reset: 1, Secret: keys.NewBootSecret(), Verified: time.Now().Add(-tt.since)}
			servicetest.Enroll(t, k, c, "a")
			k.SetFirst(grace)
			servicetest.Seen(t, other, func(n *v1alpha1.AttestedNode) bool { return n != nil && n.Status.Boot != nil })
			later := c
			later.Boot = enroll.Boot{Reset: 3, Secret: keys.NewBootSecret(), Verified: time.Now()}
			attests := func() {
				for _, reset := range tt.attests {
					b := later.Boot
					if b.Reset = reset; reset != 3 {
						b.Secret, b.Verified = keys.NewBootSecret(), b.Verified.Add(time.Duration(reset)*time.Millisecond)
					}
					if _, _, err := other.Reattest(t.Context(), c.Machine, b, servicetest.Ticket("")); err != nil {
						t.Error(err)
					}
				}
			}
			if tt.before {
				attests()
			} else {
				k.State.Cluster.Client = lookingAtLease{k.State.Cluster.Client, &sync.Once{}, attests}
			}
			got := attestv1.Reason_REASON_ACCEPTED
			if tt.asks != 0 {
				later.Boot.Reset, later.Boot.Secret = tt.asks, keys.NewBootSecret()
			}
			_, err := k.BeginRenewal(t.Context(), later, servicetest.Ticket("b"))
			if err != nil {
				got = attest.ReasonOf(err)
			}
			b := servicetest.Shared.Node(t, c.Node).Status.Boot
			if got != tt.want || b.ResetCount != tt.recorded || b.EarlierEnded != (err == nil) || b.EarlierEnded != (b.EarlierSince == nil) {
				t.Errorf("%v, want %s; recorded is %+v", err, tt.want, b)
			}
		})
	}
}
