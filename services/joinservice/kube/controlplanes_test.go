package kube

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/trust/attest"
)

// Who may show static pods is what the enrollments say: also of the first machine, and of those that an earlier version enrolled.
func TestEnrolledControlPlanesAreListed(t *testing.T) {
	b := newBroom(t)
	id := func(i byte) string { return attest.MachineID{i}.String() }
	shared.Enrol(t, "c1", v1alpha1.AttestedNodeSpec{MachineID: id(11), Role: v1alpha1.RoleControlPlane})
	shared.Enrol(t, "c2", v1alpha1.AttestedNodeSpec{MachineID: id(12), Role: v1alpha1.RoleControlPlane}) // has no ticket yet
	shared.Enrol(t, "w2", v1alpha1.AttestedNodeSpec{MachineID: id(13), Role: v1alpha1.RoleWorker})
	for name, labels := range map[string]map[string]string{"before": {clusterinfo.ControlPlaneLabel: ""}, "before-w": nil, "w2": {clusterinfo.ControlPlaneLabel: ""}} {
		o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		if err := shared.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = shared.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	for name, machine := range map[string]string{"c1": id(11), "w2": id(13), "before": enrolled.Unattested, "before-w": enrolled.Unattested, enrolled.ControlPlanes: "before-w gone w2"} {
		setListed(t, name, machine)
	}
	membertest.Eventually(t, func() error {
		seen := b.cluster.Nodes.ByName("w2") != nil && b.cluster.Nodes.ByName("c1") != nil && b.nodes.has("before") && b.nodes.has("before-w") && len(b.enrolled.all()) == 5
		return membertest.Want(seen, "the replica's view is old")
	})
	b.settleControlPlanes(t.Context())
	if got := shared.Listed(t)[enrolled.ControlPlanes]; got != "before c1" {
		t.Errorf("control planes: %q, want before c1", got)
	}
}

// Tickets of several replicas lose none of each other's control planes, and a name that becomes a worker's is one no more.
func TestATicketListsItsControlPlane(t *testing.T) {
	b := newBroom(t)
	setListed(t, enrolled.ControlPlanes, "w1")
	var wg sync.WaitGroup
	for i := range 3 { // of that many replicas
		wg.Go(func() {
			if _, err := b.list(t.Context(), fmt.Sprintf("c%d", i), attest.MachineID{byte(20 + i)}.String(), v1alpha1.RoleControlPlane); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Go(func() {
		m, err := b.list(t.Context(), "w1", attest.MachineID{30}.String(), v1alpha1.RoleWorker)
		if err != nil {
			t.Error(err)
		} else if names := strings.Fields(m.Data[enrolled.ControlPlanes]); len(names) > 0 && names[len(names)-1] == "w1" {
			t.Errorf("a worker counts as a control plane: %v", names)
		}
	})
	wg.Wait()
	if got := shared.Listed(t)[enrolled.ControlPlanes]; got != "c0 c1 c2" {
		t.Errorf("control planes: %q", got)
	}
}
