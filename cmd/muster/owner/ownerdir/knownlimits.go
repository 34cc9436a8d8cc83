package ownerdir

import (
	"cmp"
	"crypto/ed25519"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/trust/attest"
)

// MaxKept is the maximum number of records of each kind in known.json: enrollments, removed ones, bans, former machines, disks that no
// enrollment has, and erased disks. It is twice the 5,000 nodes that Kubernetes supports. The oldest are dropped first; enrollments
// are never dropped.
const MaxKept = 10_000

// Maximum lengths of the texts in known.json, in characters. No AttestedNode or AttestedDisk has longer ones.
const (
	maxName    = 253 // RFC 1123
	maxUID     = 36  // a UUID (RFC 9562), as disks have, too
	maxHex     = 64  // 32 bytes: machine IDs and salts
	maxRole    = 16
	maxEpochID = 16 // 8 bytes
)

// maxKnownFile is the maximum size of known.json, in bytes. No file within the limits above is larger.
const maxKnownFile = 32 << 20

// limited returns an error if k has more records or longer texts than known.json can have. Otherwise a hostile API server
// could cause a file that can't be read again, or that has no room for later records.
func (k *Known) limited() error {
	for _, l := range []struct {
		kind string
		n    int
	}{
		{"enrollments", len(k.Nodes)}, {"removed enrollments", len(k.Gone)}, {"bans", len(k.Bans)}, {"names of bans", len(k.Names)}, {"banned machines", len(k.BannedMachines)}, {"former machines", len(k.Former)},
		{"disks without an enrollment", len(k.Disks)}, {"erased disks", len(k.Erased)}, {"times of erased disks", len(k.ErasedAt)},
	} {
		if l.n > MaxKept {
			return fmt.Errorf("%d %s: at most %d are kept", l.n, l.kind, MaxKept)
		}
	}
	if n := len(k.Policy.JSON); n > attest.MaxPolicySize {
		return fmt.Errorf("the policy has %d bytes, more than %d", n, attest.MaxPolicySize)
	}
	if n := len(k.Policy.Signature); n > ed25519.SignatureSize {
		return fmt.Errorf("the policy's signature has %d bytes, more than %d", n, ed25519.SignatureSize)
	}
	var err error
	check := func(kind, text string, most int) {
		if err == nil && (len(text) > most || strings.ContainsFunc(text, strange)) {
			err = fmt.Errorf("the %s %.64q can't be that of an enrollment or disk: want at most %d letters, digits, dots and dashes", kind, text, most)
		}
	}
	name := func(text string) { check("name", text, maxName) }
	uid := func(text string) { check("UID", text, maxUID) }
	machine := func(text string) { check("machine ID", text, maxHex) }
	disk := func(d KnownDisk) {
		check("disk", d.ID, maxUID)
		check("salt", d.Salt, maxHex)
	}
	check("epoch's ID", k.EpochID, maxEpochID)
	for n, node := range k.Nodes {
		name(n)
		uid(node.UID)
		machine(node.MachineID)
		check("role", node.Role, maxRole)
		disk(node.Disk)
	}
	for _, g := range k.Gone {
		uid(g.UID)
		name(g.Name)
	}
	for u := range k.Bans {
		uid(u)
	}
	for u, n := range k.Names {
		uid(u)
		name(n)
	}
	for u, m := range k.BannedMachines {
		uid(u)
		machine(m)
	}
	for _, m := range k.Former {
		machine(m)
	}
	for _, d := range k.Disks {
		disk(d.KnownDisk)
		machine(d.MachineID)
		name(d.Node)
	}
	for _, d := range slices.Concat(k.Erased, slices.Collect(maps.Keys(k.ErasedAt))) {
		check("disk", d, maxUID)
	}
	return err
}

// strange reports whether a character occurs in no name, UID, ID or salt, and may take more than one byte in JSON.
func strange(r rune) bool {
	return r != '-' && r != '.' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
}

// newest drops the oldest beyond [MaxKept].
func newest[T any](all []T) []T { return all[max(0, len(all)-MaxKept):] }

// oldestFirst returns the keys of a map from the lowest rank to the highest.
func oldestFirst[V any](m map[string]V, rank func(string) uint64) []string {
	return slices.SortedFunc(maps.Keys(m), func(a, b string) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a, b)) })
}

// newestBans drops the oldest bans beyond [MaxKept]: first those of enrollments without a record in k, then those of the
// enrollments that were removed first. present has the UIDs of existing enrollments; their bans are kept (B7).
func (k *Known) newestBans(present map[string]string) {
	if len(k.Bans) <= MaxKept {
		return
	}
	removed := map[string]uint64{}
	for i, g := range k.Gone {
		removed[g.UID] = uint64(i) + 1
	}
	uids := oldestFirst(k.Bans, func(uid string) uint64 {
		if _, there := present[uid]; there {
			return math.MaxUint64
		}
		return removed[uid]
	})
	for _, uid := range uids[:len(uids)-MaxKept] {
		delete(k.Bans, uid)
	}
}

// newestErased drops the disks beyond [MaxKept] whose salts the cluster lost first, because the fewest copies of the cluster
// have them. It keeps those whose salt the cluster may still have (K4).
func (k *Known) newestErased() {
	if len(k.Erased) <= MaxKept {
		return
	}
	erased := map[string]bool{}
	for _, disk := range k.Erased {
		erased[disk] = true
	}
	disks := oldestFirst(erased, func(disk string) uint64 { return cmp.Or(k.ErasedAt[disk], math.MaxUint64) })
	for _, disk := range disks[:len(disks)-MaxKept] {
		delete(k.ErasedAt, disk)
	}
	k.Erased = slices.Sorted(slices.Values(newest(disks)))
}
