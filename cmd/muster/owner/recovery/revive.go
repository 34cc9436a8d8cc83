package recovery

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// Revival describes an older copy of a control plane's state disk, with which the machine would continue (B7).
type Revival struct {
	// Machine is the ID of the waiting machine.
	Machine string `json:"machine"`
	// Epoch, PolicySerial and Bans are those on its disk. Epoch is 0 if the disk has no record.
	Epoch        uint64   `json:"epoch"`
	PolicySerial uint64   `json:"policySerial"`
	Bans         []string `json:"bans"`
	// BannedMachines are the machine IDs of Bans, in the same order; empty if the disk has only names.
	BannedMachines []string `json:"bannedMachines,omitempty"`
	// DiskCounter is the value of the TPM's counter when the disk was written, TPMCounter the current one; 0 if there is
	// none.
	DiskCounter uint64 `json:"diskCounter"`
	TPMCounter  uint64 `json:"tpmCounter"`
	// KnownVersion is the version of known.json in the owner's folder; 0 if there is none. Version 1 does not record
	// which nodes were forgotten.
	KnownVersion int `json:"knownVersion"`
	// KnownSerial is the serial of the cluster's last policy in the owner's folder; 0 if there is none.
	KnownSerial uint64 `json:"knownSerial"`
	// KnownEpoch is the newest epoch in the folder; 0 if there is none.
	KnownEpoch uint64 `json:"knownEpoch"`
	// Unbanned are the nodes that are banned in the folder and not on the disk.
	Unbanned []string `json:"unbanned"`
	// BannedAndForgotten are forgotten nodes that were banned before. Forgotten are the other forgotten nodes, and banned
	// ones whose ban is on the disk. All of them would be enrolled again. A banned node whose name the folder lacks is
	// listed by its enrollment's UID.
	BannedAndForgotten []string `json:"bannedAndForgotten"`
	Forgotten          []string `json:"forgotten"`
	// Erased are disks that were erased, and whose salts would be back (K4).
	Erased []string `json:"erased"`
	// Before reports that the folder also records forgotten nodes or erased disks at epochs before the disk's, which the
	// disk already has.
	Before bool `json:"before"`

	nonce ownerorder.Nonce // the machine's of this boot
}

// Lines describes the revival for a person.
func (v Revival) Lines() []string {
	counter := func(n uint64, none string) string {
		if n == 0 {
			return none
		}
		return fmt.Sprint(n)
	}
	out := []string{
		fmt.Sprintf("The state disk of machine %s is not the newest: when it was written, the TPM's counter was %s; now it is %s.", v.Machine, counter(v.DiskCounter, "not recorded"), counter(v.TPMCounter, "missing (the TPM was cleared, or the counter deleted)")),
		fmt.Sprintf("It holds epoch %d of the cluster, with %s. The folder's newest policy has serial %d.", v.Epoch, policies.PolicyOf(v.PolicySerial), v.KnownSerial),
	}
	if v.Epoch == 0 {
		out[1] = fmt.Sprintf("The disk has no epoch record, so this copy is older than every copy with one, and its state of the cluster is not known. The folder's newest policy has serial %d.", v.KnownSerial)
	}
	if v.KnownEpoch > v.Epoch {
		out = append(out, fmt.Sprintf("The folder knows epoch %d: changes after the disk's epoch, such as nodes that joined or TPMs that were replaced, would be undone.", v.KnownEpoch))
	}
	undone := false
	for _, l := range []struct {
		text  string
		names []string
	}{
		{"Banned in the folder, but not on this disk: ", v.Unbanned},
		{"Banned, then forgotten, and would be back without a ban: ", v.BannedAndForgotten},
		{"Forgotten, and would be back: ", v.Forgotten},
		{"Erased, and the salts of these disks would be back: ", v.Erased},
	} {
		if n := len(l.names); n > 0 {
			undone = true
			text := l.text + strings.Join(l.names[:min(n, problem.MaxNamed)], ", ")
			if n > problem.MaxNamed {
				text += fmt.Sprintf(", and %d more", n-problem.MaxNamed)
			}
			out = append(out, text+".")
		}
	}
	if v.Before {
		undone = true
		out = append(out, fmt.Sprintf("The folder also records forgotten nodes or erased disks before epoch %d. This copy already has those changes, unless you have accepted an older epoch since then.", v.Epoch))
	}
	switch {
	case v.KnownVersion == 0:
		out = append(out, "The folder has no known.json, so it is not known what would be undone.")
	case v.KnownVersion == 1:
		out = append(out, "known.json is from an earlier version of muster, and does not record which nodes were forgotten.")
	case !undone:
		out = append(out, "This disk has every ban that the folder knows, and the folder records no forgotten node or erased disk.")
	}
	return out
}

// look appraises a machine that is locked to the cluster, and reads its disk's state.
func (r *recoverer) look(ctx context.Context) error {
	s, err := peerdial.Open(r.older)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	d, err := recoverv1connect.NewEpochServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).DescribeEpoch(ctx, &recoverv1.DescribeEpochRequest{})
	if err != nil {
		return err
	}
	r.revival, err = r.compare(d)
	return err
}

// compare compares the disk's state with the folder's.
func (r *recoverer) compare(d *recoverv1.DescribeEpochResponse) (*Revival, error) {
	v := &Revival{
		Machine: r.Machine.String(), Epoch: d.GetEpoch(), PolicySerial: d.GetPolicySerial(), Bans: d.GetBans(), BannedMachines: d.GetBannedMachines(), DiskCounter: d.GetDiskCounter(), TPMCounter: d.GetTpmCounter(),
		Unbanned: []string{}, BannedAndForgotten: []string{}, Forgotten: []string{}, Erased: []string{}, KnownVersion: r.known.Version, KnownEpoch: r.known.Epoch,
	}
	var err error
	if v.nonce, err = ownerorder.ParseNonce(d.GetNonce()); err != nil {
		return nil, err
	}
	for _, name := range v.Bans { // from the machine, for a terminal
		if len(name) > 253 || strings.ContainsFunc(name, func(c rune) bool { return c < ' ' || c > '~' }) {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's answer names a node %q", name)
		}
	}
	for _, id := range v.BannedMachines {
		if _, err := attest.ParseMachineID(id); err != nil {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's answer names a banned machine: %w", err)
		}
	}
	if r.known.Version != 0 {
		var err error
		if v.KnownSerial, _, err = policies.NewestSigned(r.Dir, &v1alpha1.AttestationPolicy{}); err != nil {
			return nil, err
		}
	}
	v.undone(r.known)
	return v, nil
}

// bans reports whether the disk has a ban of that machine. The name may have belonged to another machine at that time,
// so names are compared only if the disk or the folder lacks machine IDs.
func (v *Revival) bans(name, machine string) bool {
	if len(v.BannedMachines) > 0 && machine != "" {
		return slices.Contains(v.BannedMachines, machine)
	}
	return name != "" && slices.Contains(v.Bans, name)
}

// undone lists the revocations that the folder knows and that this disk does not have (B7). A copy includes all changes
// that were recorded at a lower epoch. It may lack changes recorded at its own epoch, since control planes raise the
// epoch up to ten seconds after a change. A copy of unknown epoch may lack any change.
func (v *Revival) undone(known *ownerdir.Known) {
	since := func(seen uint64) bool {
		if seen != 0 && seen < v.Epoch {
			v.Before = true
			return false
		}
		return true
	}
	settled := map[string]bool{} // UIDs of enrollments that are listed already, or need no entry
	for name, n := range known.Nodes {
		settled[n.UID] = true
		if n.Banned && !v.bans(name, n.MachineID) {
			v.Unbanned = append(v.Unbanned, name)
		}
	}
	for _, g := range known.Gone {
		settled[g.UID] = true
		_, banned := known.Bans[g.UID]
		switch {
		case !since(g.Epoch):
		case banned && !v.bans(g.Name, known.BannedMachines[g.UID]):
			v.BannedAndForgotten = append(v.BannedAndForgotten, g.Name)
		default:
			v.Forgotten = append(v.Forgotten, g.Name)
		}
	}
	for uid := range known.Bans { // from version 1, or forgotten before the oldest entry of Gone
		if name := known.Names[uid]; !settled[uid] && !v.bans(name, known.BannedMachines[uid]) {
			v.BannedAndForgotten = append(v.BannedAndForgotten, cmp.Or(name, "enrollment "+uid))
		}
	}
	for _, disk := range known.Erased {
		if since(known.ErasedAt[disk]) {
			v.Erased = append(v.Erased, disk)
		}
	}
	for _, list := range []*[]string{&v.Unbanned, &v.BannedAndForgotten, &v.Forgotten, &v.Erased} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
}

// revive lets the machine continue, if its owner accepts the revived state.
func (r *recoverer) revive(ctx context.Context) (string, error) {
	v := r.revival
	for _, l := range v.Lines() {
		r.Report.Update(l)
	}
	accepted := r.AcceptEpoch != nil && *r.AcceptEpoch == v.Epoch
	if !accepted && r.AcceptEpoch == nil && r.Ask != nil {
		var err error
		if accepted, err = r.Ask(*v); err != nil {
			return "", err
		}
	}
	if !accepted {
		return "", problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, "machine %s waits with epoch %d of the cluster, an older copy of its disk, which was not accepted", v.Machine, v.Epoch),
			fmt.Sprintf("%s Restore the newest disk. If there is none, run the command again with --accept-epoch %d; then apply the policy again, and repeat the bans, removals and erasures that are listed here.", strings.Join(v.Lines(), " "), v.Epoch))
	}
	err := progress.Again(ctx, r.Report, func() error {
		s, err := peerdial.Open(r.older)
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }()
		order := ownerorder.Epoch{Cluster: r.cluster, Machine: *r.Machine, Epoch: v.Epoch, DiskCounter: v.DiskCounter, TPMCounter: v.TPMCounter, Nonce: v.nonce}
		_, err = recoverv1connect.NewEpochServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).AcceptEpoch(ctx, order.Wire(r.key))
		return err
	})
	if err != nil {
		return "", r.explain(err)
	}
	return fmt.Sprintf("epoch %d is accepted: the machine continues", v.Epoch), nil
}
