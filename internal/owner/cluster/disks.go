package cluster

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// diskOf gives whose a disk is; nil: nobody's, or the cluster does not say so, since its version is older.
func (c *Client) diskOf(ctx context.Context, disk string) (*v1alpha1.AttestedDisk, error) {
	var d v1alpha1.AttestedDisk
	if err := c.client.Get(ctx, types.NamespacedName{Name: disk}, &d); Absent(err) {
		return nil, nil //nolint:nilnil // none is no error
	} else if err != nil {
		return nil, err
	}
	return &d, nil
}

// claimDisk makes the disk a machine's, also if it was one of those in from until now; if it is any other one's it
// refuses with DISK_MISMATCH. In a cluster that does not say whose disks are it does nothing, and without a disk too.
func (c *Client) claimDisk(ctx context.Context, disk, machine string, from ...string) error {
	if disk == "" {
		return nil
	}
	err := once(ctx, func(ctx context.Context) error {
		have, err := c.diskOf(ctx, disk)
		switch {
		case err != nil:
			return err
		case have == nil:
			d := &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: disk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine}}
			err := c.client.Create(ctx, d)
			if apierrors.IsAlreadyExists(err) {
				return errors.Join(errPending, err) // somebody was faster: look at it
			}
			if Absent(err) {
				return nil
			}
			return err
		case have.Spec.MachineID == machine:
			return nil
		}
		if err := mayTake(have, machine, from...); err != nil {
			return err
		}
		have.Spec.MachineID = machine
		return c.client.Update(ctx, have) // by compare-and-swap
	})
	if err != nil {
		return fmt.Errorf("AttestedDisk %s: %w", disk, err)
	}
	return nil
}

// mayTake refuses what is neither the machine's nor one of those it may come from.
func mayTake(d *v1alpha1.AttestedDisk, machine string, from ...string) error {
	if d == nil {
		return nil
	}
	for _, m := range append(from, machine) {
		if d.Spec.MachineID == m {
			return nil
		}
	}
	return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is machine %s's, which may still read what is on it; `kubectl delete attesteddisk %s` frees it, and whichever machine enrols it next gets its key", d.Name, d.Spec.MachineID, d.Name)
}
