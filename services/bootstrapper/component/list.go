package component

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// Where a machine has the cluster's list.
const (
	// KeptList is on the state disk: what was installed last. Who was root once can have changed it.
	KeptList = "/var/lib/muster/components.json"
	// UnlockList is in memory: what the joinservice said whose key has opened the state disk at this boot (B8).
	UnlockList = "/run/muster/components.json"
)

// A ListFile is the path of a file that has a list.
type ListFile string

// Save writes the list, by rename.
func (f ListFile) Save(list versions.List) error {
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return machine.WriteFile(string(f), text, 0o600, 0o700)
}

// Remove removes the file, if it is there.
func (f ListFile) Remove() error {
	if err := os.Remove(string(f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Load reads the list; nil if there is none.
func (f ListFile) Load() (*versions.List, error) {
	text, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, err
	}
	list, err := versions.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f, err)
	}
	return &list, nil
}
