package sweeping

import (
	"context"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// kubectl wait --for=condition=Revoked ends once the node may not write, and not before.
func TestConditionsFollowABan(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	e := a.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	servicetest.Serve(t, func(ctx context.Context) error { return e.Serve(ctx, func(attest.MachineID) {}) })
	want := func(kind, status string) {
		t.Helper()
		membertest.Eventually(t, func() error {
			c := meta.FindStatusCondition(servicetest.Shared.Node(t, "w1").Status.Conditions, kind)
			if c == nil {
				return fmt.Errorf("no condition %s", kind)
			}
			got := string(c.Status) + " " + c.Reason
			return membertest.Want(got == status, "%s is %s, want %s", kind, got, status)
		})
	}
	want(v1alpha1.ConditionEnrolled, "True TicketIssued")
	want(v1alpha1.ConditionRevoked, "False NotRevoked")
	servicetest.Ban(t, true)
	want(v1alpha1.ConditionRevoked, "True Banned")
	if !servicetest.Suspended(t, "w1") {
		t.Error("Revoked, and the node may write")
	}
	servicetest.Ban(t, false)
	want(v1alpha1.ConditionRevoked, "False NotRevoked")
}

// An enrollment that an earlier version or an administrator left without conditions gets them at the next pass.
func TestTheSweeperWritesConditions(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: servicetest.Claim(1).Machine.String(), Role: v1alpha1.RoleWorker})
	for range 2 { // the first one adds the finalizer
		b.after(t, 0)
	}
	c := meta.FindStatusCondition(servicetest.Shared.Node(t, "w1").Status.Conditions, v1alpha1.ConditionEnrolled)
	if c == nil || c.Reason != "WaitingForMachine" {
		t.Errorf("%+v", c)
	}
}
