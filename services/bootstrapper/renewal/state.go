package renewal

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"log/slog"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// State returns what the cluster says of itself to a control plane that makes a backup. owner may be nil: then the serial of the policy is not known.
func State(ctx context.Context, root, node string, owner ed25519.PublicKey, log *slog.Logger) (backup.State, error) {
	c, err := connect(root, node, owner, log)
	if err != nil {
		return backup.State{}, err
	}
	defer c.Close()
	return c.state(ctx)
}

func (c *cluster) state(ctx context.Context) (s backup.State, err error) {
	now, history, err := c.Epoch(ctx)
	if err != nil {
		return s, err
	}
	s.Epoch, s.EpochID, s.History, s.PolicySerial = now.Epoch, now.EpochID, history.String(), now.PolicySerial
	m, err := c.CoreV1().ConfigMaps(clusterinfo.Namespace).Get(ctx, clusterinfo.ConfigMap, metav1.GetOptions{})
	if err != nil {
		return s, err
	}
	if _, err := clusterinfo.Parse([]byte(m.Data[clusterinfo.Key])); err != nil {
		return s, err
	}
	s.Cluster = json.RawMessage(m.Data[clusterinfo.Key])
	return s, pages(ctx, c, "attestednodes", func(list v1alpha1.AttestedNodeList) string {
		for _, n := range list.Items {
			s.Nodes = append(s.Nodes, backup.Node{Name: n.Name, UID: string(n.UID), Role: string(n.Spec.Role), MachineID: n.Spec.MachineID, DiskID: n.Spec.DiskID, Banned: n.Spec.Banned})
		}
		return list.Continue
	})
}
