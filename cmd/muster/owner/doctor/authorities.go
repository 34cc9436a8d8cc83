package doctor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
)

// authorities finds nodes that trust a certificate authority which the cluster has dropped: a holder of its key has an
// administrator's rights at their kubelets.
func (d *doctor) authorities(ctx context.Context) error {
	list, err := d.kube.Authorities()
	if err != nil {
		return err
	}
	var all v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &all); err != nil {
		return err
	}
	var ids []string
	for _, ca := range list {
		sum := sha256.Sum256(ca.Raw)
		ids = append(ids, hex.EncodeToString(sum[:]))
	}
	d.trustOnly(all.Items, ids)
	return nil
}

func (d *doctor) trustOnly(all []v1alpha1.AttestedNode, ids []string) {
	reported := 0
	for i := range all {
		n := &all[i]
		if len(n.Status.Authorities) == 0 || n.ShutOut() {
			continue
		}
		reported++
		for _, id := range n.Status.Authorities {
			if !slices.Contains(ids, id) {
				d.Add(CheckAuthorities, checkup.Warn, "A node that runs drops it within five minutes of the rotation's end; reboot one that does not. If that does not help, its machine may be refused: muster verify "+n.Name+".",
					"%s trusts the certificate authority %s, but the folder's admin.conf does not", n.Name, id)
			}
		}
	}
	if d.Clean(CheckAuthorities) {
		d.OK(CheckAuthorities, "%d nodes trust only the cluster's", reported)
	}
}
