package ownerdir

import (
	"maps"
	"path/filepath"
	"testing"

	"github.com/muster-k8s/muster/trust/attest"
)

// A7: what the folder records outlives the program, and only a folder that is open for writing changes.
func TestControlPlanesAreRecorded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "muster-prod")
	d := mustCreate(t, path, example(t))
	one, two := attest.MachineID{1}, attest.MachineID{2}
	for _, s := range []struct {
		name string
		id   *attest.MachineID
		want map[string]attest.MachineID
	}{
		{"cp1", nil, nil},
		{"cp1", &one, map[string]attest.MachineID{"cp1": one}},
		{"cp1", &one, map[string]attest.MachineID{"cp1": one}},
		{"cp2", &attest.MachineID{}, map[string]attest.MachineID{"cp1": one, "cp2": {}}},
		{"cp1", &two, map[string]attest.MachineID{"cp1": two, "cp2": {}}},
		{"cp2", nil, map[string]attest.MachineID{"cp1": two}},
	} {
		if err := d.RecordControlPlane(s.name, s.id); err != nil {
			t.Fatal(err)
		}
		view, err := View(path)
		if err != nil {
			t.Fatal(err)
		}
		if have := view.Cluster().ControlPlanes; !maps.Equal(have, s.want) {
			t.Errorf("after %s: %v, want %v", s.name, have, s.want)
		}
		if err := view.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if c := d.Cluster(); c.ControlPlane(two) != "cp1" || c.ControlPlane(one) != "" {
		t.Errorf("%v", c.ControlPlanes)
	}
	view, err := View(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = view.Close() }()
	if err := view.RecordControlPlane("cp1", &two); err != nil {
		t.Errorf("nothing changes: %v", err)
	}
	if err := view.RecordControlPlane("cp1", &one); err == nil {
		t.Error("a folder that is open for reading was changed")
	}
}
