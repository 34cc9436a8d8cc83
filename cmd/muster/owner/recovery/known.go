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
var ErrRolledBack = errors.New("the cluster is older than what it said before")

// ErrRestoring is returned while a restore is not at its end.
var ErrRestoring = errors.New("a restore is not at its end")

// RestoreRemedy is the remedy for [ErrRestoring].
const RestoreRemedy = "Run the same muster restore again: it goes on. If the cluster was not lost: muster restore --abandon (docs/backup.md#restore)."

// UnreadableRemedy is the remedy for [ownerdir.ErrUnreadable].
const UnreadableRemedy = "Put the file of the newest copy of the folder in its place. If there is no copy, move the file away and run muster status, which writes a new one: it can't show whether the cluster was rolled back before."

// RecordState records the cluster's current state in the owner's folder, as the reference for a recovery. It does so
// only if the owner signed the cluster's policy. If the state is older than the folder's, or than the epoch that
// control planes' machines know, it writes nothing, and the error wraps [ErrRolledBack].
//
// While a restore is not at its end it writes nothing, and the error wraps [ErrRestoring]: what is known of the lost cluster is still needed.
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
	// The epoch comes last. The changes that it counts are then at least as new as those that were read, and a copy
	// with a higher epoch was made after them.
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
	if len(older) > 0 { // B7: its state does not replace what the folder knows
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

// checkDisk refuses a disk that is not the machine's by the cluster's last known state (J2). named is the disk that the
// owner names; nil: none.
func checkDisk(d *ownerdir.Dir, known *ownerdir.Known, machine attest.MachineID, disk keys.DiskID, named *keys.DiskID) error {
	wayOut := fmt.Sprintf("If it is this machine's disk all the same, since the folder is older than the disk, compare it with your records and name it: --disk %s.", disk)
	if named != nil {
		if *named != disk {
			return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine has the disk %s, and --disk names %s", disk, *named)
		}
		return nil
	}
	for name, n := range known.Nodes {
		if n.Disk.ID == disk.String() && n.MachineID != machine.String() {
			return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine has the disk %s, which is that of machine %s (%s)", disk, n.MachineID, name),
				"Put the disk back into its machine. "+wayOut)
		}
	}
	if name, n, ok := known.OfMachine(machine); ok && n.Banned {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s (%s) was banned when the cluster was asked last", machine, name),
			"Recover another control plane. If you trust it again, name its disk: --disk "+disk.String()+".")
	}
	want := RecordedDisk(d, known, machine)
	if want == "" {
		for uid, id := range known.BannedMachines {
			if id == machine.String() {
				return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s (%s) was banned, and has no enrollment any more", machine, known.Names[uid]),
					"Recover another control plane.")
			}
		}
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the folder knows no disk of machine %s, and the machine has %s", machine, disk),
			wayOut+" muster status notes the disks of a cluster that is well.")
	}
	if want != disk.String() {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine has the disk %s, and its disk is %s", disk, want),
			"Put that disk back. "+wayOut)
	}
	return nil
}

// firstOf returns the machine on which the cluster was initialized or is being restored, while known.json can't have its enrollment; else nil. Of a first
// machine that was forgotten later, as of any other, a recovery opens no disk.
func firstOf(d *ownerdir.Dir, known *ownerdir.Known) *ownerdir.Machine {
	if c := d.Cluster(); known.Version == 0 || c.Restore != nil {
		return c.FirstMachine
	}
	return nil
}

// RecordedDisk returns the machine's disk by the cluster's last known state; empty: the folder knows none.
func RecordedDisk(d *ownerdir.Dir, known *ownerdir.Known, machine attest.MachineID) string {
	if _, n, ok := known.OfMachine(machine); ok {
		return n.Disk.ID
	}
	if first := firstOf(d, known); first != nil && first.ID == machine {
		return first.DiskID
	}
	return ""
}

// RecordedSalt returns the salt of an enrolled disk by the cluster's last known state (K4), and none for a removed node.
// The folder has only the first version of the root secret.
func RecordedSalt(d *ownerdir.Dir, known *ownerdir.Known, disk keys.DiskID) (keys.DiskSalt, error) {
	none := func(err error) (keys.DiskSalt, error) {
		return keys.DiskSalt{}, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "the folder has no salt of disk %s: %w", disk, err),
			"Without its salt a disk has no key. If it was not erased, use the newest copy of the folder: muster status with the cluster well would have noted it in known.json.")
	}
	for _, n := range known.Nodes {
		if n.Disk.ID != disk.String() || n.Disk.Salt == "" {
			continue
		}
		if n.Disk.RootVersion != int32(keys.FirstVersion) {
			return none(fmt.Errorf("its key follows from version %d of the root secret, and the folder has version %d", n.Disk.RootVersion, keys.FirstVersion))
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
		return none(errors.New("no enrolled node has it any more; known.json has its salt only to be put back into the cluster, as docs/leaving.md says"))
	}
	return none(errors.New("neither known.json nor cluster.json has it"))
}
