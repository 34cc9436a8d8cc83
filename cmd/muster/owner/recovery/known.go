package recovery

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// ErrRolledBack is returned if the cluster is older than its last recorded state.
var ErrRolledBack = errors.New("the cluster's state is older than the state recorded in this folder")

// ErrRestoring is returned while a restore is unfinished.
var ErrRestoring = errors.New("a restore is unfinished")

// RestoreRemedy is the remedy for [ErrRestoring].
const RestoreRemedy = "Run the same muster restore again to complete it. If the cluster was not lost: muster restore --abandon (docs/backup.md#restore)."

// UnreadableRemedy is the remedy for [ownerdir.ErrUnreadable].
const UnreadableRemedy = "Put the file of the newest copy of the folder in its place. If there is no copy, move the file away and run muster status, which writes a new one: it can't show whether the cluster was rolled back before."

// RecordState records the cluster's current state in the owner's folder, as the reference for a recovery. It does so
// only if the owner signed the cluster's policy. If the state is older than the folder's, or than the epoch that
// control planes' machines know, it writes nothing, and the error wraps [ErrRolledBack].
//
// During a restore it writes nothing, and the error wraps [ErrRestoring]: the record of the lost cluster is still needed.
func RecordState(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client) error {
	if d.Cluster().Restore != nil {
		return problem.WithRemedy(fmt.Errorf("nothing is recorded: %w", ErrRestoring), RestoreRemedy)
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return err
	}
	had, err := d.Known()
	if err != nil {
		return err
	}
	seen, err := access.ReadState(ctx, kube)
	if err != nil {
		return err
	}
	// Read the epoch last: it is then at least as new as everything read above, so a disk copy with a higher epoch includes
	// all of it.
	machines, err := kube.Knowledge(ctx)
	if err != nil {
		return err
	}
	seen.Epoch, seen.EpochID, seen.History = machines.Epoch, machines.History.ID(machines.Epoch), machines.History
	older, err := had.Older(seen, public)
	if err != nil {
		return problem.WithRemedy(err, "owner.key of this folder has not signed the policy in its known.json. Put the owner.key of this cluster's owner back, from your newest copy.")
	}
	if behind := machines.Behind(); behind != "" {
		older = append(older, behind)
	}
	if len(older) > 0 { // B7: its state does not replace the folder's record
		return fmt.Errorf("%w: %s", ErrRolledBack, strings.Join(older, "; "))
	}
	if seen.Policy.JSON == "" {
		return errors.New("the cluster has no policy that the owner could have signed")
	}
	if _, err := seen.Policy.Serial(public); attest.ReasonOf(err) == attestv1.Reason_REASON_POLICY_SIGNATURE {
		return problem.WithRemedy(fmt.Errorf("the cluster's policy: %w", err), clusterapi.ForeignPolicyRemedy)
	} else if err != nil {
		return fmt.Errorf("the cluster's policy: %w", err)
	}
	if next := had.Keep(seen); !reflect.DeepEqual(next, had) {
		return d.RememberAfter(had, next)
	}
	return nil
}

// checkDisk returns DISK_MISMATCH unless the last known state assigns the disk to the machine (J2), or the owner has named
// it. named is nil if the owner names no disk.
func checkDisk(d *ownerdir.Dir, known *ownerdir.Known, machine attest.MachineID, disk keys.DiskID, named *keys.DiskID) error {
	wayOut := fmt.Sprintf("The folder may be older than the disk. If your own records show that disk %[1]s belongs to this machine, add --disk %[1]s.", disk)
	if named != nil {
		if *named != disk {
			return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine presents disk %s, but --disk names %s", disk, *named)
		}
		return nil
	}
	for name, n := range known.Nodes {
		if n.Disk.ID == disk.String() && n.MachineID != machine.String() {
			return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine presents disk %s, which belongs to machine %s (%s)", disk, n.MachineID, name),
				"Put the disk back into its machine. "+wayOut)
		}
	}
	if name, n, ok := known.OfMachine(machine); ok && n.Banned {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s (%s) is banned in the cluster's last known state", machine, name),
			"Recover another control plane. If you trust it again, name its disk: --disk "+disk.String()+".")
	}
	want := RecordedDisk(d, known, machine)
	if want == "" {
		for uid, id := range known.BannedMachines {
			if id == machine.String() {
				return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s (%s) was banned, and is no longer enrolled", machine, known.Names[uid]),
					"Recover another control plane.")
			}
		}
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the folder records no disk of machine %s, and the machine presents %s", machine, disk),
			wayOut+" While the cluster is healthy, muster status records its disks in the folder.")
	}
	if want != disk.String() {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine presents disk %s, but the folder records disk %s for it", disk, want),
			"Put the recorded disk back into the machine. "+wayOut)
	}
	return nil
}

// firstOf returns the machine on which the cluster was initialized or is being restored, as long as known.json can't have its enrollment; otherwise
// nil. So a recovery opens no disk of a first machine that was forgotten later.
func firstOf(d *ownerdir.Dir, known *ownerdir.Known) *ownerdir.Machine {
	if c := d.Cluster(); known.Version == 0 || c.Restore != nil {
		return c.FirstMachine
	}
	return nil
}

// RecordedDisk returns the machine's disk by the cluster's last known state; empty if the folder records none.
func RecordedDisk(d *ownerdir.Dir, known *ownerdir.Known, machine attest.MachineID) string {
	if _, n, ok := known.OfMachine(machine); ok {
		return n.Disk.ID
	}
	if first := firstOf(d, known); first != nil && first.ID == machine {
		return first.DiskID
	}
	return ""
}

// RecordedSalt returns the salt of an enrolled disk by the cluster's last known state (K4), and an error for the disk of a
// removed node. The folder has only the first version of the root secret.
func RecordedSalt(d *ownerdir.Dir, known *ownerdir.Known, disk keys.DiskID) (keys.DiskSalt, error) {
	none := func(err error) (keys.DiskSalt, error) {
		return keys.DiskSalt{}, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "the folder has no salt of disk %s: %w", disk, err),
			"The disk's key cannot be derived without its salt. If the disk was not erased, use a newer copy of the folder: muster status records salts in known.json.")
	}
	for _, n := range known.Nodes {
		if n.Disk.ID != disk.String() || n.Disk.Salt == "" {
			continue
		}
		if n.Disk.RootVersion != int32(keys.FirstVersion) {
			return none(fmt.Errorf("its key is derived from version %d of the root secret, but the folder has version %d", n.Disk.RootVersion, keys.FirstVersion))
		}
		salt, err := keys.ParseDiskSalt(n.Disk.Salt)
		if err != nil {
			return none(fmt.Errorf("known.json: %w", err))
		}
		return salt, nil
	}
	if slices.Contains(known.Erased, disk.String()) { // K4
		return none(errors.New("it was erased"))
	}
	if first := firstOf(d, known); first != nil && first.DiskID == disk.String() && first.DiskSalt != "" {
		salt, err := keys.ParseDiskSalt(first.DiskSalt)
		if err != nil {
			return none(fmt.Errorf("cluster.json: %w", err))
		}
		return salt, nil
	}
	if slices.ContainsFunc(known.Disks, func(d ownerdir.KnownFormer) bool { return d.ID == disk.String() }) {
		return none(errors.New("no node with this disk is enrolled; its salt in known.json is only for restoring the AttestedDisk (docs/leaving.md)"))
	}
	return none(errors.New("neither known.json nor cluster.json has it"))
}
