package sweeping

import (
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// A node that is older than Muster keeps its access and its name until the owner removes it.
func TestAnUnattestedNodeGoesOnUntilTheOwnerForgetsIt(t *testing.T) {
	b := newSweepFixture(t)
	unattested := func(e nodeaccess.Entry) nodeaccess.Entry {
		e.Unattested = true
		return e
	}
	servicetest.Shared.SetAccess(t, "w1", unattested)
	for range 3 {
		b.after(t, time.Minute)
	}
	if e := servicetest.Shared.Access(t).Entry("w1"); !e.Equal(unattested(nodeaccess.Entry{})) {
		t.Errorf("the list says %+v", e)
	}
	if err := b.Check(t.Context(), servicetest.Claim(1)); attest.ReasonOf(err) != attestv1.Reason_REASON_NODE_EXISTS {
		t.Errorf("a machine that asks for the name: %v, want NODE_EXISTS", err)
	}
}

// Whatever the list has, it ends as in the enrollment, also if several replicas write it.
func TestTheListFollowsTheEnrollment(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	e := a.Enforcer
	b := newReplica(t)
	other := b.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	servicetest.Seen(t, b.Rooms, servicetest.Holds("a"))
	enforce(t, e)
	enforce(t, other)
	is := func(want bool) {
		t.Helper()
		membertest.Eventually(t, func() error { return membertest.Want(servicetest.Suspended(t, "w1") == want, "suspended: %t", !want) })
	}
	servicetest.Ban(t, true)
	is(true)
	servicetest.Suspend(t, "w1", false) // by hand
	is(true)
	servicetest.Ban(t, false)
	is(false)
	servicetest.Suspend(t, "w1", true)
	is(false)
}

// Connections of a banned machine are closed even if the API server answers nothing, neither to the ban's own request nor
// to others'.
func TestABanCutsConnectionsBeforeAnyRequest(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	e := a.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	servicetest.Seen(t, a.Rooms, servicetest.Holds("a"))
	a.State.Cluster.Client = hanging{a.State.Cluster.Client, t.Context()}
	e.mu.Lock()
	e.add("other") // from before; it hangs
	e.mu.Unlock()
	cut := enforce(t, e)
	servicetest.Ban(t, true)
	select {
	case m := <-cut:
		if m != servicetest.Claim(1).Machine {
			t.Errorf("cut %s", m)
		}
	case <-time.After(5 * time.Minute):
		t.Error("the machine is still connected")
	}
}
