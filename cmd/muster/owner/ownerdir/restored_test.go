package ownerdir

import (
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestAnErasedDiskIsNamedInCopiesOfWhatWasKnown(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "muster-prod"), example(t))
	if err := d.Remember(&Known{Nodes: map[string]KnownNode{"w": {UID: "u", Disk: KnownDisk{ID: "0f", Salt: "s"}}}}); err != nil {
		t.Fatal(err)
	}
	name, err := d.CopyKnown(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	left, err := d.EraseDisk("0f")
	if err != nil || !slices.Equal(left, []string{d.File(name)}) {
		t.Errorf("left %q, %v", left, err)
	}
}

// After a restore, nothing of what is back counts as older, and no erased disk is forgotten (K4).
func TestAfterARestoreTheFolderKnowsTheClusterOfNow(t *testing.T) {
	salt := func(id string) KnownDisk { return KnownDisk{ID: id, Salt: "s" + id, RootVersion: 1} }
	known := &Known{
		Version: KnownVersion, Epoch: 9, EpochID: "old", Erased: []string{"gone-disk"}, Gone: []KnownGone{{UID: "back", Name: "w1"}, {UID: "other", Name: "w9"}},
		Bans: map[string]int64{"banned": 5, "back": 4, "other": 2}, Names: map[string]string{"banned": "w2", "back": "w1", "other": "w9"},
		Nodes: map[string]KnownNode{"w2": {UID: "banned", Generation: 5, Banned: true, Disk: salt("d2")}, "late": {UID: "late", Disk: salt("d3")}},
	}
	seen := &Known{
		Epoch: 5, EpochID: "new", Nodes: map[string]KnownNode{"w1": {UID: "back", Generation: 2}, "w2": {UID: "banned", Generation: 3, Banned: true, Disk: salt("d2")}},
		Bans: map[string]int64{"banned": 3},
	}
	got := known.Restored(seen)
	if got.Epoch != 5 || got.EpochID != "new" || got.Bans["banned"] != 3 || got.Bans["back"] != 0 || got.Bans["other"] != 2 {
		t.Errorf("%+v", got)
	}
	if !slices.Equal(got.Erased, []string{"gone-disk"}) || !slices.ContainsFunc(got.Disks, func(d KnownFormer) bool { return d.KnownDisk == salt("d3") && d.Node == "late" }) {
		t.Errorf("erased %q, disks %+v", got.Erased, got.Disks)
	}
	if slices.ContainsFunc(got.Gone, func(g KnownGone) bool { return g.UID == "back" }) || !slices.ContainsFunc(got.Gone, func(g KnownGone) bool { return g.UID == "late" }) {
		t.Errorf("gone %+v", got.Gone)
	}
}

// K4: an abandoned restore puts the first machine of before back, without the salt of its erased disk.
func TestADiskIsErasedAlsoWhileARestoreIsOpen(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "muster-prod"), example(t))
	c := d.Cluster()
	c.Restore = &Restore{Former: &Machine{DiskID: "0f", DiskSalt: "s"}}
	if err := d.Save(c); err != nil {
		t.Fatal(err)
	}
	if _, err := d.EraseDisk("0f"); err != nil || d.Cluster().Restore.Former.DiskSalt != "" {
		t.Errorf("%+v, %v", d.Cluster().Restore.Former, err)
	}
}
