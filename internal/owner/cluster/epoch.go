package cluster

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/internal/clusterinfo"
)

// BehindRemedy says what to do about a cluster that was put back.
const BehindRemedy = "Somebody restored the disks of control planes, or etcd, from an earlier copy: docs/recovery.md#a-cluster-that-was-set-back says what to do."

// epoch reads the cluster's epoch, which control planes count.
func (c *Client) epoch(ctx context.Context, s *Status, _ time.Time) (err error) {
	s.Epoch, err = c.Epoch(ctx)
	return err
}

// Epoch returns the cluster's epoch; 0: nobody has counted yet.
func (c *Client) Epoch(ctx context.Context) (uint64, error) {
	var m corev1.ConfigMap
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: clusterinfo.EpochMap}, &m); err != nil {
		if Absent(err) {
			return 0, nil
		}
		return 0, err
	}
	n, err := strconv.ParseUint(m.Data["epoch"], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("ConfigMap %s/%s: epoch: %w", Namespace, clusterinfo.EpochMap, err)
	}
	return n, nil
}

// epochOf gives what a control plane's machine says of the cluster's epoch on its Node; 0: nothing. No worker knows one, whatever its Node says.
func epochOf(n *corev1.Node) uint64 {
	if _, is := n.Labels[clusterinfo.ControlPlaneLabel]; !is {
		return 0
	}
	e, err := strconv.ParseUint(n.Annotations[clusterinfo.EpochAnnotation], 10, 64)
	if err != nil {
		return 0
	}
	return e
}

// Behind says which control planes know a newer epoch than the cluster has: it was put back (B7). Empty: none.
func (s *Status) Behind() string {
	var ahead []string
	for _, n := range s.Nodes {
		if n.Epoch > s.Epoch {
			ahead = append(ahead, fmt.Sprintf("%s knows %d", n.Name, n.Epoch))
		}
	}
	if len(ahead) == 0 {
		return ""
	}
	return fmt.Sprintf("the cluster is at epoch %d, and %s", s.Epoch, strings.Join(ahead, ", "))
}
