// Package disk manages a machine's state disk, which keeps data across reboots, and its key.
//
// The machine makes the disk's ID before it requests a key, since the key is derived from the ID. There are two modes. "luks" is a LUKS2 volume with a
// MAC for each sector: see [LUKS], and docs/state-disk.md. "plain" is a folder on an unencrypted disk: the key protects nothing there, but a check value
// of it is stored, so that a machine detects the key of another cluster or disk.
package disk

import (
	"context"
	"crypto/rand"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Disk is a machine's state disk in the running system, for init and join.
type Disk interface {
	// ID returns the disk's ID: the UUID of a LUKS2 volume, or the content of a file in a folder.
	ID() (keys.DiskID, error)
	// SetKey makes the cluster's key the disk's only key. It may be called again with the same key; another cluster's key is refused with STATE_DISK.
	SetKey(ctx context.Context, key keys.Disk) error
}

// Open returns the state disk that the image's configuration describes, in the running system. In mode "luks" the initramfs must have opened the volume.
func Open(mode, path string, options ...Option) (Disk, error) {
	switch mode {
	case "plain":
		return &Plain{dir: path}, nil
	case "luks":
		return OpenLUKS(path, options...)
	}
	return nil, refuse("stateDisk.mode %q is unknown", mode)
}

// newUUID returns a random UUID (RFC 9562, section 5.4).
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
