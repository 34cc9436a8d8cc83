package install

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/backup"
)

// joinedLater returns the banned machines that joined after a backup, each with a name that no node of the backup has. It also returns all names that
// were in the cluster only after the backup, because their certificates may still be valid.
func joinedLater(m *backup.Manifest, known *ownerdir.Known) (banned map[string]string, names []string) {
	uids, taken := map[string]bool{}, map[string]bool{}
	for _, n := range m.Nodes {
		uids[n.UID], taken[n.Name] = true, true
	}
	banned = map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(known.Nodes)) {
		n := known.Nodes[name]
		if uids[n.UID] {
			continue
		}
		if !taken[name] {
			names = append(names, name)
		}
		if n.Banned && !slices.ContainsFunc(m.Nodes, func(b backup.Node) bool { return b.MachineID == n.MachineID }) {
			as := name
			if taken[as] {
				as = "banned-" + n.MachineID[:min(16, len(n.MachineID))]
			}
			banned[as] = n.MachineID
		}
	}
	for _, g := range known.Gone {
		if (g.Epoch == 0 || g.Epoch > m.Epoch) && !taken[g.Name] && !slices.Contains(names, g.Name) {
			names = append(names, g.Name)
		}
	}
	return banned, names
}

// bannedMachine reports whether a machine is banned in a backup, or by the folder's record.
func bannedMachine(id string, m *backup.Manifest, known *ownerdir.Known) bool {
	again := revoked(m, known)
	for _, n := range m.Nodes {
		if n.MachineID == id && (n.Banned || slices.Contains(again, n.Name)) {
			return true
		}
	}
	for _, n := range known.Nodes {
		if n.MachineID == id && n.Banned {
			return true
		}
	}
	return false
}

// machineBanned reports whether the machine of a node in a backup is banned under any name, in the backup or by the folder's record.
func machineBanned(n backup.Node, known *ownerdir.Known) bool {
	if n.Banned {
		return true
	}
	for _, k := range known.Nodes {
		if k.Banned && k.MachineID == n.MachineID {
			return true
		}
	}
	return false
}

// revoked returns the names of the backup's enrollments that the restore must ban. They are not banned in the backup, but by the folder's record they
// are forgotten, their machine is banned under any name, or they have another machine now (the backup's may have been stolen).
func revoked(m *backup.Manifest, known *ownerdir.Known) []string {
	out := map[string]bool{}
	for _, n := range m.Nodes {
		if n.Banned {
			continue
		}
		if k, there := known.Nodes[n.Name]; there && k.UID == n.UID && k.MachineID != n.MachineID {
			out[n.Name] = true
		}
		if machineBanned(n, known) || slices.ContainsFunc(known.Gone, func(g ownerdir.KnownGone) bool { return g.UID == n.UID }) {
			out[n.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(out))
}

// banAgain bans the backup's enrollments that are banned or forgotten by the folder's record, and banned machines that joined after the backup. It
// revokes the certificates of all names that the backup does not have (J4). Machines accept no joinservice on the new machine before the policy lists
// it (A7), so none of them gets anything in between.
func (i *initializer) banAgain(ctx context.Context, kube *clusterapi.Client, m *backup.Manifest, known *ownerdir.Known) (string, error) {
	names := revoked(m, known)
	for _, name := range names {
		p, err := kube.Presence(ctx, name)
		if err != nil {
			return "", err
		}
		if p.Enrollment == nil || p.Enrollment.Leaving() {
			continue
		}
		if err := kube.SetBanned(ctx, p, true); err != nil {
			return "", err
		}
	}
	later, foreign := joinedLater(m, known)
	for _, name := range slices.Sorted(maps.Keys(later)) {
		if err := kube.Shut(ctx, name, later[name]); err != nil {
			return "", err
		}
	}
	live, err := kube.Enrollments(ctx)
	if err != nil {
		return "", err
	}
	foreign = slices.DeleteFunc(foreign, func(name string) bool { // joined after an earlier run: its certificates are current
		return name == i.dir().FirstMachine.NodeName || slices.ContainsFunc(live, func(n v1alpha1.AttestedNode) bool { return n.Name == name })
	})
	return fmt.Sprintf("%d nodes, %d that joined later", len(names), len(later)), kube.RevokeNames(ctx, foreign)
}

// eraseAgain deletes the salts of disks that the folder records as erased (K4), and bans the node that has such a disk in the backup.
func (i *initializer) eraseAgain(ctx context.Context, kube *clusterapi.Client, known *ownerdir.Known) (string, error) {
	erased := 0
	for _, disk := range known.Erased {
		d, err := kube.Disk(ctx, disk)
		if err != nil {
			return "", err
		}
		if d == nil || d.Spec.Erased {
			continue
		}
		holder, err := kube.HolderOf(ctx, disk)
		if err != nil {
			return "", err
		}
		if holder != "" {
			p, err := kube.Presence(ctx, holder)
			if err == nil {
				err = kube.SetBanned(ctx, p, true)
			}
			if err != nil {
				return "", err
			}
			i.Report.Update(fmt.Sprintf("%s has disk %s in the backup, but that disk was erased, so the node is banned. To let it in again, restore the AttestedDisk of its present disk (docs/leaving.md#erase), and run muster replace %s --disk UUID", holder, disk, holder))
		}
		if err := kube.EraseDisk(ctx, disk); err != nil {
			return "", err
		}
		erased++
	}
	return fmt.Sprintf("%d disks", erased), nil
}

// forgetLost removes the enrollments of the lost control planes. If one returns with its disk, it gets no key, so it cannot start a second cluster
// with the same authorities. It also removes the machine's own enrollment in the lost cluster, since a machine can have only one. A banned control
// plane stays banned, as a worker with its name.
func (i *initializer) forgetLost(ctx context.Context, kube *clusterapi.Client, m *backup.Manifest, known *ownerdir.Known) (string, error) {
	first := i.dir().FirstMachine
	var names []string
	for _, n := range m.Nodes {
		if n.Name == first.NodeName || n.MachineID != first.ID.String() && n.Role != string(v1alpha1.RoleControlPlane) {
			continue
		}
		p, err := kube.Presence(ctx, n.Name)
		if err != nil {
			return "", err
		}
		if p.Enrollment != nil && string(p.Enrollment.UID) == n.UID { // otherwise an earlier run has removed it
			if _, err := kube.Forget(ctx, p, time.Now(), i.Report.Update); err != nil {
				return "", err
			}
			names = append(names, n.Name)
			p.Enrollment = nil
		}
		if p.Enrollment == nil && n.MachineID != first.ID.String() && machineBanned(n, known) {
			if err := kube.Shut(ctx, n.Name, n.MachineID); err != nil {
				return "", err
			}
		}
	}
	return strings.Join(names, ", "), nil
}

// notShut returns the nodes that this restore has banned or removed, but that the API server shows as neither.
func (i *initializer) notShut(seen *ownerdir.Known, m *backup.Manifest, known *ownerdir.Known) (names []string) {
	first := i.dir().FirstMachine
	if seen.Nodes[first.NodeName].MachineID != first.ID.String() {
		return []string{first.NodeName}
	}
	uids := map[string]string{}
	for _, n := range m.Nodes {
		uids[n.Name] = n.UID
		if s, there := seen.Nodes[n.Name]; there && s.UID == n.UID && n.Role == string(v1alpha1.RoleControlPlane) {
			names = append(names, n.Name)
		}
	}
	for _, name := range revoked(m, known) {
		if s, there := seen.Nodes[name]; there && s.UID == uids[name] && !s.Banned && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	banned, _ := joinedLater(m, known)
	for _, n := range m.Nodes {
		if n.Role == string(v1alpha1.RoleControlPlane) && n.Name != first.NodeName && n.MachineID != first.ID.String() && machineBanned(n, known) {
			banned[n.Name] = n.MachineID
		}
	}
	for _, name := range slices.Sorted(maps.Keys(banned)) {
		if s := seen.Nodes[name]; s.MachineID != banned[name] || !s.Banned {
			names = append(names, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(seen.Nodes)) {
		if d := seen.Nodes[name].Disk; d.Salt != "" && slices.Contains(known.Erased, d.ID) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
