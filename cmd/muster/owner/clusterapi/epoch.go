package clusterapi

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// BehindRemedy is the remedy for a cluster that was restored to an earlier state.
const BehindRemedy = "The disks of control planes, or etcd, were restored from an earlier copy. What to do: docs/recovery.md#a-cluster-that-was-rolled-back."

// epoch reads the cluster's epoch, which control planes increment.
func (c *Client) epoch(ctx context.Context, s *Status, _ time.Time) (err error) {
	s.Epoch, s.History, err = c.Epoch(ctx)
	return err
}

// Epoch returns the cluster's epoch and its history; 0 if no control plane has increased it yet.
func (c *Client) Epoch(ctx context.Context) (uint64, clusterinfo.History, error) {
	var m corev1.ConfigMap
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: clusterinfo.EpochMap}, &m); err != nil {
		if Absent(err) {
			return 0, nil, nil
		}
		return 0, nil, err
	}
	n, err := strconv.ParseUint(m.Data["epoch"], 10, 64)
	if err != nil {
		return 0, nil, fmt.Errorf("ConfigMap %s/%s: epoch: %w", Namespace, clusterinfo.EpochMap, err)
	}
	history, err := clusterinfo.ParseHistory(m.Data["history"])
	if err != nil {
		return 0, nil, fmt.Errorf("ConfigMap %s/%s: %w", Namespace, clusterinfo.EpochMap, err)
	}
	return n, history, nil
}

// epochOf returns the cluster's epoch that a control plane's machine reports on its Node; zero if there is none. A
// worker has none, whatever its Node reports.
func epochOf(n *corev1.Node) clusterinfo.HistoryEpoch {
	if _, is := n.Labels[clusterinfo.ControlPlaneLabel]; !is {
		return clusterinfo.HistoryEpoch{}
	}
	e, err := clusterinfo.ParseEpoch(n.Annotations[clusterinfo.EpochAnnotation])
	if err != nil {
		return clusterinfo.HistoryEpoch{}
	}
	return e
}

// Behind returns the control planes that know an epoch which the cluster does not have, because the cluster was
// restored to an earlier state (B7).
func (s *Status) Behind() string {
	var ahead []string
	for _, n := range s.Nodes {
		switch lacks := s.History.Lacks(clusterinfo.HistoryEpoch{Number: n.Epoch, ID: n.EpochID}); {
		case n.Epoch > s.Epoch:
			ahead = append(ahead, fmt.Sprintf("%s knows %d", n.Name, n.Epoch))
		case lacks != "":
			ahead = append(ahead, fmt.Sprintf("%s knows %d:%s, and %s", n.Name, n.Epoch, n.EpochID, lacks))
		}
	}
	if len(ahead) == 0 {
		return ""
	}
	return fmt.Sprintf("the cluster is at epoch %d, and %s", s.Epoch, strings.Join(ahead, ", "))
}
