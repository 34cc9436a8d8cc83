package clusterapi

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/trust/keys"
)

// diskOf returns the disk's AttestedDisk; nil if there is none, or if the cluster's version is older and has no such
// kind.
func (c *Client) diskOf(ctx context.Context, disk string) (*v1alpha1.AttestedDisk, error) {
	var d v1alpha1.AttestedDisk
	if err := c.client.Get(ctx, types.NamespacedName{Name: disk}, &d); Absent(err) {
		return nil, nil //nolint:nilnil // none is no error
	} else if err != nil {
		return nil, err
	}
	return &d, nil
}

// claimDisk assigns the disk to a machine, also if it has belonged to one of those in from. It refuses any other
// machine's disk with DISK_MISMATCH, and an erased one with DISK_ERASED. A disk without a salt gets the given one, or
// a new one if that is zero. A disk with a different salt is an error. Without a disk it does nothing.
func (c *Client) claimDisk(ctx context.Context, disk, machine string, salt keys.DiskSalt, from ...string) error {
	if disk == "" {
		return nil
	}
	err := once(ctx, func(ctx context.Context) error {
		have, err := c.diskOf(ctx, disk)
		switch {
		case err != nil:
			return err
		case have == nil:
			fresh := salt
			if fresh == (keys.DiskSalt{}) {
				fresh = keys.NewDiskSalt()
			}
			err := c.client.Create(ctx, enrollment.NewDisk(disk, machine, fresh, keys.FirstVersion))
			if apierrors.IsAlreadyExists(err) {
				return errors.Join(errPending, err) // another client created it first: read it
			}
			if Absent(err) {
				return nil
			}
			return err
		}
		if err := mayTake(have, machine, from...); err != nil {
			return err
		}
		switch {
		case salt != (keys.DiskSalt{}) && have.Spec.Salt != salt.String():
			return errors.New("its salt is not the one from which the key of the machine's disk is derived; erase the disk, or restore the salt of cluster.json there")
		case have.Spec.MachineID == machine:
			return nil
		}
		have.Spec.MachineID = machine
		return c.client.Update(ctx, have) // by compare-and-swap
	})
	if err != nil {
		return fmt.Errorf("AttestedDisk %s: %w", disk, err)
	}
	return nil
}

// mayTake refuses an erased disk, and one that belongs neither to the machine nor to one of from. It accepts nil.
func mayTake(d *v1alpha1.AttestedDisk, machine string, from ...string) error {
	if d == nil {
		return nil
	}
	return enrollment.CheckDisk(d, "which may still read its data", append(from, machine)...)
}

// Disk returns a disk with its owner and its salt; nil if the cluster has no record of it.
func (c *Client) Disk(ctx context.Context, disk string) (d *v1alpha1.AttestedDisk, err error) {
	err = once(ctx, func(ctx context.Context) error {
		d, err = c.diskOf(ctx, disk)
		return err
	})
	return d, err
}

// HolderOf returns the node to which a disk is enrolled, unless the node is shut out; empty if there is none.
func (c *Client) HolderOf(ctx context.Context, disk string) (node string, err error) {
	err = once(ctx, func(ctx context.Context) error {
		var all v1alpha1.AttestedNodeList
		if err := c.client.List(ctx, &all); err != nil {
			return err
		}
		for _, n := range all.Items {
			if n.Spec.DiskID == disk && !n.ShutOut() {
				node = n.Name
			}
		}
		return nil
	})
	return node, err
}

// EraseDisk deletes a disk's salt permanently, so that its key can no longer be derived (K4). The AttestedDisk
// remains and prevents a new enrollment of the disk. It refuses to erase the disk of a node that is not shut out, and
// does nothing to an erased disk.
func (c *Client) EraseDisk(ctx context.Context, disk string) error {
	node, err := c.HolderOf(ctx, disk)
	if err != nil {
		return err
	}
	if node != "" { // K4: a running node keeps access to its own disk
		return fmt.Errorf("disk %s is enrolled to %s, which is neither banned nor forgotten", disk, node)
	}
	err = once(ctx, func(ctx context.Context) error {
		have, err := c.diskOf(ctx, disk)
		if err != nil || have == nil || have.Spec.Erased {
			return err
		}
		have.Spec.Salt, have.Spec.Erased = "", true
		return c.client.Update(ctx, have) // by compare-and-swap
	})
	if err != nil {
		return fmt.Errorf("AttestedDisk %s: %w", disk, err)
	}
	return nil
}
