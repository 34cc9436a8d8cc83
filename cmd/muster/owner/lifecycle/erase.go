package lifecycle

import (
	"context"
	"fmt"
	"slices"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// PlanErase plans the erasure of a disk whose node is forgotten or banned, or that has no node. It changes nothing.
func PlanErase(ctx context.Context, d *ownerdir.Dir, disk string) (*Removal, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	node, err := kube.HolderOf(ctx, disk)
	if err != nil {
		return nil, err
	}
	if node != "" {
		return nil, problem.WithRemedy(fmt.Errorf("disk %s is enrolled to %s, which is neither banned nor forgotten", disk, node), "Forget the node with it: muster forget "+node+" --erase.")
	}
	out := &Removal{dir: d, kube: kube, found: &clusterapi.Presence{Name: disk}, Nothing: true, erase: disk}
	have, err := kube.Disk(ctx, disk)
	if err != nil {
		return nil, err
	}
	switch {
	case have == nil:
		out.Warnings = append(out.Warnings, "the cluster does not know the disk, so it has no salt of it")
	case have.Spec.Erased:
		out.Warnings = append(out.Warnings, "the cluster's salt of it is deleted already")
	}
	out.planErase()
	return out, nil
}

// diskToErase returns the disk of a node, also of one whose enrollment was deleted by an interrupted run.
func diskToErase(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, p *clusterapi.Presence) (string, error) {
	if p.Enrollment != nil && p.Enrollment.Spec.DiskID != "" {
		disk := p.Enrollment.Spec.DiskID
		have, err := kube.Disk(ctx, disk)
		if err == nil && have != nil && have.Spec.MachineID != p.Enrollment.Spec.MachineID { // J2: another machine may need the key
			err = problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s belongs to machine %s, but %s is another machine", disk, have.Spec.MachineID, p.Name),
				"Forget "+p.Name+" without --erase. If that machine's disk is meant: muster forget --erase --disk "+disk+".")
		}
		return disk, err
	}
	known, err := d.Known()
	if err != nil {
		return "", err
	}
	if disk := known.Nodes[p.Name].Disk.ID; disk != "" && p.Enrollment == nil {
		return disk, nil
	}
	return "", problem.WithRemedy(fmt.Errorf("the disk of %s is not recorded", p.Name), "Name it: muster forget --erase --disk UUID. kubectl get attesteddisks lists all.")
}

func (d *Removal) planErase() {
	d.Plan = append(d.Plan, fmt.Sprintf("erase disk %s: delete its salt from the cluster, known.json and cluster.json, so that its key can never be derived again", d.erase))
	d.Warnings = append(d.Warnings, "what is on disk "+d.erase+" can't be read again; this can't be undone")
}

// doErase deletes the salt from the cluster first (K4), because joinservices use only that one; the folder's copy
// is deleted afterwards.
func (d *Removal) doErase(ctx context.Context, out *Removed, note func(string)) error {
	again := "Complete it: muster forget --erase --disk " + d.erase + "."
	if err := d.kube.EraseDisk(ctx, d.erase); err != nil {
		return problem.WithRemedy(err, again)
	}
	note("salt of disk " + d.erase + " deleted from the cluster: joinservices never release its key again")
	files, err := d.dir.EraseDisk(d.erase)
	if err != nil {
		return problem.WithRemedy(err, again)
	}
	note("salt of disk " + d.erase + " deleted from known.json and cluster.json")
	out.Erased = d.erase
	out.Left = slices.Concat(files, []string{
		"each copy of this folder: copy it again, and delete what was copied before",
		"backups of etcd that were made before, and etcd's own files for a minute: compaction, then its log and free pages as it overwrites them",
		"the machine itself, as long as its disk is open: switch it off",
	})
	return nil
}
