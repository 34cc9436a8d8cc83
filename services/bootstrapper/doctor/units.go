package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coreos/go-systemd/v22/unit"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// unitDirs has the directories of systemd.unit(5) in an image, in their order of precedence.
var unitDirs = []string{"/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"}

// kubeletUnit checks that systemd starts the kubelet only after the bootstrapper has compared the state disk in this boot (B7, B8).
func (d *doctor) kubeletUnit() {
	options, err := d.unitOptions(machine.UnitKubelet)
	if err != nil {
		d.Err(CheckUnits, "Put a kubelet.service into the image, as docs/image.md describes it.", err)
		return
	}
	var conditions []string
	for _, o := range options {
		switch {
		case o.Section != "Unit" || !strings.HasPrefix(o.Name, "Condition"):
		case o.Value == "":
			conditions = nil // systemd.unit(5): an empty value removes all conditions before it, of any kind
		case o.Name == "ConditionPathExists":
			conditions = append(conditions, o.Value)
		}
	}
	if !slices.Contains(conditions, machine.KubeletMayStart) {
		d.Add(CheckUnits, checkup.Fail, "Add ConditionPathExists="+machine.KubeletMayStart+" to the section [Unit] of the image's "+machine.UnitKubelet+".",
			"%s can start before the bootstrapper has compared the state disk: what an intruder has put on the disk would run", machine.UnitKubelet)
		return
	}
	d.OK(CheckUnits, "%s waits until the state disk is compared", machine.UnitKubelet)
}

// unitOptions returns the settings of a unit: those of its file with the highest precedence, then those of its drop-ins in the order of their names.
func (d *doctor) unitOptions(name string) ([]*unit.UnitOption, error) {
	var file string
	dropIns := map[string]string{} // by name: one with a higher precedence hides the others
	for _, dir := range slices.Backward(unitDirs) {
		at := filepath.Join(d.Root, dir, name)
		if _, err := os.Stat(at); err == nil {
			file = at
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	for _, of := range []string{"service", name} { // drop-ins of all services; those of the unit hide them
		for _, dir := range slices.Backward(unitDirs) {
			found, err := filepath.Glob(filepath.Join(d.Root, dir, of+".d", "*.conf"))
			if err != nil {
				return nil, err
			}
			for _, f := range found {
				dropIns[filepath.Base(f)] = f
			}
		}
	}
	if file == "" {
		return nil, errors.New(name + " is not in the image")
	}
	files := []string{file}
	for _, n := range slices.Sorted(maps.Keys(dropIns)) {
		files = append(files, dropIns[n])
	}
	var all []*unit.UnitOption
	for _, f := range files {
		options, err := readUnit(f)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		all = append(all, options...)
	}
	return all, nil
}

func readUnit(path string) ([]*unit.UnitOption, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return unit.DeserializeOptions(f)
}
