package ownerdir

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// node is an enrollment with a disk that has a salt, all named after it.
func node(name string, change ...func(*KnownNode)) KnownNode {
	n := KnownNode{UID: "uid-" + name, Generation: 3, MachineID: "machine-" + name, Role: "worker", Disk: KnownDisk{ID: "disk-" + name, Salt: "salt-" + name, RootVersion: 1}}
	for _, c := range change {
		c(&n)
	}
	return n
}

func nodes(names ...string) map[string]KnownNode {
	out := map[string]KnownNode{}
	for _, n := range names {
		out[n] = node(n)
	}
	return out
}

// former is the disk of a removed node.
func former(name string) KnownFormer {
	n := node(name)
	return KnownFormer{KnownDisk: n.Disk, MachineID: n.MachineID, Node: name}
}

// K4, B7: records that the cluster does not have any more are kept, except the salts of erased disks.
func TestWhatAClusterHasLostStaysKnown(t *testing.T) {
	unsalted := func(n *KnownNode) { n.Disk = KnownDisk{ID: n.Disk.ID} }
	with := func(name string, n KnownNode) map[string]KnownNode { return map[string]KnownNode{name: n} }
	for name, tt := range map[string]struct{ had, seen, want Known }{
		"nothing was known": {
			seen: Known{Epoch: 7, Nodes: nodes("w1")},
			want: Known{Epoch: 7, Nodes: nodes("w1")},
		},
		"a node that joined": {
			had:  Known{Epoch: 7, Nodes: nodes("w1")},
			seen: Known{Epoch: 8, Nodes: nodes("w1", "w2")},
			want: Known{Epoch: 8, Nodes: nodes("w1", "w2")},
		},
		"a node that was forgotten": {
			had:  Known{Epoch: 7, Nodes: nodes("w1", "w2")},
			seen: Known{Epoch: 8, Nodes: nodes("w1"), Disks: []KnownFormer{{KnownDisk: node("w2").Disk, MachineID: "machine-w2"}}},
			want: Known{Epoch: 8, Nodes: nodes("w1"), Gone: []KnownGone{{"uid-w2", "w2", 8}}, Disks: []KnownFormer{former("w2")}, Former: []string{"machine-w2"}},
		},
		"a node whose enrollment and disk a restore of etcd took": {
			had:  Known{Nodes: nodes("w1", "w2")},
			seen: Known{Nodes: nodes("w1")},
			want: Known{Nodes: nodes("w1"), Gone: []KnownGone{{"uid-w2", "w2", 0}}, Disks: []KnownFormer{former("w2")}, Former: []string{"machine-w2"}},
		},
		"a node whose AttestedDisk was deleted": {
			had:  Known{Nodes: nodes("w1")},
			seen: Known{Nodes: with("w1", node("w1", unsalted))},
			want: Known{Nodes: nodes("w1")},
		},
		"the same, and another machine has node and disk": {
			had:  Known{Nodes: nodes("w1")},
			seen: Known{Nodes: with("w1", node("w1", unsalted, func(n *KnownNode) { n.MachineID = "another" }))},
			want: Known{Nodes: with("w1", node("w1", unsalted, func(n *KnownNode) { n.MachineID = "another" })), Disks: []KnownFormer{former("w1")}, Former: []string{"machine-w1"}},
		},
		"a disk that has another salt": {
			had:  Known{Nodes: nodes("w1")},
			seen: Known{Nodes: with("w1", node("w1", func(n *KnownNode) { n.Disk.Salt = "another" }))},
			want: Known{Nodes: with("w1", node("w1", func(n *KnownNode) { n.Disk.Salt = "another" })), Disks: []KnownFormer{former("w1")}},
		},
		"a disk that was exchanged": {
			had:  Known{Nodes: nodes("w1")},
			seen: Known{Nodes: with("w1", node("w1", func(n *KnownNode) { n.Disk = node("w9").Disk }))},
			want: Known{Nodes: with("w1", node("w1", func(n *KnownNode) { n.Disk = node("w9").Disk })), Disks: []KnownFormer{former("w1")}},
		},
		"a disk that was exchanged for one whose AttestedDisk was deleted": {
			had:  Known{Nodes: nodes("w1")},
			seen: Known{Nodes: with("w1", node("w1", func(n *KnownNode) { n.Disk = KnownDisk{ID: "disk-w9"} }))},
			want: Known{Nodes: with("w1", node("w1", func(n *KnownNode) { n.Disk = KnownDisk{ID: "disk-w9"} })), Disks: []KnownFormer{former("w1")}},
		},
		"a disk that no enrollment has, with another salt": {
			had:  Known{Disks: []KnownFormer{former("w2")}},
			seen: Known{Disks: []KnownFormer{{KnownDisk: KnownDisk{ID: "disk-w2", Salt: "another", RootVersion: 1}, MachineID: "another"}}},
			want: Known{Disks: []KnownFormer{former("w2"), {KnownDisk: KnownDisk{ID: "disk-w2", Salt: "another", RootVersion: 1}, MachineID: "another"}}},
		},
		"a disk that is enrolled again": {
			had:  Known{Nodes: nodes("w1"), Gone: []KnownGone{{"uid-old", "w2", 5}}, Disks: []KnownFormer{former("w2"), former("w3")}},
			seen: Known{Nodes: nodes("w1", "w2")},
			want: Known{Nodes: nodes("w1", "w2"), Gone: []KnownGone{{"uid-old", "w2", 5}}, Disks: []KnownFormer{former("w3")}},
		},
		"a name that another enrollment has": {
			had:  Known{Nodes: nodes("w1")},
			seen: Known{Epoch: 9, Nodes: with("w1", node("w1", func(n *KnownNode) { n.UID = "uid-new" }))},
			want: Known{Epoch: 9, Nodes: with("w1", node("w1", func(n *KnownNode) { n.UID = "uid-new" })), Gone: []KnownGone{{"uid-w1", "w1", 9}}},
		},
		"a node that was forgotten and its disk erased": {
			had:  Known{Epoch: 7, Nodes: nodes("w1", "w2")},
			seen: Known{Epoch: 8, Nodes: nodes("w1"), Erased: []string{"disk-w2"}},
			want: Known{Epoch: 8, Nodes: nodes("w1"), Gone: []KnownGone{{"uid-w2", "w2", 8}}, Erased: []string{"disk-w2"}, ErasedAt: map[string]uint64{"disk-w2": 8}, Former: []string{"machine-w2"}},
		},
		"a disk that was erased after its node was forgotten": {
			had:  Known{Epoch: 7, Disks: []KnownFormer{former("w2"), former("w3")}},
			seen: Known{Epoch: 8, Erased: []string{"disk-w2"}},
			want: Known{Epoch: 8, Disks: []KnownFormer{former("w3")}, Erased: []string{"disk-w2"}, ErasedAt: map[string]uint64{"disk-w2": 8}},
		},
		"an erased disk of which the cluster has a salt again": {
			had:  Known{Epoch: 7, Erased: []string{"disk-w1", "disk-w2"}, ErasedAt: map[string]uint64{"disk-w0": 1}},
			seen: Known{Epoch: 8, Nodes: nodes("w1"), Disks: []KnownFormer{former("w2")}},
			want: Known{Epoch: 8, Nodes: with("w1", node("w1", unsalted)), Erased: []string{"disk-w1", "disk-w2"}},
		},
		"bans, and their names": {
			had:  Known{Nodes: nodes("w1", "w2"), Bans: map[string]int64{"uid-w1": 3, "uid-w2": 2, "nameless": 1}, Names: map[string]string{"uid-w2": "w2"}},
			seen: Known{Nodes: nodes("w1", "w3"), Bans: map[string]int64{"uid-w1": 2, "uid-w3": 3}},
			want: Known{
				Former: []string{"machine-w2"},
				Nodes:  nodes("w1", "w3"), Bans: map[string]int64{"uid-w1": 3, "uid-w2": 2, "uid-w3": 3, "nameless": 1},
				Names: map[string]string{"uid-w1": "w1", "uid-w2": "w2", "uid-w3": "w3"}, Gone: []KnownGone{{"uid-w2", "w2", 0}}, Disks: []KnownFormer{former("w2")},
			},
		},
		"nodes of version 1, which have no UID": {
			had:  Known{Nodes: map[string]KnownNode{"w1": {MachineID: "machine-w1"}, "w2": {MachineID: "machine-w2"}}},
			seen: Known{Epoch: 4, Nodes: nodes("w1")},
			want: Known{Epoch: 4, Nodes: nodes("w1"), Gone: []KnownGone{{"", "w2", 4}}, Former: []string{"machine-w2"}},
		},
		"a machine that was removed, and is enrolled again": {
			had:  Known{Nodes: nodes("w1"), Former: []string{"machine-w0", "machine-w2"}},
			seen: Known{Nodes: nodes("w1", "w2")},
			want: Known{Nodes: nodes("w1", "w2"), Former: []string{"machine-w0"}},
		},
		"whose a disk is, the cluster says": {
			had:  Known{Disks: []KnownFormer{former("w2")}},
			seen: Known{Disks: []KnownFormer{{KnownDisk: node("w2").Disk, MachineID: "another"}}},
			want: Known{Disks: []KnownFormer{{KnownDisk: node("w2").Disk, MachineID: "another", Node: "w2"}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tt.want.Version = KnownVersion
			if tt.want.Nodes == nil {
				tt.want.Nodes = map[string]KnownNode{}
			}
			before := fmt.Sprintf("%+v", tt.seen)
			got := tt.had.Keep(&tt.seen)
			if !reflect.DeepEqual(got, &tt.want) {
				t.Errorf("%+v\nwant %+v", got, &tt.want)
			}
			if now := fmt.Sprintf("%+v", tt.seen); now != before {
				t.Errorf("what was seen has changed: %s", now)
			}
			// The written state is the same when it is read, so that nothing is written twice.
			text, err := json.Marshal(got)
			if err != nil {
				t.Fatal(err)
			}
			var read Known
			if err := json.Unmarshal(text, &read); err != nil || !reflect.DeepEqual(&read, got) {
				t.Errorf("%+v, %v\nwas %+v", &read, err, got)
			}
			if again := read.Keep(&tt.seen); !reflect.DeepEqual(again, got) {
				t.Errorf("a second time: %+v", again)
			}
		})
	}
}

func TestOnlySoMuchThatHasGoneIsKept(t *testing.T) {
	had := &Known{Nodes: nodes("new")}
	for i := range MaxKept {
		name := fmt.Sprintf("w%d", i)
		had.Gone = append(had.Gone, KnownGone{UID: "uid-" + name, Name: name})
		had.Disks = append(had.Disks, former(name))
	}
	got := had.Keep(&Known{})
	if len(got.Gone) != MaxKept || got.Gone[0].Name != "w1" || got.Gone[MaxKept-1].Name != "new" {
		t.Errorf("%d enrollments, from %+v to %+v", len(got.Gone), got.Gone[0], got.Gone[len(got.Gone)-1])
	}
	if len(got.Disks) != MaxKept || got.Disks[0].Node != "w1" || got.Disks[MaxKept-1].Node != "new" {
		t.Errorf("%d disks, from %+v to %+v", len(got.Disks), got.Disks[0], got.Disks[len(got.Disks)-1])
	}
}

// K4: an erased disk's salt is deleted at once from all of known.json.
func TestASaltOfANodeThatHasGoneIsErasedAtOnce(t *testing.T) {
	d, err := Create(filepath.Join(t.TempDir(), "muster-prod"), example(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	if err := d.Remember(&Known{Nodes: nodes("w1"), Disks: []KnownFormer{former("w2"), former("w3")}}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"w1", "w2"} {
		if _, err := d.EraseDisk("disk-" + name); err != nil {
			t.Fatal(err)
		}
		text, err := d.Read(KnownFile)
		if err != nil || strings.Contains(string(text), "salt-"+name) || !strings.Contains(string(text), "salt-w3") {
			t.Errorf("%s: %s, %v", name, text, err)
		}
	}
	k, err := d.Known()
	if err != nil || !slices.Equal(k.Erased, []string{"disk-w1", "disk-w2"}) || k.ErasedAt != nil { // it is unknown whether the cluster still has it
		t.Errorf("%+v, %v", k, err)
	}
}

// K4: a command that has read the cluster before a disk was erased does not write its salt again.
func TestWhatWasErasedMeanwhileDoesNotComeBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "muster-prod")
	d, err := Create(path, example(t))
	if err != nil {
		t.Fatal(err)
	}
	view, err := View(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = view.Close() })
	if err := d.Remember(&Known{Nodes: nodes("w1"), Disks: []KnownFormer{former("w2")}}); err != nil {
		t.Fatal(err)
	}
	had, err := view.Known()
	if err != nil {
		t.Fatal(err)
	}
	next := had.Keep(&Known{Epoch: 8, Nodes: nodes("w1")})
	if _, err := d.EraseDisk("disk-w2"); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil { // another program's, which has ended
		t.Fatal(err)
	}
	if err := view.RememberAfter(had, next); err == nil || !strings.Contains(err.Error(), "meanwhile") {
		t.Errorf("%v", err)
	}
	if text, err := view.Read(KnownFile); err != nil || strings.Contains(string(text), "salt-w2") {
		t.Errorf("%s, %v", text, err)
	}
	if had, err = view.Known(); err != nil {
		t.Fatal(err)
	}
	if err := view.RememberAfter(had, had.Keep(&Known{Epoch: 8, Nodes: nodes("w1")})); err != nil {
		t.Error(err)
	}
}

// A file of version 1 is read, and its missing fields are unknown.
func TestKnownOfVersion1IsRead(t *testing.T) {
	d, err := Create(filepath.Join(t.TempDir(), "muster-prod"), example(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	for text, want := range map[string]string{
		`{"version": 1, "policy": {"json": "", "signature": ""}, "nodes": {"w1": {"machineID": "m", "role": "worker", "disk": {"id": "d", "salt": "s", "rootVersion": 1}}}, "bans": {"u": 3}, "erased": ["e"]}`: "",
		`{"version": 2, "policy": {"json": "", "signature": ""}, "nodes": {}}`:                "",
		`{"version": 0, "policy": {"json": "", "signature": ""}, "nodes": {}}`:                "version 0",
		`{"version": 3, "policy": {"json": "", "signature": ""}, "nodes": {}}`:                "version 3",
		`{"version": 2, "policy": {"json": "", "signature": ""}, "nodes": {}, "unknown": {}}`: "unknown field",
	} {
		if err := d.Write(KnownFile, []byte(text)); err != nil {
			t.Fatal(err)
		}
		k, err := d.Known()
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v", text, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if err := d.Remember(k.Keep(&Known{Nodes: k.Nodes})); err != nil {
			t.Fatal(err)
		}
		next, err := d.Known()
		if err != nil || next.Version != KnownVersion || !maps.Equal(next.Nodes, k.Nodes) || !maps.Equal(next.Bans, k.Bans) || !slices.Equal(next.Erased, k.Erased) || next.Gone != nil {
			t.Errorf("%+v, %v", next, err)
		}
	}
}
