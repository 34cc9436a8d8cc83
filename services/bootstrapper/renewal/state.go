package renewal

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"log/slog"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
	"github.com/muster-k8s/muster/trust/attest"
)

// State returns the cluster's state for a backup, and the owner's key to which the backup is encrypted. If an image has several keys, it is the one
// that signed the policy in force. So a key that is not in use, before or after a rotation, can't read the backup.
func State(ctx context.Context, root, node string, owner attest.OwnerKeys, log *slog.Logger) (backup.State, ed25519.PublicKey, error) {
	c, err := connect(root, node, owner, log)
	if err != nil {
		return backup.State{}, nil, err
	}
	defer c.Close()
	to, err := c.recipient(ctx)
	if err != nil {
		return backup.State{}, nil, err
	}
	s, err := c.state(ctx)
	return s, to, err
}

func (c *cluster) recipient(ctx context.Context) (ed25519.PublicKey, error) {
	if len(c.owner) == 1 {
		return c.owner[0], nil
	}
	p, err := c.policy(ctx)
	if err != nil {
		return nil, err
	}
	return c.signerOf(p)
}

// signerOf returns the owner's key that signed a policy, unless a newer policy was in force: whoever writes to the API could have put an older one back.
func (c *cluster) signerOf(p v1alpha1.AttestationPolicy) (ed25519.PublicKey, error) {
	opened, err := signedpolicy.Open(&p, c.owner)
	switch {
	case err != nil:
		return nil, fmt.Errorf("for which of the owner's keys a backup is encrypted depends on the policy: %w", err)
	case opened.Serial() < uint64(max(p.Status.Serial, 0)):
		return nil, fmt.Errorf("for which of the owner's keys a backup is encrypted depends on the policy: its serial is %d, and %d was in force", opened.Serial(), p.Status.Serial)
	}
	return opened.Signer(), nil
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
