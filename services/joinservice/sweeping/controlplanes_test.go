package sweeping

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// The enrollments decide which nodes may show static pods: also that of the first machine, and of nodes that are older than
// Muster.
func TestEnrolledControlPlanesAreListed(t *testing.T) {
	b := newSweepFixture(t)
	id := func(i byte) string { return attest.MachineID{i}.String() }
	servicetest.Shared.Enroll(t, "c1", v1alpha1.AttestedNodeSpec{MachineID: id(11), Role: v1alpha1.RoleControlPlane})
	n := servicetest.Shared.Node(t, "c1")
	n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}
	if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	servicetest.Shared.Enroll(t, "c2", v1alpha1.AttestedNodeSpec{MachineID: id(12), Role: v1alpha1.RoleControlPlane}) // has no ticket yet
	servicetest.Shared.Enroll(t, "w2", v1alpha1.AttestedNodeSpec{MachineID: id(13), Role: v1alpha1.RoleWorker})
	for name, labels := range map[string]map[string]string{"before": {clusterinfo.ControlPlaneLabel: ""}, "before-w": nil, "w2": {clusterinfo.ControlPlaneLabel: ""}} {
		o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		if err := servicetest.Shared.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = servicetest.Shared.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	servicetest.Shared.SetAccess(t, "before", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true} })
	servicetest.Shared.SetAccess(t, "before-w", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true, ControlPlane: true} })
	for _, name := range []string{"gone", "w2"} {
		servicetest.Shared.SetAccess(t, name, func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{ControlPlane: true} })
	}
	membertest.Eventually(t, func() error {
		b.after(t, time.Second)
		got := servicetest.ControlPlanes(t)
		return membertest.Want(slices.Equal(got, []string{"before", "c1"}), "control planes: %v, want before and c1", got)
	})
}
