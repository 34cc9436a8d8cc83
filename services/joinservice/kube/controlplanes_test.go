package kube

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
	"github.com/muster-k8s/muster/trust/attest"
)

func controlPlanes(t *testing.T) []string {
	t.Helper()
	l := shared.Access(t)
	return slices.DeleteFunc(l.Nodes(), func(node string) bool { return !l.Entry(node).ControlPlane })
}

// The enrollments decide which nodes may show static pods: also that of the first machine, and of nodes that are older than
// Muster.
func TestEnrolledControlPlanesAreListed(t *testing.T) {
	b := newSweepFixture(t)
	id := func(i byte) string { return attest.MachineID{i}.String() }
	shared.Enroll(t, "c1", v1alpha1.AttestedNodeSpec{MachineID: id(11), Role: v1alpha1.RoleControlPlane})
	n := shared.Node(t, "c1")
	n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}
	if err := shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	shared.Enroll(t, "c2", v1alpha1.AttestedNodeSpec{MachineID: id(12), Role: v1alpha1.RoleControlPlane}) // has no ticket yet
	shared.Enroll(t, "w2", v1alpha1.AttestedNodeSpec{MachineID: id(13), Role: v1alpha1.RoleWorker})
	for name, labels := range map[string]map[string]string{"before": {clusterinfo.ControlPlaneLabel: ""}, "before-w": nil, "w2": {clusterinfo.ControlPlaneLabel: ""}} {
		o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		if err := shared.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = shared.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	shared.SetAccess(t, "before", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true} })
	shared.SetAccess(t, "before-w", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true, ControlPlane: true} })
	for _, name := range []string{"gone", "w2"} {
		shared.SetAccess(t, name, func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{ControlPlane: true} })
	}
	membertest.Eventually(t, func() error {
		b.after(t, time.Second)
		got := controlPlanes(t)
		return membertest.Want(slices.Equal(got, []string{"before", "c1"}), "control planes: %v, want before and c1", got)
	})
}

// A control plane is listed as such when it gets its ticket: its kubelet shows static pods from its first minute.
func TestATicketListsItsControlPlane(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	c := claim(1)
	c.Role = v1alpha1.RoleControlPlane
	shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: c.Role})
	seen(t, a, func(*v1alpha1.AttestedNode) bool { return true })
	enroll(t, a, c, "a")
	if got := controlPlanes(t); !slices.Equal(got, []string{"w1"}) {
		t.Errorf("control planes: %v", got)
	}
}
