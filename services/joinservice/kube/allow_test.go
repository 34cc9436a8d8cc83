package kube

import (
	"log/slog"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// The owner removes a name while its machine renews certificates. Whichever of the owner's writes have arrived by then, the
// new certificate may not write (J4).
func TestARenewalThatMeetsTheOwnersRevocationIsRefused(t *testing.T) {
	shared.Reset(t)
	k := &Kube{cluster: &clusterview.Cluster{Client: shared.Client}, log: slog.New(slog.DiscardHandler), access: &accessView{}}
	renewed := signed("renewed")
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
			shared.Reset(t)
			shared.SetAccess(t, "w1", revoked)
			shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: claim(1).Machine.String(), Role: v1alpha1.RoleWorker, Banned: true})
			decided := shared.Node(t, "w1")
			n := decided.DeepCopy()
			n.Spec.Banned = false
			tt.meanwhile(n)
			if n.UID == "" {
				shared.Reset(t)
				shared.SetAccess(t, "w1", revoked)
				shared.Enroll(t, "w1", n.Spec)
			} else if err := shared.Client.Update(t.Context(), n); err != nil {
				t.Fatal(err)
			}
			err := k.allow(t.Context(), decided, renewed)
			if got := attest.ReasonOf(err) == attestv1.Reason_REASON_BANNED; got != tt.refused || !tt.refused && err != nil {
				t.Errorf("%v, want it refused: %v", err, tt.refused)
			}
			if r := shared.Access(t).Entry("w1").Revoked; r == nil || r.Allows(nodeaccess.ID(renewed)) == tt.refused {
				t.Errorf("revoked: %+v", r)
			}
		})
	}
}
