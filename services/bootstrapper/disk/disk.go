// Package disk keeps a machine's state disk: where what must outlive a reboot is, and
// which key belongs to it.
//
// Its ID is made on the machine before anybody is asked for a key, since the key is
// derived from it. This version knows the mode "plain", a folder on a disk that is not
// encrypted: the key protects nothing there, but a check value of it is kept, so that a
// machine notices when it is given the key of another cluster or disk.
package disk

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	uuidFile  = "uuid"
	checkFile = "key-check"
	// checkLabel goes before the disk's ID into the MAC that checks a key.
	checkLabel = "muster/v1/disk-check\x00"
)

// Plain is a state disk of mode "plain".
type Plain struct{ dir string }

// Open returns the state disk that the image's configuration describes. Mode "luks" is
// refused with STATE_DISK.
func Open(mode, dir string) (*Plain, error) {
	switch mode {
	case "plain":
		return &Plain{dir: dir}, nil
	case "luks":
		return nil, refuse(`stateDisk.mode "luks" comes with a later version of Muster: use an image with mode "plain", and a policy with insecure.allowPlainState`)
	}
	return nil, refuse("stateDisk.mode %q is unknown", mode)
}

// ID gives the disk's ID, and makes one the first time.
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

// SetKey opens the disk with its key. The first key becomes the disk's; another one later
// is refused with STATE_DISK.
func (d *Plain) SetKey(key keys.Disk) error {
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

// newUUID makes a random UUID (RFC 9562, section 5.4).
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func refuse(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, format, args...)
}
