package clusterapi

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// ControlPlane is a control plane that should run a joinservice.
type ControlPlane struct {
	// Name is that of its node.
	Name string
	// MachineID is that of its enrollment.
	MachineID string
	// Addresses are those of its node, at least one.
	Addresses []string
}

// OtherControlPlanes returns the number of enrolled control planes besides the named one, and their problems. An API server
// is ready only while its etcd is.
func (c *Client) OtherControlPlanes(ctx context.Context, than string) (n int, problems []string, err error) {
	var enrolled v1alpha1.AttestedNodeList
	if err := c.client.List(ctx, &enrolled); err != nil {
		return 0, nil, err
	}
	for i := range enrolled.Items {
		e := &enrolled.Items[i]
		if e.Name == than || e.Spec.Role != v1alpha1.RoleControlPlane || e.ShutOut() {
			continue
		}
		n++
		node, pod := &corev1.Node{}, &corev1.Pod{}
		if err := client.IgnoreNotFound(c.client.Get(ctx, types.NamespacedName{Name: e.Name}, node)); err != nil {
			return 0, nil, err
		}
		if err := client.IgnoreNotFound(c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: "kube-apiserver-" + e.Name}, pod)); err != nil {
			return 0, nil, err
		}
		switch {
		case !IsReady(node):
			problems = append(problems, e.Name+" is not Ready")
		case !podReady(pod):
			problems = append(problems, "the API server of "+e.Name+" is not Ready")
		}
	}
	return n, problems, nil
}

// ControlPlanes returns the enrolled control planes that are nodes of the cluster and not banned.
func (c *Client) ControlPlanes(ctx context.Context) ([]ControlPlane, error) {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return nil, err
	}
	addresses := map[string][]string{}
	for _, n := range nodes.Items {
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				addresses[n.Name] = append(addresses[n.Name], a.Address)
			}
		}
	}
	var enrolled v1alpha1.AttestedNodeList
	if err := c.client.List(ctx, &enrolled); err != nil {
		return nil, err
	}
	var out []ControlPlane
	for _, n := range enrolled.Items {
		if a := addresses[n.Name]; n.Spec.Role == v1alpha1.RoleControlPlane && !n.Spec.Banned && len(a) > 0 {
			out = append(out, ControlPlane{Name: n.Name, MachineID: n.Spec.MachineID, Addresses: a})
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no enrolled control plane is a node of the cluster")
	}
	return out, nil
}
