package crash

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// killsAControlPlane kills the bootstrapper of a second control plane in each phase of its join, also during kubeadm:
// before, while and after its etcd becomes a member. It ends as a control plane, and etcd has two voters and nothing
// from the failed attempts.
func (r *realLab) killsAControlPlane(t *testing.T) {
	r.t = t
	const name = "node6"
	m, err := r.AddNode(t.Context(), driver.Node{Name: name, Role: "control-plane", JoinEndpoints: []string{labtest.Joinservice}})
	if err != nil {
		t.Fatal(err)
	}
	id := r.MachineID(t, m.Address)
	v := r.victim(name)
	r.Muster(t, "enroll", name, "--role", "control-plane", "--machine-id", id)
	for _, at := range []point{
		{"waiting", phase("WAITING")},
		{"locked", phase("LOCKED")},
		{"disk", phase("DISK")},
		{"components", phase("COMPONENTS")},
		{"configured", says("certificates and configuration are in place")},
		{"kubeadm preflight", says("kubeadm join: preflight")},
		{"kubeadm certs", says("kubeadm join: certs")},
		{"kubeadm kubeconfig", says("kubeadm join: kubeconfig")},
		{"kubeadm control-plane", says("kubeadm join: control-plane")},
		{"kubeadm kubelet-start", says("kubeadm join: kubelet-start")},
		{"kubeadm etcd", says("kubeadm join: etcd")},
		{"kubeadm mark-control-plane", says("kubeadm join: mark-control-plane")},
		{"kubeadm has finished", phase("KUBEADM")},
	} {
		v.killAt(at.what, at.fits)
	}
	v.joined()
	r.Ready(t, name)
	labtest.Eventually(t, func(ctx context.Context) error {
		voters, learners, err := r.Members(ctx, "node1")
		if err == nil && (!slices.Equal(voters, []string{"node1", name}) || len(learners) > 0) {
			err = fmt.Errorf("etcd has voters %v, learners %v", voters, learners)
		}
		return err
	})
	t.Log(r.MustKubectl(t, "get", "nodes,attestednodes"))
}
