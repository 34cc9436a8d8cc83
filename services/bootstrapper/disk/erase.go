package disk

import (
	"errors"
	"os"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/trust/keys"
)

// part is one write to the disk's first [luks2.Size] bytes.
type part struct {
	at      int64
	content []byte
}

// Erase overwrites the header of the open volume with zeros, and with it the only copy of the volume key on the disk. The volume
// stays open until the machine restarts; then the machine formats the disk, under a new UUID. Erase refuses with STATE_DISK if
// the open volume is not id. If it is interrupted, the disk is the cluster's still, or new, or blank (B3).
func (l *LUKS) Erase(id keys.DiskID) (err error) {
	m, err := l.mapped()
	if err != nil {
		return err
	}
	if m == nil {
		return refuse("the state disk %s is not open", l.device)
	}
	if m.id != id {
		return refuse("the state disk that is open has the UUID %s, and not %s", m.id, id)
	}
	if l, err = l.beneath(m); err != nil { // the device in use, whatever the configured link points to now
		return err
	}
	b, err := l.read()
	if err != nil {
		return err
	}
	f, err := l.openDevice(os.O_WRONLY)
	if err != nil {
		return refuse("the state disk: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, p := range erasure(b) {
		_, err := f.WriteAt(p.content, p.at)
		if err == nil {
			err = f.Sync() // each is on the disk before the next
		}
		if err != nil {
			return refuse("erase the header of %s: %w", l.device, err)
		}
	}
	return nil
}

// erasure returns the writes that make a disk with this header blank, in their order. The first one marks it as new, in one
// sector, and the last one removes this mark: between them a machine that boots formats it again.
func erasure(header []byte) (out []part) {
	if first, err := luks2.MarkNew(header); err == nil { // else the header was replaced while the disk was open
		out = append(out, part{0, first})
	}
	return append(out, part{luks2.MarkSize, make([]byte, luks2.Size-luks2.MarkSize)}, part{0, make([]byte, luks2.MarkSize)})
}
