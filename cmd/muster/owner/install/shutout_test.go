package install

import (
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/backup"
)

func TestABackupIsComparedWithWhatTheFolderKnows(t *testing.T) {
	m := &backup.Manifest{State: backup.State{Epoch: 4, Nodes: []backup.Node{
		{Name: "node1", UID: "a", MachineID: "1"}, {Name: "w1", UID: "b", MachineID: "2"}, {Name: "w2", UID: "c", Banned: true}, {Name: "w3", UID: "d"},
		{Name: "w5", UID: "f", MachineID: "5", DiskID: "x"}, {Name: "w6", UID: "g", MachineID: "6", DiskID: "y"}, {Name: "w7", UID: "h", Banned: true},
	}}}
	known := &ownerdir.Known{
		Version: ownerdir.KnownVersion, Epoch: 9, Bans: map[string]int64{"b": 2, "c": 1, "h": 1, "x": 1}, Gone: []ownerdir.KnownGone{{UID: "d", Name: "w3"}, {UID: "y", Name: "w9"}},
		Nodes: map[string]ownerdir.KnownNode{
			"node1": {UID: "a", MachineID: "1"}, "w1": {UID: "b", MachineID: "2", Banned: true}, "w2": {UID: "c", Banned: true}, "w4": {UID: "e", MachineID: "4"},
			"w5": {UID: "f", MachineID: "50", Disk: ownerdir.KnownDisk{ID: "x"}}, "w6": {UID: "g", MachineID: "6", Disk: ownerdir.KnownDisk{ID: "z"}}, "w7": {UID: "h"},
		},
	}
	want := []string{
		"The folder records epoch 9.", "Banned since, and not banned in it: w1.", "Banned in it, but no longer banned: w7.",
		"Given another machine or disk since: w5, w6.", "Forgotten since, and enrolled in it: w3.", "Joined since, and not in it: w4.",
	}
	if got := backups.Since(m, known); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	// What a restore bans before any machine gets something: also the machine that another one has replaced.
	if got := revoked(m, known); !slices.Equal(got, []string{"w1", "w3", "w5"}) {
		t.Errorf("it would ban %q", got)
	}
	for machine, want := range map[string]bool{"1": false, "2": true, "4": false, "5": true, "50": false, "none": false} {
		if got := bannedMachine(machine, m, known); got != want {
			t.Errorf("machine %s is banned: %v", machine, got)
		}
	}
	if got := backups.Since(m, &ownerdir.Known{Version: ownerdir.KnownVersion, Epoch: 4, Nodes: map[string]ownerdir.KnownNode{"node1": {UID: "a", MachineID: "1"}}}); len(got) != 0 {
		t.Errorf("got %q", got)
	}
	if got := backups.Since(m, &ownerdir.Known{}); len(got) != 1 || !strings.Contains(got[0], "no known.json") {
		t.Errorf("got %q", got)
	}
}
