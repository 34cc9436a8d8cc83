package clusterapi

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"

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
