package disk

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/trust/keys"
)

// These are the paths of an open volume, and of the first key of a new one until the cluster's key replaces it.
const (
	Mapped       = "/dev/mapper/" + mappedName
	FirstKeyFile = "/run/muster/state-key"
	mappedName   = "muster-state"
)

// ErrWrongKey means that the key is not the disk's. A refusal with STATE_DISK wraps it.
var ErrWrongKey = errors.New("the key does not open the state disk")

// State is the present state of a state disk.
type State int

// These are the states. The zero value is none of them.
const (
	// StateBlank: no header was ever written. First boot.
	StateBlank State = iota + 1
	// StateNew: formatted, but its first key is lost, and the cluster's key was never set.
	StateNew
	// StateLocked: it needs the cluster's key.
	StateLocked
	// StateOpen: it is open at [Mapped].
	StateOpen
)

// String returns the state's name.
func (s State) String() string {
	switch s {
	case StateBlank:
		return "blank"
	case StateNew:
		return "new"
	case StateLocked:
		return "locked"
	case StateOpen:
		return "open"
	}
	return fmt.Sprintf("state %d", int(s))
}

// LUKS is a LUKS2 volume. The initramfs formats or unlocks it; the running system sets its key.
//
// Only this program reads or writes the header on the disk. It reads the header once, into memory, and package luks2 checks it (B5); cryptsetup works on
// an anonymous file in memory with the checked bytes. A header that cryptsetup has written there is also checked before it is written to the disk.
//
// A disk is new until one write of one sector marks it as the cluster's, and that write comes last.
type LUKS struct {
	device    string
	number    string // MAJOR:MINOR that the device must have; empty for any
	integrity luks2.Integrity
	sys       string // path of sysfs
	dev       string // path of devtmpfs
	firstKey  string // path of the first key, on a file system in memory
	run       runner
}

// runner runs a program with files from descriptor 3 on, and passes each line of its output to line, if that is not nil.
type runner func(ctx context.Context, files []*os.File, line func(string), name string, args ...string) error

// Option changes the expectations of [OpenLUKS].
type Option func(*LUKS) error

// WithIntegrity sets stateDisk.integrity of the image's configuration: "hmac-sha256", which is also the default, or "none".
func WithIntegrity(name string) Option {
	return func(l *LUKS) error {
		switch name {
		case "", "hmac-sha256":
			l.integrity = luks2.HMACSHA256
		case "none":
			l.integrity = luks2.NoIntegrity
		default:
			return refuse(`stateDisk.integrity: want "hmac-sha256" or "none", not %q`, name)
		}
		return nil
	}
}

// WithRoot sets the folder that has /sys, /dev and /run, instead of "/".
func WithRoot(root string) Option {
	return func(l *LUKS) error {
		l.sys, l.dev, l.firstKey = filepath.Join(root, "/sys"), filepath.Join(root, "/dev"), filepath.Join(root, FirstKeyFile)
		return nil
	}
}

// OpenLUKS returns the state disk on a block device. It reads nothing yet. By default it requires integrity.
func OpenLUKS(device string, options ...Option) (*LUKS, error) {
	l := &LUKS{device: device, integrity: luks2.HMACSHA256, sys: "/sys", dev: "/dev", firstKey: FirstKeyFile, run: run}
	if !filepath.IsAbs(device) {
		return nil, refuse("stateDisk.path %q is not a device's absolute path", device)
	}
	for _, o := range options {
		if err := o(l); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// State returns the disk's state. It refuses with STATE_DISK a disk that Muster has not written, before anything is opened.
func (l *LUKS) State() (State, error) {
	if m, err := l.mapped(); err != nil {
		return 0, err
	} else if m != nil {
		return StateOpen, nil
	}
	b, err := l.read()
	if err != nil {
		return 0, err
	}
	if luks2.Blank(b) {
		return StateBlank, nil
	}
	if _, isNew := luks2.New(b); isNew {
		return StateNew, nil
	}
	if _, err := l.checkLocked(b); err != nil {
		return 0, err
	}
	return StateLocked, nil
}

// ID implements [Disk]. The ID of an open volume is the one that the kernel opened it with: the header may have changed since. A blank disk has none
// yet.
func (l *LUKS) ID() (keys.DiskID, error) {
	m, err := l.mapped()
	if err != nil {
		return keys.DiskID{}, err
	}
	if m != nil {
		return m.id, nil
	}
	b, err := l.read()
	if err != nil {
		return keys.DiskID{}, err
	}
	if id, isNew := luks2.New(b); isNew {
		return id, nil
	}
	if luks2.Blank(b) {
		return keys.DiskID{}, refuse("the state disk %s is blank, and has no ID before it is formatted", l.device)
	}
	h, err := l.checkHeader(b)
	if err != nil {
		return keys.DiskID{}, err
	}
	return h.ID, nil
}

// Unlock opens the disk at [Mapped] with the cluster's key. The error wraps [ErrWrongKey] if the key is wrong. It does nothing if the disk is open and
// the key is right.
func (l *LUKS) Unlock(ctx context.Context, key keys.Disk) error {
	b, err := l.read()
	if err != nil {
		return err
	}
	h, err := l.checkLocked(b)
	if err != nil {
		return err
	}
	if h.Label != luks2.LabelState {
		return refuse("the state disk %s is new: it is formatted, not unlocked", l.device)
	}
	f, err := inMemory(h.Bytes(), true) // B5: the same bytes are checked, tried and opened
	if err != nil {
		return refuse("the state disk: %w", err)
	}
	defer f.Close()
	if err := l.try(ctx, f, key); err != nil {
		return err
	}
	m, err := l.mapped()
	switch {
	case err != nil:
		return err
	case m == nil:
		return l.open(ctx, f, key)
	case m.id != h.ID:
		return refuse("another disk is open at %s", Mapped)
	}
	return nil
}

// SetKey implements [Disk]. The volume must be open; SetKey works on the device that the kernel has opened, whatever the configured link points to now.
// Until the last write the disk is new, and a machine that stops before that formats it again at the next boot: it has no data of value yet (B3).
func (l *LUKS) SetKey(ctx context.Context, key keys.Disk) error {
	m, err := l.mapped()
	if err != nil {
		return err
	}
	if m == nil {
		return refuse("the state disk %s is not open: the image's initramfs has to run `bootstrapper unlock`", l.device)
	}
	l, err = l.beneath(m) // B5: the disk whose header is checked and written is the one in use
	if err != nil {
		return err
	}
	b, err := l.read()
	if err != nil {
		return err
	}
	h, err := l.checkHeader(b)
	if err != nil {
		// Erasing the disk, the other remedy, would give it another ID.
		if _, isNew := luks2.New(b); isNew {
			return refuse("the state disk is new, and the header that would make it a cluster's is half written: reboot the machine, which formats it again: %w", err)
		}
		return err
	}
	if h.ID != m.id {
		return refuse("the header of %s was replaced while the disk was open: its UUID is %s, and was %s", l.device, h.ID, m.id)
	}
	if h.Label == luks2.LabelState {
		return l.hasKey(ctx, h, key)
	}
	first, err := readFirstKey(l.firstKey)
	if err != nil {
		return refuse("the state disk is new, and its first key is lost: reboot the machine, which formats it again: %w", err)
	}
	next, err := l.rekey(ctx, h, first, key)
	if err != nil {
		return err
	}
	if err := l.write(next); err != nil {
		return refuse("write the header of %s: %w", l.device, err)
	}
	return l.forgetFirstKey()
}

// hasKey returns nil if the disk, which is a cluster's, has this key.
func (l *LUKS) hasKey(ctx context.Context, h *luks2.Header, key keys.Disk) error {
	f, err := inMemory(h.Bytes(), true)
	if err != nil {
		return refuse("the state disk: %w", err)
	}
	defer f.Close()
	if err := l.try(ctx, f, key); errors.Is(err, ErrWrongKey) {
		return refuse("the state disk %s belongs to another key, so to another cluster: erase its first MiB if nothing on it is needed (docs/state-disk.md), and restart the machine: %w", l.device, ErrWrongKey)
	} else if err != nil {
		return err
	}
	return l.forgetFirstKey()
}

// forgetFirstKey removes the first key after it was replaced.
func (l *LUKS) forgetFirstKey() error {
	if err := os.Remove(l.firstKey); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return refuse("remove the state disk's first key: %w", err)
	}
	return nil
}

// checkHeader checks a header by package luks2, and returns its error as a refusal.
func (l *LUKS) checkHeader(b []byte) (*luks2.Header, error) {
	h, err := luks2.Parse(b, l.integrity)
	if err != nil {
		return nil, refuse("the header of %s is not one that Muster writes, and nothing of it was opened: %w; "+
			"find out who changed it, and erase its first MiB only if nothing on the disk is needed (docs/state-disk.md)", l.device, err)
	}
	return h, nil
}

// checkLocked checks the header, and with integrity also the superblock that the kernel reads, before any key is checked.
func (l *LUKS) checkLocked(b []byte) (*luks2.Header, error) {
	h, err := l.checkHeader(b)
	if err != nil || l.integrity != luks2.HMACSHA256 {
		return h, err
	}
	f, err := l.openDevice(os.O_RDONLY)
	if err != nil {
		return nil, refuse("the state disk: %w", err)
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, refuse("the size of %s: %w", l.device, err)
	}
	s := make([]byte, luks2.SuperblockSize)
	if _, err := f.ReadAt(s, luks2.Size); err != nil {
		return nil, refuse("read dm-integrity's superblock on %s: %w", l.device, err)
	}
	if err := luks2.CheckSuperblock(s, size); err != nil {
		return nil, refuse("dm-integrity's superblock on %s, at 1 MiB, is not one of a state disk of this size, and nothing of it was opened: %w; "+
			"find out who changed it, and erase its first MiB only if nothing on the disk is needed (docs/state-disk.md)", l.device, err)
	}
	return h, nil
}

// read reads the header once.
func (l *LUKS) read() ([]byte, error) {
	f, err := l.openDevice(os.O_RDONLY)
	if err != nil {
		return nil, refuse("the state disk: %w", err)
	}
	defer f.Close()
	b := make([]byte, luks2.Size)
	if _, err := io.ReadFull(f, b); err != nil {
		return nil, refuse("read the header of %s: %w", l.device, err)
	}
	return b, nil
}

// write writes a header such that the disk is at each moment the one before, or new, or the one after. The mark of a new disk is in the first sector,
// which a disk writes completely or not at all. That sector is written first for a new disk, and last for one that becomes a cluster's.
func (l *LUKS) write(h *luks2.Header) (err error) {
	f, err := l.openDevice(os.O_WRONLY)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	parts := []struct{ from, to int }{{0, luks2.MarkSize}, {luks2.MarkSize, luks2.Size}}
	if h.Label == luks2.LabelState {
		parts[0], parts[1] = parts[1], parts[0]
	}
	for _, p := range parts {
		if _, err := f.WriteAt(h.Bytes()[p.from:p.to], int64(p.from)); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// inMemory returns an anonymous file with this content; a sealed one can't be changed.
func inMemory(content []byte, sealed bool) (*os.File, error) {
	fd, err := unix.MemfdCreate("header", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "header")
	if _, err := f.WriteAt(content, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if sealed {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
			return nil, errors.Join(fmt.Errorf("seal: %w", err), f.Close())
		}
	}
	return f, nil
}

// newFirstKey returns the random key that a new disk has until the cluster's key replaces it.
func newFirstKey() (keys.Disk, error) {
	b := make([]byte, keys.Size)
	_, _ = rand.Read(b) // never fails
	return keys.ParseDisk(b)
}

// writeFirstKey passes the first key to the running system, in memory only (K3).
func writeFirstKey(file string, key keys.Disk) error {
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		return fmt.Errorf("%s is not on a file system in memory (type %#x), and a key goes to no other", dir, st.Type)
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(hex.EncodeToString(key.Expose()) + "\n")
	return errors.Join(err, f.Close())
}

func readFirstKey(file string) (keys.Disk, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return keys.Disk{}, err
	}
	raw, err := hex.DecodeString(strings.TrimSuffix(string(b), "\n"))
	if err != nil {
		return keys.Disk{}, fmt.Errorf("%s is damaged", file) // K3: without its content
	}
	return keys.ParseDisk(raw)
}
