package clusterapi

import (
	"context"
	"errors"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// heartbeatOld is the age from which a kubelet's last heartbeat does not support the Node's condition Ready. kube-controller-manager changes the
// condition after 50 s by default (--node-monitor-grace-period), but after all machines were off, it may not run yet. The kubelet writes the
// times by its own clock, with an allowed difference of a minute, as in doctor.
const heartbeatOld = 50*time.Second + time.Minute

// heartbeats reads the Leases that kubelets renew every ten seconds. They write the condition itself only every five minutes.
func (c *Client) heartbeats(ctx context.Context, s *Status, _ time.Time) error {
	_, now, err := c.readyz(ctx)
	if errors.Is(err, errNoClock) {
		return nil // without a clock to compare with, the conditions count
	}
	if err != nil {
		return err
	}
	renewed, err := c.renewals(ctx)
	if err != nil {
		return err
	}
	for i := range s.Nodes {
		s.Nodes[i].heard(renewed[s.Nodes[i].Name], now)
	}
	return nil
}

// renewals returns when kubelets renewed their Leases, by node.
func (c *Client) renewals(ctx context.Context) (map[string]time.Time, error) {
	var leases coordinationv1.LeaseList
	if err := c.client.List(ctx, &leases, client.InNamespace(corev1.NamespaceNodeLease)); err != nil {
		return nil, err
	}
	renewed := map[string]time.Time{}
	for _, l := range leases.Items {
		if l.Spec.RenewTime != nil {
			renewed[l.Name] = l.Spec.RenewTime.Time
		}
	}
	return renewed, nil
}

// Silent returns the nodes whose kubelets do not renew their Leases within a time that is longer than the renewal interval of ten seconds. The
// conditions of their Nodes change only after 50 s.
func (c *Client) Silent(ctx context.Context, nodes []string, within time.Duration) (silent []string, err error) {
	listen, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var first map[string]time.Time
	silent = nodes
	err = until(listen, func(context.Context) (bool, error) {
		now, err := c.renewals(ctx) // the last request may end after that time
		if err != nil {
			return false, err
		}
		if first == nil {
			first = now
		}
		silent = slices.DeleteFunc(slices.Clone(silent), func(n string) bool { return !now[n].Equal(first[n]) })
		return len(silent) == 0, nil
	})
	if first != nil && ctx.Err() == nil && errors.Is(listen.Err(), context.DeadlineExceeded) {
		return silent, nil
	}
	return silent, err
}

// heard stores the time of the kubelet's last renewal, by the API server's clock. A Node without a running kubelet is not
// Ready.
func (s *NodeStatus) heard(renewed, now time.Time) {
	if s.Heartbeat != nil && s.Heartbeat.After(renewed) {
		renewed = *s.Heartbeat
	}
	if s.Heartbeat = &renewed; renewed.IsZero() {
		s.Heartbeat = nil
	}
	if s.Ready && now.Sub(renewed) > heartbeatOld {
		s.Ready, s.ReadySince, s.Stale, s.silence = false, nil, true, now.Sub(renewed)
	}
}

// silent describes the time since the last heartbeat of a stale node's kubelet.
func (s *NodeStatus) silent() string {
	if s.Heartbeat == nil {
		return "has never renewed its Lease"
	}
	return "has not renewed its Lease for " + s.silence.Round(time.Second).String()
}
