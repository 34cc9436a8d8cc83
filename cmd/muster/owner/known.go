package owner

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// ErrBehind is returned if the cluster is older than its last recorded state.
var ErrBehind = errors.New("the cluster is older than what it said before")

// Remember records the cluster's current state in the owner's folder, as the reference for a recovery. It does so
// only if the owner signed the cluster's policy. If the state is older than the folder's, or than the epoch that
// control planes' machines know, it writes nothing, and the error wraps [ErrBehind].
//
// While a restore is not at its end it does nothing: what is known of the lost cluster is still needed.
func Remember(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client) error {
	if d.Cluster().Restore != nil {
		return nil
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return err
	}
	had, err := d.Known()
	if err != nil {
		return err
	}
	seen, err := see(ctx, kube)
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
		return err
	}
	if behind := machines.Behind(); behind != "" {
		older = append(older, behind)
	}
	if len(older) > 0 { // B7: its state does not replace what the folder knows
		return fmt.Errorf("%w: %s", ErrBehind, strings.Join(older, "; "))
	}
	if _, err := seen.Policy.Open(public); err != nil {
		return fmt.Errorf("the cluster's policy: %w", err)
	}
	if next := had.Keep(seen); !reflect.DeepEqual(next, had) {
		return d.RememberAfter(had, next)
	}
	return nil
}

// see reads the cluster's state, except for its epoch.
func see(ctx context.Context, kube *clusterapi.Client) (*ownerdir.Known, error) {
	policy, err := kube.Policy(ctx)
	if err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	k := &ownerdir.Known{Nodes: map[string]ownerdir.KnownNode{}, Bans: map[string]int64{}, BannedMachines: map[string]string{}}
	if err == nil {
		signature, err := base64.StdEncoding.DecodeString(policy.Spec.Signature)
		if err != nil {
			return nil, fmt.Errorf("the cluster's policy: signature: %w", err)
		}
		k.Policy = ownerdir.KnownPolicy{JSON: policy.Spec.Policy, Signature: signature}
	}
	var nodes v1alpha1.AttestedNodeList
	if err := kube.Reader().List(ctx, &nodes); err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	var disks v1alpha1.AttestedDiskList
	if err := kube.Reader().List(ctx, &disks); err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	known, enrolled := map[string]ownerdir.KnownDisk{}, map[string]bool{}
	for _, d := range disks.Items {
		known[d.Name] = ownerdir.KnownDisk{ID: d.Name, Salt: d.Spec.Salt, RootVersion: d.Spec.RootVersion}
		if d.Spec.Erased { // K4
			known[d.Name] = ownerdir.KnownDisk{ID: d.Name}
			k.Erased = append(k.Erased, d.Name)
		}
	}
	slices.Sort(k.Erased)
	for _, n := range nodes.Items {
		k.Nodes[n.Name] = ownerdir.KnownNode{
			UID: string(n.UID), Generation: n.Generation, MachineID: n.Spec.MachineID, Role: string(n.Spec.Role), Banned: n.Spec.Banned,
			Disk: cmp.Or(known[n.Spec.DiskID], ownerdir.KnownDisk{ID: n.Spec.DiskID}),
		}
		enrolled[n.Spec.DiskID] = true
		if n.Spec.Banned {
			k.Bans[string(n.UID)] = n.Generation
			k.BannedMachines[string(n.UID)] = n.Spec.MachineID
		}
	}
	for _, d := range disks.Items {
		if !enrolled[d.Name] && !d.Spec.Erased {
			k.Disks = append(k.Disks, ownerdir.KnownFormer{KnownDisk: known[d.Name], MachineID: d.Spec.MachineID})
		}
	}
	return k, nil
}

// current refuses a policy of the folder that is older than the cluster's last known one, or differs from it under
// the same serial.
func current(d *ownerdir.Dir, known *ownerdir.Known, p *attest.Policy, json []byte) error {
	if known.Version == 0 {
		return nil
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return err
	}
	last, err := known.Policy.Open(public)
	if err != nil {
		return fmt.Errorf("known.json: %w", err)
	}
	if p.Serial() > last.Serial() || p.Serial() == last.Serial() && string(json) == known.Policy.JSON {
		return nil
	}
	return withRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the folder's policy has the serial %d, and the one that the cluster had last, of serial %d, says something else", p.Serial(), last.Serial()),
		fmt.Sprintf("Machines are appraised only by the current policy. Restore %s from your newest copy, or, if you have edited it, set serial to %d or more.", d.File(ownerdir.PolicyFile), last.Serial()+1))
}

// diskOf refuses a disk that is not the machine's by the cluster's last known state (J2). named is the disk that the
// owner names; nil: none.
func diskOf(d *ownerdir.Dir, known *ownerdir.Known, machine attest.MachineID, disk keys.DiskID, named *keys.DiskID) error {
	wayOut := fmt.Sprintf("If it is this machine's disk all the same, since the folder is older than the disk, compare it with your records and name it: --disk %s.", disk)
	if named != nil {
		if *named != disk {
			return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine has the disk %s, and --disk names %s", disk, *named)
		}
		return nil
	}
	for name, n := range known.Nodes {
		if n.Disk.ID == disk.String() && n.MachineID != machine.String() {
			return withRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine has the disk %s, which is that of machine %s (%s)", disk, n.MachineID, name),
				"Put the disk back into its machine. "+wayOut)
		}
	}
	if name, n, ok := known.OfMachine(machine); ok && n.Banned {
		return withRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s (%s) was banned when the cluster was asked last", machine, name),
			"Recover another control plane. If you trust it again, name its disk: --disk "+disk.String()+".")
	}
	want := KnownDisk(d, known, machine)
	if want == "" {
		return withRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the folder knows no disk of machine %s, and the machine has %s", machine, disk),
			wayOut+" muster status notes the disks of a cluster that is well.")
	}
	if want != disk.String() {
		return withRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine has the disk %s, and its disk is %s", disk, want),
			"Put that disk back. "+wayOut)
	}
	return nil
}

// KnownDisk returns the machine's disk by the cluster's last known state; empty: the folder knows none.
func KnownDisk(d *ownerdir.Dir, known *ownerdir.Known, machine attest.MachineID) string {
	if _, n, ok := known.OfMachine(machine); ok {
		return n.Disk.ID
	}
	if c := d.Cluster(); c.FirstMachine != nil && c.FirstMachine.ID == machine {
		return c.FirstMachine.DiskID
	}
	return ""
}

// KnownSalt returns the salt of an enrolled disk by the cluster's last known state (K4), and none for a removed node.
// The folder has only the first version of the root secret.
func KnownSalt(d *ownerdir.Dir, known *ownerdir.Known, disk keys.DiskID) (keys.DiskSalt, error) {
	none := func(err error) (keys.DiskSalt, error) {
		return keys.DiskSalt{}, withRemedy(attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "the folder has no salt of disk %s: %w", disk, err),
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
	if c := d.Cluster(); c.FirstMachine != nil && c.FirstMachine.DiskID == disk.String() && c.FirstMachine.DiskSalt != "" {
		salt, err := keys.ParseDiskSalt(c.FirstMachine.DiskSalt)
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
