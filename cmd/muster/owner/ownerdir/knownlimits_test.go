package ownerdir

import (
	"crypto/ed25519"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/trust/attest"
)

func writable(t *testing.T) *Dir {
	t.Helper()
	d, err := Create(filepath.Join(t.TempDir(), "muster-prod"), example(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// text is one of the longest texts of its kind, and another for each i.
func text(i, length int) string { return fmt.Sprintf("%0*d", length, i) }

// largest has as many records as a file can have, with the longest texts and numbers.
func largest() *Known {
	k := &Known{Epoch: math.MaxUint64, EpochID: text(0, maxEpochID), Policy: KnownPolicy{JSON: strings.Repeat("<", attest.MaxPolicySize), Signature: make([]byte, ed25519.SignatureSize)}, Nodes: map[string]KnownNode{}}
	disk := func(i int) KnownDisk {
		return KnownDisk{ID: text(i, maxUID), Salt: text(i, maxHex), RootVersion: math.MinInt32}
	}
	for i := range MaxKept {
		uid, name, id := text(i, maxUID), text(i, maxName), text(i, maxHex)
		k.Nodes[name] = KnownNode{UID: uid, Generation: math.MinInt64, MachineID: id, Role: text(i, maxRole), Banned: true, Disk: disk(i)}
		k.Gone = append(k.Gone, KnownGone{UID: text(MaxKept+i, maxUID), Name: name, Epoch: math.MaxUint64})
		k.Disks = append(k.Disks, KnownFormer{KnownDisk: disk(MaxKept + i), MachineID: id, Node: name})
		k.Bans, k.Names, k.BannedMachines = with(k.Bans, uid, math.MinInt64), with(k.Names, uid, name), with(k.BannedMachines, uid, id)
		k.Former = append(k.Former, text(MaxKept+i, maxHex))
		k.Erased, k.ErasedAt = append(k.Erased, text(2*MaxKept+i, maxUID)), with(k.ErasedAt, text(2*MaxKept+i, maxUID), math.MaxUint64-1)
	}
	return k
}

func TestTheLargestKnownFileIsRead(t *testing.T) {
	d := writable(t)
	want := largest()
	if err := d.Remember(want); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(d.File(KnownFile)); err != nil || st.Size() > maxKnownFile || st.Size() < maxKnownFile/2 {
		t.Errorf("%d bytes, %v", st.Size(), err)
	}
	got, err := d.Known()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Error("another state was read than was written")
	}
	// It can be changed, and the next state is written too.
	if _, err := d.EraseDisk(got.Disks[0].ID); err != nil {
		t.Error(err)
	}
	if got, err = d.Known(); err != nil || len(got.Erased) != MaxKept || !slices.Contains(got.Erased, want.Disks[0].ID) {
		t.Errorf("%d erased disks, %v", len(got.Erased), err)
	}
	seen := &Known{Epoch: 8, Policy: want.Policy, Nodes: nodes("w1")}
	if err := d.RememberAfter(got, got.Keep(seen)); err != nil {
		t.Error(err)
	}
	if _, err := d.Known(); err != nil {
		t.Error(err)
	}
}

// A cluster of 5,000 nodes, the most that Kubernetes supports, is known.
func TestAClusterOf5000NodesIsKnown(t *testing.T) {
	d := writable(t)
	k := &Known{Nodes: map[string]KnownNode{}}
	for i := range 5_000 {
		name := fmt.Sprintf("worker-%d.rack-%d.example.com", i, i%40)
		k.Nodes[name] = KnownNode{UID: text(i, maxUID), Generation: 3, MachineID: text(i, maxHex), Role: "worker", Disk: KnownDisk{ID: text(i, maxUID), Salt: text(i, maxHex), RootVersion: 1}}
	}
	if err := d.Remember(k); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Known(); err != nil || len(got.Nodes) != 5_000 {
		t.Error(err)
	}
}

// What a hostile API server sends makes no file that can't be read, or that never gets smaller: the old file stays.
func TestWhatCouldNotBeReadAgainIsNotWritten(t *testing.T) {
	one := func(change func(*KnownNode)) func(*Known) {
		return func(k *Known) { k.Nodes = map[string]KnownNode{"w1": node("w1", change)} }
	}
	long := func(n int) string { return text(0, n) }
	for name, tt := range map[string]struct {
		wrong, right func(*Known)
		says         string
	}{
		"a node's name":     {func(k *Known) { k.Nodes = nodes(long(maxName + 1)) }, func(k *Known) { k.Nodes = map[string]KnownNode{long(maxName): node("w1")} }, "name"},
		"a node's UID":      {one(func(n *KnownNode) { n.UID = long(maxUID + 1) }), one(func(n *KnownNode) { n.UID = long(maxUID) }), "UID"},
		"a machine ID":      {one(func(n *KnownNode) { n.MachineID = long(maxHex + 1) }), one(func(n *KnownNode) { n.MachineID = long(maxHex) }), "machine"},
		"a role":            {one(func(n *KnownNode) { n.Role = long(maxRole + 1) }), one(func(n *KnownNode) { n.Role = long(maxRole) }), "role"},
		"a disk":            {one(func(n *KnownNode) { n.Disk.ID = long(maxUID + 1) }), one(func(n *KnownNode) { n.Disk.ID = long(maxUID) }), "disk"},
		"a salt":            {one(func(n *KnownNode) { n.Disk.Salt = long(maxHex + 1) }), one(func(n *KnownNode) { n.Disk.Salt = long(maxHex) }), "salt"},
		"a character":       {one(func(n *KnownNode) { n.MachineID = "a\x1bb" }), one(func(n *KnownNode) { n.MachineID = "a-b" }), "machine"},
		"a disk's node":     {func(k *Known) { k.Disks = []KnownFormer{{Node: long(maxName + 1)}} }, func(k *Known) { k.Disks = []KnownFormer{{Node: long(maxName)}} }, "name"},
		"a disk's machine":  {func(k *Known) { k.Disks = []KnownFormer{{MachineID: long(maxHex + 1)}} }, func(k *Known) { k.Disks = []KnownFormer{{MachineID: long(maxHex)}} }, "machine"},
		"a former salt":     {func(k *Known) { k.Disks = []KnownFormer{{KnownDisk: KnownDisk{Salt: "<"}}} }, func(k *Known) { k.Disks = []KnownFormer{{KnownDisk: KnownDisk{Salt: "0"}}} }, "salt"},
		"a removed name":    {func(k *Known) { k.Gone = []KnownGone{{Name: long(maxName + 1)}} }, func(k *Known) { k.Gone = []KnownGone{{Name: long(maxName)}} }, "name"},
		"a removed UID":     {func(k *Known) { k.Gone = []KnownGone{{UID: long(maxUID + 1)}} }, func(k *Known) { k.Gone = []KnownGone{{UID: long(maxUID)}} }, "UID"},
		"a ban's UID":       {func(k *Known) { k.Bans = map[string]int64{long(maxUID + 1): 1} }, func(k *Known) { k.Bans = map[string]int64{long(maxUID): 1} }, "UID"},
		"a ban's name":      {func(k *Known) { k.Names = map[string]string{"u": long(maxName + 1)} }, func(k *Known) { k.Names = map[string]string{"u": long(maxName)} }, "name"},
		"a name's UID":      {func(k *Known) { k.Names = map[string]string{long(maxUID + 1): "w"} }, func(k *Known) { k.Names = map[string]string{long(maxUID): "w"} }, "UID"},
		"a banned machine":  {func(k *Known) { k.BannedMachines = map[string]string{"u": long(maxHex + 1)} }, func(k *Known) { k.BannedMachines = map[string]string{"u": long(maxHex)} }, "machine"},
		"a machine's UID":   {func(k *Known) { k.BannedMachines = map[string]string{long(maxUID + 1): "m"} }, func(k *Known) { k.BannedMachines = map[string]string{long(maxUID): "m"} }, "UID"},
		"a former machine":  {func(k *Known) { k.Former = []string{long(maxHex + 1)} }, func(k *Known) { k.Former = []string{long(maxHex)} }, "machine"},
		"an erased disk":    {func(k *Known) { k.Erased = []string{long(maxUID + 1)} }, func(k *Known) { k.Erased = []string{long(maxUID)} }, "disk"},
		"an erasure":        {func(k *Known) { k.ErasedAt = map[string]uint64{long(maxUID + 1): 1} }, func(k *Known) { k.ErasedAt = map[string]uint64{long(maxUID): 1} }, "disk"},
		"an epoch's ID":     {func(k *Known) { k.EpochID = long(maxEpochID + 1) }, func(k *Known) { k.EpochID = long(maxEpochID) }, "epoch"},
		"a policy":          {func(k *Known) { k.Policy.JSON = long(attest.MaxPolicySize + 1) }, func(k *Known) { k.Policy.JSON = long(attest.MaxPolicySize) }, "policy"},
		"a signature":       {func(k *Known) { k.Policy.Signature = make([]byte, ed25519.SignatureSize+1) }, func(k *Known) { k.Policy.Signature = make([]byte, ed25519.SignatureSize) }, "signature"},
		"10,001 nodes":      {func(k *Known) { k.Nodes = many(MaxKept + 1) }, func(k *Known) { k.Nodes = many(MaxKept) }, "10000"},
		"10,001 removed":    {func(k *Known) { k.Gone = make([]KnownGone, MaxKept+1) }, func(k *Known) { k.Gone = make([]KnownGone, MaxKept) }, "10000"},
		"10,001 free disks": {func(k *Known) { k.Disks = make([]KnownFormer, MaxKept+1) }, func(k *Known) { k.Disks = make([]KnownFormer, MaxKept) }, "10000"},
		"10,001 former":     {func(k *Known) { k.Former = make([]string, MaxKept+1) }, func(k *Known) { k.Former = make([]string, MaxKept) }, "10000"},
		"10,001 erased":     {func(k *Known) { k.Erased = make([]string, MaxKept+1) }, func(k *Known) { k.Erased = make([]string, MaxKept) }, "10000"},
	} {
		t.Run(name, func(t *testing.T) {
			d := writable(t)
			if err := d.Remember(&Known{Nodes: nodes("old")}); err != nil {
				t.Fatal(err)
			}
			k := &Known{Nodes: map[string]KnownNode{}}
			tt.wrong(k)
			if err := d.Remember(k); err == nil || !strings.Contains(err.Error(), tt.says) || len(err.Error()) > 400 || strings.Contains(err.Error(), "\x1b") {
				t.Errorf("%.500v, want %s", err, tt.says)
			}
			if had, err := d.Known(); err != nil || !maps.Equal(had.Nodes, nodes("old")) {
				t.Errorf("%v: the old file has not stayed", err)
			}
			k = &Known{Nodes: map[string]KnownNode{}}
			tt.right(k)
			if err := d.Remember(k); err != nil {
				t.Error(err)
			}
			if _, err := d.Known(); err != nil {
				t.Error(err)
			}
		})
	}
}

func many(n int) map[string]KnownNode {
	out := map[string]KnownNode{}
	for i := range n {
		out[fmt.Sprintf("w%d", i)] = KnownNode{}
	}
	return out
}

// Of bans and erased disks, too, the oldest are dropped: never the ban of an enrollment that is there, or a disk whose
// salt the cluster has.
func TestOnlySoManyBansAndErasedDisksAreKept(t *testing.T) {
	had := &Known{Epoch: 7, Nodes: nodes("here")}
	ban := func(uid, name string) {
		had.Bans, had.Names, had.BannedMachines = with(had.Bans, uid, 3), with(had.Names, uid, name), with(had.BannedMachines, uid, "machine-"+name)
	}
	for i := range MaxKept - 2 {
		name := fmt.Sprintf("w%d", i)
		had.Gone = append(had.Gone, KnownGone{UID: "uid-" + name, Name: name})
		ban("uid-"+name, name)
		had.Erased, had.ErasedAt = append(had.Erased, "disk-"+name), with(had.ErasedAt, "disk-"+name, uint64(10+i))
	}
	ban("uid-here", "here")
	ban("unknown", "unknown") // of version 1, or from before the oldest of Gone
	had.Erased = append(had.Erased, "disk-here", "disk-free")
	had.Nodes["free"] = node("free")

	// One enrollment is banned and one disk erased since.
	seen := &Known{Epoch: 20_000, Nodes: nodes("here", "new", "free"), Bans: map[string]int64{"uid-new": 4}, BannedMachines: map[string]string{"uid-new": "machine-new"}, Erased: []string{"disk-new"}}
	seen.Nodes["new"] = node("new", func(n *KnownNode) { n.Disk.Salt = "" })
	got := had.Keep(seen)
	if len(got.Bans) != MaxKept || got.Bans["uid-here"] != 3 || got.Bans["uid-new"] != 4 || got.Bans["unknown"] != 0 || got.Bans["uid-w0"] != 3 {
		t.Errorf("%d bans: %d, %d, %d, %d", len(got.Bans), got.Bans["uid-here"], got.Bans["uid-new"], got.Bans["unknown"], got.Bans["uid-w0"])
	}
	if len(got.Names) != MaxKept || len(got.BannedMachines) != MaxKept || got.Names["unknown"] != "" || got.BannedMachines["unknown"] != "" {
		t.Errorf("%d names and %d machines of bans", len(got.Names), len(got.BannedMachines))
	}
	if len(got.Erased) != MaxKept || slices.Contains(got.Erased, "disk-w0") || !slices.Contains(got.Erased, "disk-w1") || !slices.Contains(got.Erased, "disk-new") || !slices.Contains(got.Erased, "disk-here") || !slices.Contains(got.Erased, "disk-free") {
		t.Errorf("%d erased disks", len(got.Erased))
	}
	if _, there := got.ErasedAt["disk-w0"]; there || got.ErasedAt["disk-new"] != 20_000 || got.ErasedAt["disk-w1"] != 11 {
		t.Errorf("%d times of erased disks", len(got.ErasedAt))
	}
	if again := got.Keep(seen); !reflect.DeepEqual(again, got) {
		t.Error("the same cluster has changed what is known")
	}

	// The next that goes is the ban of the enrollment that was removed first.
	seen.Bans["uid-free"] = 5
	if got = got.Keep(seen); len(got.Bans) != MaxKept || got.Bans["uid-w0"] != 0 || got.Bans["uid-w1"] != 3 || got.Bans["uid-here"] != 3 {
		t.Errorf("%d bans", len(got.Bans))
	}
}
