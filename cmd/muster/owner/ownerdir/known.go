package ownerdir

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// KnownVersion is the version of known.json that is written. Version 1 is also read: it has no epoch, UIDs, names of bans,
// removed nodes and disks. These are unknown, so no state is older than them.
const KnownVersion = 2

// Known is known.json: the state of the cluster when a command last connected to it. A recovery, which can't ask the
// cluster, relies on it. It also shows that a cluster was restored to an earlier state (B7). It holds no secret.
type Known struct {
	// Version of this file's format: [KnownVersion]; 0 if there is no file.
	Version int `json:"version"`
	// Policy is the cluster's with the highest serial, as the owner signed it.
	Policy KnownPolicy `json:"policy"`
	// Epoch is the cluster's; 0 if no control plane has increased it yet.
	Epoch uint64 `json:"epoch,omitempty"`
	// EpochID distinguishes that epoch from epochs with the same number in another history of the cluster; empty if it had
	// none yet.
	EpochID string `json:"epochID,omitempty"`
	// History is the cluster's history of epochs; it is not stored in known.json.
	History clusterinfo.History `json:"-"`
	// Nodes are the enrollments by name.
	Nodes map[string]KnownNode `json:"nodes"`
	// Gone are enrollments that were in Nodes, in the order of their removal. None of them returns, unless the cluster is
	// restored to an earlier state.
	Gone []KnownGone `json:"gone,omitempty"`
	// Bans are the generations of banned enrollments, by UID. They are kept after an enrollment is removed or its ban is
	// lifted.
	Bans map[string]int64 `json:"bans,omitempty"`
	// Names are those of Bans, by UID; version 1 recorded none.
	Names map[string]string `json:"names,omitempty"`
	// BannedMachines are the machine IDs of Bans, by UID; earlier versions recorded none.
	BannedMachines map[string]string `json:"bannedMachines,omitempty"`
	// Disks are disks with a salt but without an enrollment in Nodes, in the order in which they were recorded. No recovery
	// opens one. They are kept until they are erased (K4), so that they can be restored to a cluster that has lost them
	// (docs/leaving.md).
	Disks []KnownFormer `json:"disks,omitempty"`
	// Former are the IDs of removed or replaced machines, which no enrollment has any more, in the order in which they were found.
	Former []string `json:"formerMachines,omitempty"`
	// Erased are the disks with a deleted salt (K4). They are kept, so that a cluster that has such a salt again is
	// detected.
	Erased []string `json:"erased,omitempty"`
	// ErasedAt is the cluster's epoch when it was first read without the salt of a disk of Erased.
	ErasedAt map[string]uint64 `json:"erasedAt,omitempty"`
}

// KnownPolicy is a signed policy.
type KnownPolicy struct {
	JSON      string `json:"json"`
	Signature []byte `json:"signature"`
}

// KnownNode is one enrollment.
type KnownNode struct {
	// UID and Generation are those of the enrollment's object; empty and 0 from version 1, which did not record them.
	UID        string    `json:"uid,omitempty"`
	Generation int64     `json:"generation,omitempty"`
	MachineID  string    `json:"machineID"`
	Role       string    `json:"role"`
	Banned     bool      `json:"banned,omitempty"`
	Disk       KnownDisk `json:"disk"`
}

// KnownDisk is a state disk.
type KnownDisk struct {
	// ID is the disk's UUID; empty if the enrollment names none.
	ID string `json:"id,omitempty"`
	// Salt and RootVersion are, with the root secret, the inputs of its key; empty if there is none.
	Salt        string `json:"salt,omitempty"`
	RootVersion int32  `json:"rootVersion,omitempty"`
}

// KnownGone is a removed enrollment.
type KnownGone struct {
	UID  string `json:"uid,omitempty"`
	Name string `json:"name"`
	// Epoch is the cluster's when it was first read without the enrollment; 0 if unknown. A copy of the cluster with a
	// higher epoch was made after that.
	Epoch uint64 `json:"epoch,omitempty"`
}

// KnownFormer is a disk that no enrollment has.
type KnownFormer struct {
	KnownDisk

	// MachineID is its machine, Node its last enrollment; empty if unknown.
	MachineID string `json:"machineID"`
	Node      string `json:"node,omitempty"`
}

// Serial verifies the owner's signature and returns the policy's serial: see [attest.OpenSerial]. The policy may be one that this version refuses: the cluster
// had it before an upgrade.
func (p KnownPolicy) Serial(owner attest.OwnerKeys) (uint64, error) {
	return attest.OpenSerial(owner, &attestv1.SignedPolicy{Policy: []byte(p.JSON), Signature: p.Signature})
}

// Signed returns the policy that was last signed in this folder; empty if there is none. The cluster may never have had it.
func (d *Dir) Signed() (p KnownPolicy, err error) {
	b, err := d.Read(SignedFile)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	if err != nil {
		return p, fmt.Errorf("%s: %w", d.File(SignedFile), err)
	}
	return p, nil
}

// SetSigned writes the policy that [Dir.Signed] returns. It is stored before it is sent (B3), so that no other policy gets its serial, even if it is never
// read back from the cluster (B7).
func (d *Dir) SetSigned(p *attestv1.SignedPolicy) error {
	b, err := json.MarshalIndent(KnownPolicy{JSON: string(p.GetPolicy()), Signature: p.GetSignature()}, "", "  ")
	if err != nil {
		return err
	}
	return d.Write(SignedFile, append(b, '\n'))
}

// OfMachine returns the enrollment of a machine.
func (k *Known) OfMachine(id attest.MachineID) (name string, n KnownNode, ok bool) {
	for name, n := range k.Nodes {
		if n.MachineID == id.String() {
			return name, n, true
		}
	}
	return "", KnownNode{}, false
}

// ErrUnreadable is returned if known.json is damaged. No command overwrites a damaged file, because it may record bans and
// removals that the cluster has lost.
var ErrUnreadable = errors.New("the file is damaged")

// Known reads known.json. It is empty, with Version 0, if no command has connected to the cluster yet.
func (d *Dir) Known() (*Known, error) {
	b, err := d.Read(KnownFile)
	if errors.Is(err, fs.ErrNotExist) {
		return &Known{}, nil
	}
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var k Known
	if err := dec.Decode(&k); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", d.File(KnownFile), ErrUnreadable, err)
	}
	if k.Version != 1 && k.Version != KnownVersion {
		return nil, fmt.Errorf("%s: version %d was written by another version of muster; this one reads 1 and %d", d.File(KnownFile), k.Version, KnownVersion)
	}
	return &k, nil
}

// Remember writes known.json. It also works for a folder that is open for reading, by taking the folder's lock during the
// write. If [Dir.Known] could not read the state, Remember returns an error and does not change the file.
func (d *Dir) Remember(k *Known) error { return d.remember(k, nil) }

// RememberAfter is Remember for a state that was computed from had. It fails if known.json differs from had, so that a salt
// which another muster has erased meanwhile is not restored (K4).
func (d *Dir) RememberAfter(had, k *Known) error { return d.remember(k, had) }

func (d *Dir) remember(k, had *Known) error {
	k.Version = KnownVersion
	if err := k.limited(); err != nil {
		return fmt.Errorf("not written: %w", err)
	}
	b, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return err
	}
	if d.sync == nil {
		writable, err := Open(d.path)
		if err != nil {
			return err
		}
		defer func() { _ = writable.Close() }()
		d = writable
	}
	if had != nil {
		if now, err := d.Known(); err != nil {
			return err
		} else if !reflect.DeepEqual(now, had) { // K4
			return errors.New("another muster has written it meanwhile")
		}
	}
	return d.Write(KnownFile, append(b, '\n'))
}

// Older lists, as sentences, what is older in seen than in k: such a cluster was restored to an earlier state (B7).
func (k *Known) Older(seen *Known, owner attest.OwnerKeys) ([]string, error) {
	if k.Version == 0 {
		return nil, nil
	}
	var out []string
	add := func(text string, args ...any) { out = append(out, fmt.Sprintf(text, args...)) }
	had, err := k.Policy.Serial(owner)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", KnownFile, err)
	}
	serial, err := seen.Policy.Serial(owner)
	// A policy that another key has signed is not an earlier one; its signature is the problem.
	foreign := seen.Policy.JSON != "" && attest.ReasonOf(err) == attestv1.Reason_REASON_POLICY_SIGNATURE
	if serial < had && !foreign { // B7
		add("its policy has the serial %d, but had %d before", serial, had)
	}
	if seen.Epoch < k.Epoch { // B7: this also finds a join that was undone, which looks like a node that was forgotten
		add("it is at epoch %d, but was at %d before", seen.Epoch, k.Epoch)
	}
	// B7: the numbers are no proof, because an administrator who has restored the cluster can increase them afterwards.
	if lacks := seen.History.Lacks(clusterinfo.HistoryEpoch{Number: k.Epoch, ID: k.EpochID}); lacks != "" {
		add("%s (%d:%s)", lacks, k.Epoch, k.EpochID)
	}
	generations, gone := map[string]int64{}, map[string]bool{}
	for _, n := range k.Nodes {
		generations[n.UID] = n.Generation
	}
	for _, g := range k.Gone {
		gone[g.UID] = true
	}
	for _, name := range slices.Sorted(maps.Keys(seen.Nodes)) {
		n := seen.Nodes[name]
		switch {
		case n.UID == "":
		case gone[n.UID]: // B7: the API server never assigns a UID twice
			add("the removed enrollment of %s (%s) exists again, with the generation %d", name, n.UID, n.Generation)
		case n.Generation < k.Bans[n.UID]:
			add("the enrollment of %s (%s) has the generation %d, but was banned with generation %d", name, n.UID, n.Generation, k.Bans[n.UID])
		case n.Generation < generations[n.UID]: // B7: machine, disk or ban are earlier ones
			add("the enrollment of %s (%s) has the generation %d, but had %d before", name, n.UID, n.Generation, generations[n.UID])
		}
	}
	return out, nil
}

// Keep returns seen with the additional records of k: removed nodes, bans, and erased disks. The cluster must not be
// [Known.Older]. It drops only the salts of erased disks (K4).
func (k *Known) Keep(seen *Known) *Known {
	out := *seen
	out.Version, out.History = KnownVersion, nil
	out.Nodes = maps.Clone(seen.Nodes)
	if out.Nodes == nil {
		out.Nodes = map[string]KnownNode{}
	}
	names := map[string]string{}
	for name, n := range seen.Nodes {
		names[n.UID] = name
	}
	out.Gone = slices.Clone(k.Gone)
	for _, name := range slices.Sorted(maps.Keys(k.Nodes)) {
		uid := k.Nodes[name].UID
		_, there := names[uid]
		if uid == "" { // of version 1: it has only the name
			_, there = seen.Nodes[name]
		}
		if !there {
			out.Gone = append(out.Gone, KnownGone{UID: uid, Name: name, Epoch: seen.Epoch})
		}
	}
	out.Gone = newest(out.Gone)
	out.keepBans(k, names)
	out.keepMachines(k)
	out.keepSalts(k, seen)
	out.Erased, out.ErasedAt = nil, nil
	out.erase(slices.Concat(k.Erased, seen.Erased)...)
	salted := seen.salted()
	for _, disk := range out.Erased {
		if at := cmp.Or(k.ErasedAt[disk], seen.Epoch); at != 0 && !salted[disk] {
			out.ErasedAt = with(out.ErasedAt, disk, at)
		}
	}
	out.newestErased()
	return &out
}

// Restored is [Known.Keep] for a cluster that its owner has restored to an earlier state: an enrollment that exists again does not count as removed,
// and the present bans replace the recorded ones. Erased disks (K4), and the salts of disks that the cluster does not have, are kept.
func (k *Known) Restored(seen *Known) *Known {
	out := k.Keep(seen)
	back := map[string]bool{}
	for _, n := range seen.Nodes {
		back[n.UID] = true
	}
	out.Gone = slices.DeleteFunc(out.Gone, func(g KnownGone) bool { return back[g.UID] })
	for uid := range back {
		if generation, banned := seen.Bans[uid]; banned {
			out.Bans = with(out.Bans, uid, generation)
		} else {
			delete(out.Bans, uid)
			delete(out.Names, uid)
			delete(out.BannedMachines, uid)
		}
	}
	return out
}

// keepMachines adds the machines that no enrollment has any more.
func (k *Known) keepMachines(before *Known) {
	seen := map[string]bool{}
	for _, n := range k.Nodes {
		seen[n.MachineID] = true
	}
	k.Former = nil
	add := func(id string) {
		if id != "" && !seen[id] {
			seen[id] = true
			k.Former = append(k.Former, id)
		}
	}
	for _, id := range before.Former {
		add(id)
	}
	for _, name := range slices.Sorted(maps.Keys(before.Nodes)) {
		add(before.Nodes[name].MachineID)
	}
	k.Former = newest(k.Former)
}

// keepBans adds the earlier bans, and the names of all bans. names are those of the present enrollments, by UID.
func (k *Known) keepBans(before *Known, names map[string]string) {
	bans := maps.Clone(before.Bans)
	for uid, generation := range k.Bans {
		bans = with(bans, uid, max(bans[uid], generation))
	}
	machines := k.BannedMachines
	k.Bans, k.Names, k.BannedMachines = bans, nil, nil
	k.newestBans(names)
	for uid := range k.Bans {
		if id := cmp.Or(machines[uid], before.BannedMachines[uid]); id != "" {
			k.BannedMachines = with(k.BannedMachines, uid, id)
		}
		if name := cmp.Or(names[uid], before.Names[uid]); name != "" {
			k.Names = with(k.Names, uid, name)
		}
	}
}

// keepSalts adds the recorded salts of disks that seen no longer has (K4): deleting an enrollment or an AttestedDisk, or
// restoring etcd, does not remove them from the folder.
func (k *Known) keepSalts(before, seen *Known) {
	k.Disks = nil
	enrolled, at := map[KnownDisk]bool{}, map[KnownDisk]int{}
	keep := func(d KnownFormer) {
		switch i, had := at[d.KnownDisk]; {
		case d.Salt == "" || enrolled[d.KnownDisk]:
		case !had:
			at[d.KnownDisk] = len(k.Disks)
			k.Disks = append(k.Disks, d)
		default: // the later one determines its machine
			k.Disks[i].MachineID, k.Disks[i].Node = d.MachineID, cmp.Or(d.Node, k.Disks[i].Node)
		}
	}
	for name, n := range k.Nodes {
		if had := before.Nodes[name]; n.Disk.Salt == "" && had.Disk.ID == n.Disk.ID && had.MachineID == n.MachineID { // only its AttestedDisk was removed
			n.Disk = had.Disk
			k.Nodes[name] = n
		}
		enrolled[n.Disk] = true
	}
	for _, d := range slices.Concat(before.Disks, seen.Disks) {
		keep(d)
	}
	for _, name := range slices.Sorted(maps.Keys(before.Nodes)) {
		n := before.Nodes[name]
		keep(KnownFormer{KnownDisk: n.Disk, MachineID: n.MachineID, Node: name})
	}
	k.Disks = newest(k.Disks)
}

// with sets a key of a map that may be nil: an empty map in JSON is read as nil.
func with[K comparable, V any](m map[K]V, key K, value V) map[K]V {
	if m == nil {
		m = map[K]V{}
	}
	m[key] = value
	return m
}

// salted returns the disks that have a salt.
func (k *Known) salted() map[string]bool {
	out := map[string]bool{}
	for _, n := range k.Nodes {
		out[n.Disk.ID] = out[n.Disk.ID] || n.Disk.Salt != ""
	}
	for _, d := range k.Disks {
		out[d.ID] = out[d.ID] || d.Salt != ""
	}
	return out
}

// erase removes the salts of disks and records that they were erased (K4).
func (k *Known) erase(disks ...string) {
	erased := map[string]bool{}
	for _, disk := range slices.Concat(k.Erased, disks) {
		erased[disk] = true
	}
	for name, n := range k.Nodes {
		if erased[n.Disk.ID] {
			n.Disk.Salt, n.Disk.RootVersion = "", 0
			k.Nodes[name] = n
		}
	}
	k.Disks = slices.DeleteFunc(k.Disks, func(d KnownFormer) bool { return erased[d.ID] })
	if len(k.Disks) == 0 {
		k.Disks = nil
	}
	k.Erased = slices.Sorted(maps.Keys(erased))
}

// EraseDisk deletes a disk's salt from known.json and cluster.json (K4). It returns the files below the folder that still
// contain it.
func (d *Dir) EraseDisk(disk string) (left []string, err error) {
	k, err := d.Known()
	if err != nil {
		return nil, err
	}
	if k.Version != 0 {
		k.erase(disk)
		k.newestErased()
		if err := d.Remember(k); err != nil {
			return nil, err
		}
	}
	c := d.Cluster()
	first := []*Machine{c.FirstMachine}
	if c.Restore != nil {
		first = append(first, c.Restore.Former)
	}
	for _, m := range first {
		if m != nil && m.DiskID == disk && m.DiskSalt != "" {
			m.DiskSalt = ""
			if err := d.Save(c); err != nil {
				return nil, err
			}
		}
	}
	backups, err := filepath.Glob(filepath.Join(d.File(BackupsFolder), "*", "*.yaml"))
	if err != nil {
		return nil, err
	}
	for _, file := range backups {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if bytes.Contains(text, []byte("name: "+disk)) {
			left = append(left, file)
		}
	}
	// A known.json from before a restore has salts in clear; a backup of the cluster may contain this one.
	copies, err := filepath.Glob(d.File("known-*.json"))
	if err != nil {
		return nil, err
	}
	for _, file := range copies {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if bytes.Contains(text, []byte(disk)) {
			left = append(left, file)
		}
	}
	snapshots, err := filepath.Glob(filepath.Join(d.File(BackupsFolder), "*.age"))
	return append(left, snapshots...), err
}
