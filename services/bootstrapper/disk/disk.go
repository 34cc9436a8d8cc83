// Package disk keeps a machine's state disk: where what must outlive a reboot is, and
// which key belongs to it.
//
// Its ID is made on the machine before anybody is asked for a key, since the key is
// derived from it. There are two modes. "luks" is a LUKS2 volume with a MAC for each sector:
// see [LUKS], and docs/state-disk.md. "plain" is a folder on a disk that is not encrypted:
// the key protects nothing there, but a check value of it is kept, so that a machine
// notices when it is given the key of another cluster or disk.
package disk

import (
	"context"
	"crypto/rand"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Disk is a machine's state disk as init and join see it, in the running system.
type Disk interface {
	// ID gives the disk's ID: of a LUKS2 volume its UUID, of a folder what a file in it says.
	ID() (keys.DiskID, error)
	// SetKey makes the cluster's key the disk's only one. It may be called again with the same
	// key; another cluster's is refused with STATE_DISK.
	SetKey(ctx context.Context, key keys.Disk) error
}

// Open returns the state disk that the image's configuration describes, in the running
// system. Mode "luks" wants the volume to be open already: the initramfs opens it.
func Open(mode, path string, options ...Option) (Disk, error) {
	switch mode {
	case "plain":
		return &Plain{dir: path}, nil
	case "luks":
		return OpenLUKS(path, options...)
	}
	return nil, refuse("stateDisk.mode %q is unknown", mode)
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
