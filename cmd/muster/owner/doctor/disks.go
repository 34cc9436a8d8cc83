package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/checkup"
)

const (
	// oldDisk is the age from which doctor reports an AttestedDisk without an enrollment. The machine of a younger one may
	// return.
	oldDisk = 30 * 24 * time.Hour
	// maxOldDisks limits the disks that the text names.
	maxOldDisks = 10
)

// disks reports disks that no enrolled machine has: only the owner knows which were destroyed (J2).
func (d *doctor) disks(ctx context.Context) error {
	var all v1alpha1.AttestedDiskList
	if err := d.kube.Reader().List(ctx, &all); clusterapi.Absent(err) {
		return nil // the cluster's version does not record disks
	} else if err != nil {
		return err
	}
	var nodes v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &nodes); err != nil {
		return err
	}
	used, salted := map[string]bool{}, map[string]bool{}
	for _, disk := range all.Items {
		salted[disk.Name] = !disk.Spec.Erased
	}
	for _, n := range nodes.Items {
		used[n.Spec.DiskID] = true
		if n.Spec.DiskID != "" && !salted[n.Spec.DiskID] && !n.ShutOut() {
			d.Add(CheckDisks, checkup.Fail, "Its machine can't open the disk after its next reboot. If that was not intended, put the salt of known.json back (docs/leaving.md, \"Erase\"); else forget the node and give it another disk.",
				"the cluster has no salt of the disk of %s, %s", n.Name, n.Spec.DiskID)
		}
	}
	known, err := d.dir.Known()
	if err != nil {
		known = &ownerdir.Known{} // the folder's check has reported it
	}
	var old []string
	for _, disk := range all.Items {
		if disk.Spec.Erased {
			continue
		}
		if slices.Contains(known.Erased, disk.Name) { // K4
			d.Add(CheckDisks, checkup.Fail, "Erase it again: muster forget --erase --disk "+disk.Name+". Find out what came back with it: etcd was restored, or the object was written by hand.",
				"disk %s was erased, and the cluster has a salt of it again", disk.Name)
		}
		if age := d.Now().Sub(disk.CreationTimestamp.Time); !used[disk.Name] && age > oldDisk {
			old = append(old, fmt.Sprintf("%s (machine %.12s, %d days)", disk.Name, disk.Spec.MachineID, age/(24*time.Hour)))
		}
	}
	if len(old) == 0 {
		if d.Clean(CheckDisks) {
			d.OK(CheckDisks, "%d, each of an enrolled machine or younger than %d days", len(all.Items), oldDisk/(24*time.Hour))
		}
		return nil
	}
	slices.Sort(old)
	d.Add(CheckDisks, checkup.OK, "For those that are no longer needed: muster forget --erase --disk UUID. Their data can't be read again.",
		"%d, of which %d belong to no enrolled machine: %s", len(all.Items), len(old), strings.Join(old[:min(len(old), maxOldDisks)], ", "))
	return nil
}
