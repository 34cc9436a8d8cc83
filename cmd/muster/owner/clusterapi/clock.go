package clusterapi

import (
	"context"
	"time"
)

// ServerTime returns the API server's clock, in whole seconds. Times in the cluster's records are compared with it, because
// this computer's clock may be wrong.
func (c *Client) ServerTime(ctx context.Context) (time.Time, error) { return c.serverTime(ctx) }

// ReadyNodes returns the names of the Nodes that are Ready: their kubelets renew their Leases. kube-controller-manager compares each renewal with the one
// before, so this depends on no clock of a machine.
func (c *Client) ReadyNodes(ctx context.Context) (map[string]bool, error) {
	nodes, err := c.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for i := range nodes {
		out[nodes[i].Name] = IsReady(&nodes[i])
	}
	return out, nil
}
