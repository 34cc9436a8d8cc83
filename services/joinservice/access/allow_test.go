package access_test

import (
	"context"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/services/joinservice/sweeping"
	"github.com/muster-k8s/muster/trust/attest"
)

// The owner removes a name while its machine renews certificates. Whichever of the owner's writes have arrived by then, the
// new certificate may not write (J4).
func TestARenewalThatMeetsTheOwnersRevocationIsRefused(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	renewed := servicetest.Signed("renewed")
	for name, tt := range map[string]struct {
		meanwhile func(n *v1alpha1.AttestedNode)
		refused   bool
	}{
		"nothing happens":               {func(*v1alpha1.AttestedNode) {}, false},
		"its machine was banned":        {func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true }, true},
		"the name is another machine's": {func(n *v1alpha1.AttestedNode) { n.Spec.MachineID = attest.MachineID{9}.String() }, true},
		"the enrollment is another one": {func(n *v1alpha1.AttestedNode) { n.UID = "" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			servicetest.Shared.SetAccess(t, "w1", servicetest.Revoked)
			servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: servicetest.Claim(1).Machine.String(), Role: v1alpha1.RoleWorker, Banned: true})
			decided := servicetest.Shared.Node(t, "w1")
			n := decided.DeepCopy()
			n.Spec.Banned = false
			tt.meanwhile(n)
			if n.UID == "" {
				servicetest.Shared.Reset(t)
				servicetest.Shared.SetAccess(t, "w1", servicetest.Revoked)
				servicetest.Shared.Enroll(t, "w1", n.Spec)
			} else if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
				t.Fatal(err)
			}
			err := k.List.Allow(t.Context(), decided, renewed)
			if got := attest.ReasonOf(err) == attestv1.Reason_REASON_BANNED; got != tt.refused || !tt.refused && err != nil {
				t.Errorf("%v, want it refused: %v", err, tt.refused)
			}
			if r := servicetest.Shared.Access(t).Entry("w1").Revoked; r == nil || r.Allows(nodeaccess.ID(renewed)) == tt.refused {
				t.Errorf("revoked: %+v", r)
			}
		})
	}
}

// The replica that issues a ticket may not have seen yet that older certificates of the name were revoked: whichever it
// sees first, the ticket's certificate may finally write (J4).
func TestATicketUnderARevokedNameMayWriteInTheEnd(t *testing.T) {
	for name, unseen := range map[string]bool{"seen": false, "not seen yet": true} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			var e *sweeping.Enforcer
			a := servicetest.New(t, func(r *servicetest.Rooms) {
				var err error
				if e, err = sweeping.NewEnforcer(r.State, r.List, r.Requests); err != nil {
					t.Fatal(err)
				}
			})
			servicetest.Shared.SetAccess(t, "w1", servicetest.Revoked)
			membertest.Eventually(t, func() error {
				e, _ := a.List.Entry("w1")
				return membertest.Want(e.Revoked != nil, "the replica's view is old")
			})
			if unseen {
				a.List.Unsee()
			}
			servicetest.Enroll(t, a, servicetest.Claim(1), "a")
			allowed := func() bool {
				r := servicetest.Shared.Access(t).Entry("w1").Revoked
				return r != nil && r.Allows(nodeaccess.ID(servicetest.Signed("a")))
			}
			if unseen == allowed() {
				t.Fatalf("with the ticket, its certificate is allowed: %t", !unseen)
			}
			if !unseen {
				return
			}
			servicetest.Serve(t, func(ctx context.Context) error { return e.Serve(ctx, func(attest.MachineID) {}) })
			servicetest.Suspend(t, "w9", true) // the list changes, and the replica sees it
			membertest.Eventually(t, func() error { return membertest.Want(allowed(), "the ticket's certificate may not write") })
		})
	}
}
