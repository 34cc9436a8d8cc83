package disk

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	uuidFile  = "uuid"
	checkFile = "key-check"
	// checkLabel precedes the disk's ID in the MAC that checks a key.
	checkLabel = "muster/v1/disk-check\x00"
)

// Plain is a state disk of mode "plain".
type Plain struct{ dir string }

// ID implements [Disk]. The first call makes the ID.
func (d *Plain) ID() (keys.DiskID, error) {
	file := filepath.Join(d.dir, uuidFile)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		b = []byte(newUUID() + "\n")
		err = machine.WriteFile(file, b, 0o600, 0o700)
	}
	if err != nil {
		return keys.DiskID{}, refuse("the state disk's ID: %w", err)
	}
	id, err := keys.ParseDiskID(strings.TrimSuffix(string(b), "\n"))
	if err != nil {
		return keys.DiskID{}, refuse("%s: %w; remove the folder if nothing in it is needed", file, err)
	}
	return id, nil
}

// SetKey implements [Disk]. The first key becomes the disk's; a later different key is refused with STATE_DISK.
func (d *Plain) SetKey(_ context.Context, key keys.Disk) error {
	id, err := d.ID()
	if err != nil {
		return err
	}
	raw := key.Expose()
	if len(raw) == 0 {
		return refuse("no key was given for the state disk")
	}
	m := hmac.New(sha256.New, raw)
	m.Write([]byte(checkLabel + id.String()))
	want := m.Sum(nil)
	file := filepath.Join(d.dir, checkFile)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		if err := machine.WriteFile(file, []byte(hex.EncodeToString(want)+"\n"), 0o600, 0o700); err != nil {
			return refuse("the state disk's key check: %w", err)
		}
		return nil
	}
	if err != nil {
		return refuse("the state disk's key check: %w", err)
	}
	have, err := hex.DecodeString(strings.TrimSuffix(string(b), "\n"))
	if err != nil || !hmac.Equal(have, want) {
		return refuse("the state in %s belongs to another key, so to another cluster: remove the folder if nothing in it is needed, and restart the machine", d.dir)
	}
	return nil
}
