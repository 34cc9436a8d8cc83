package access_test

import (
	"context"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
)

// controlPlane lists a control plane, and returns a function that renews its Lease by a clock that differs by off.
func controlPlane(t *testing.T, name string, off time.Duration) func() {
	t.Helper()
	servicetest.Shared.SetAccess(t, name, func(e nodeaccess.Entry) nodeaccess.Entry {
		e.ControlPlane = true
		return e
	})
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: name}}
	_ = servicetest.Shared.Client.Delete(t.Context(), l.DeepCopy()) // of an earlier test
	renew := func() {
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(off)}
		var err error
		if l.ResourceVersion == "" {
			err = servicetest.Shared.Client.Create(t.Context(), l)
		} else {
			err = servicetest.Shared.Client.Update(t.Context(), l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	renew()
	t.Cleanup(func() { _ = servicetest.Shared.Client.Delete(context.WithoutCancel(t.Context()), l) })
	return renew
}

// J4: a control plane with a wrong clock neither ends a revocation nor creates one that ends early, while the clock of
// another one is right.
func TestOneWrongClockEndsNoRevocation(t *testing.T) {
	for name, off := range map[string]time.Duration{"ahead": 25 * time.Hour, "behind": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			k := servicetest.New(t, func(k *servicetest.Rooms) { k.State.Now = func() time.Time { return time.Now().Add(off) } })
			own, other := controlPlane(t, "cp1", off), controlPlane(t, "cp2", 0)
			servicetest.Shared.SetAccess(t, "w1", servicetest.Revoked)
			membertest.Eventually(t, func() error {
				e, _ := k.List.Entry("w1")
				cp, _ := k.List.Entry("cp2")
				return membertest.Want(e.Revoked != nil && cp.ControlPlane, "the replica's view is old")
			})
			if c := k.List.Clock(); !c.Earliest.IsZero() {
				t.Errorf("before anything is known, revocations lapse by %s", c.Earliest)
			}
			k.List.LookAtClocks(t.Context())
			if c := k.List.Clock(); !c.Earliest.IsZero() {
				t.Errorf("after one look, revocations lapse by %s", c.Earliest)
			}
			own()
			other()
			k.List.LookAgain(t.Context())
			c, right := k.List.Clock(), time.Now()
			if c.Earliest.After(right.Add(time.Minute)) || c.Latest.Before(right.Add(-time.Minute)) {
				t.Errorf("at %s: %+v", right, c)
			}
			if err := k.List.Settle(t.Context(), "w1"); err != nil {
				t.Fatal(err)
			}
			if e := servicetest.Shared.Access(t).Entry("w1"); e.Revoked == nil {
				t.Error("the revocation is gone")
			}
			// A control plane that is down does not count.
			k.List.Stop("cp2")
			if c := k.List.Clock(); c.Earliest.Sub(time.Now().Add(off)).Abs() > time.Minute || c.Latest.Sub(time.Now().Add(off)).Abs() > time.Minute {
				t.Errorf("alone: %+v", c)
			}
		})
	}
}
