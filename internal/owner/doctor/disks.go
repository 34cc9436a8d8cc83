package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/owner/cluster"
)

const (
	// oldDisk is how old an AttestedDisk that no enrollment names has to be for doctor to name it: its machine may come back.
	oldDisk = 30 * 24 * time.Hour
	// maxOldDisks is how many it names.
	maxOldDisks = 10
)

// disks names disks that no enrolled machine has any more: only their owner knows which were destroyed (J2).
func (d *doctor) disks(ctx context.Context) error {
	var all v1alpha1.AttestedDiskList
	if err := d.kube.Reader().List(ctx, &all); cluster.Absent(err) {
		return nil // the cluster is of a version that does not say whose disks are
	} else if err != nil {
		return err
	}
	var nodes v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &nodes); err != nil {
		return err
	}
	used := map[string]bool{}
	for _, n := range nodes.Items {
		used[n.Spec.DiskID] = true
	}
	var old []string
	for _, disk := range all.Items {
		if age := d.Now().Sub(disk.CreationTimestamp.Time); !used[disk.Name] && age > oldDisk {
			old = append(old, fmt.Sprintf("%s (machine %.12s, %d days)", disk.Name, disk.Spec.MachineID, age/(24*time.Hour)))
		}
	}
	if len(old) == 0 {
		d.OK(CheckDisks, "%d, each an enrolled machine's or younger than %d days", len(all.Items), oldDisk/(24*time.Hour))
		return nil
	}
	slices.Sort(old)
	d.Add(CheckDisks, checkup.OK, "kubectl delete attesteddisk UUID, of those that were destroyed and of no other: whichever machine enrolls the UUID next gets the disk's key.",
		"%d, of which %d are no enrolled machine's: %s", len(all.Items), len(old), strings.Join(old[:min(len(old), maxOldDisks)], ", "))
	return nil
}
