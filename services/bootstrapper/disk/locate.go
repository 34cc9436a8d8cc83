package disk

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
)

const (
	// Settle is how long [LUKS.Locate] waits for other disks before it decides that none is a state disk.
	Settle = 5 * time.Second
	// locatePoll is the pause between two looks.
	locatePoll = 100 * time.Millisecond
)

// otherDevices are block devices that are never a machine's disk.
var otherDevices = regexp.MustCompile(`^(dm-|loop|ram|zram|sr|fd|nbd)[0-9]`)

// Locate finds the state disk under another name, and returns the name that it has in this boot. The kernel names disks in the order in which they appear: a
// cloud's PersistentVolume that stays attached while a node restarts can have the name that the state disk had. So if the configured device has no header of
// Muster, and exactly one other disk has that of a cluster's state disk, that one is taken. Who can write a disk can write such a header, but gets no key for it: the
// disk's ID is another (J2). So a disk with the mark of a new one is not taken: it would be formatted.
//
// A path below /dev/disk names a disk by its serial number, and stays. Locate refuses with STATE_DISK if several other disks have a header.
func (l *LUKS) Locate(ctx context.Context, settle time.Duration) (string, error) {
	if strings.HasPrefix(l.device, "/dev/disk/") {
		return l.device, nil
	}
	if m, err := l.mapped(); err != nil || m != nil {
		return l.device, err
	}
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	for !l.marked(true) {
		others := l.others()
		if len(others) > 1 {
			return "", refuse("%s has no state disk of Muster, and several other disks have one: %s; detach those of other machines", l.device, strings.Join(others, ", "))
		}
		if len(others) == 1 {
			l.device = others[0]
			break
		}
		if retry.Wait(ctx, locatePoll) != nil {
			break // it is blank, or its header is damaged
		}
	}
	return l.device, nil
}

// marked reports whether the disk has a header that Muster has written, of a cluster's state disk or, with orNew, of a new one.
func (l *LUKS) marked(orNew bool) bool {
	b, err := l.read()
	if err != nil {
		return false
	}
	if _, isNew := luks2.New(b); isNew {
		return orNew
	}
	h, err := luks2.Parse(b, l.integrity)
	return err == nil && (orNew || h.Label == luks2.LabelState)
}

// others returns the other devices with the header of a cluster's state disk.
func (l *LUKS) others() (out []string) {
	all, err := os.ReadDir(filepath.Join(l.sys, "class/block"))
	if err != nil {
		return nil
	}
	for _, e := range all {
		other := *l
		other.device = filepath.Join(l.dev, e.Name())
		if !otherDevices.MatchString(e.Name()) && other.device != l.device && other.marked(false) {
			out = append(out, other.device)
		}
	}
	return out
}
