package provider

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
)

// volume is a file system with a label that the machine looks for.
type volume struct {
	device, label string
	iso           bool // ISO 9660, which this package reads itself; otherwise vfat, which the kernel mounts
}

// volumes returns the volumes with one of these labels, in the order of the devices' names, and the error of those that can't be read. Case does not matter,
// since tools for vfat change it.
func (m Machine) volumes(labels ...string) (out []volume, unread, err error) {
	class := filepath.Join(m.Sys, "class/block")
	all, err := os.ReadDir(class)
	if missing(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, e := range all {
		if !m.Disks && !m.optical(e.Name()) {
			continue
		}
		// A partition that begins where its disk does shows the disk's own file system: a hybrid ISO image has one.
		if start, err := os.ReadFile(filepath.Join(class, e.Name(), "start")); err == nil && strings.TrimSpace(string(start)) == "0" {
			continue
		}
		v := volume{device: filepath.Join(m.Dev, e.Name())}
		if v.label, err = fatLabel(v.device); err != nil {
			if v.label, err = isoLabel(v.device); err != nil {
				if errors.Is(err, unix.EIO) { // otherwise another file system, or none
					unread = errors.Join(unread, err)
				}
				continue
			}
			v.iso = true
		}
		for _, l := range labels {
			if strings.EqualFold(l, v.label) {
				out = append(out, v)
			}
		}
	}
	return out, unread, nil
}

// optical reports whether a block device is a drive of CDs or DVDs: SCSI's peripheral device type 5 (SPC-4, standard INQUIRY data). A cluster attaches volumes as disks.
func (m Machine) optical(name string) bool {
	kind, err := os.ReadFile(filepath.Join(m.Sys, "class/block", name, "device/type"))
	return err == nil && strings.TrimSpace(string(kind)) == "5"
}

// one returns the volume with one of these labels. Two of them are an error: which one is meant is not known.
func (m Machine) one(labels ...string) (volume, error) {
	found, unread, err := m.volumes(labels...)
	switch {
	case err != nil:
		return volume{}, err
	case len(found) == 0 && unread != nil:
		return volume{}, fmt.Errorf("%w: no volume that can be read is labeled %s: %w", ErrAbsent, strings.Join(labels, " or "), unread)
	case len(found) == 0:
		return volume{}, fmt.Errorf("%w: no volume is labeled %s", ErrAbsent, strings.Join(labels, " or "))
	case len(found) > 1:
		return volume{}, fmt.Errorf("the volumes %s and %s both have the label %s: remove one", found[0].device, found[1].device, labels[0])
	}
	return found[0], nil
}

// fatLabel reads the label in a FAT file system's first sector (Microsoft, FAT File System Specification, "Boot Sector and BPB").
func fatLabel(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b := make([]byte, 512)
	if _, err := io.ReadFull(f, b); err != nil {
		return "", err
	}
	if b[510] != 0x55 || b[511] != 0xaa {
		return "", errors.New("no boot sector")
	}
	for _, at := range []int{54, 82} { // the file system's type in FAT12 and FAT16, and in FAT32; the label is before it
		if bytes.HasPrefix(b[at:], []byte("FAT")) {
			return strings.TrimRight(string(b[at-11:at]), " "), nil
		}
	}
	return "", errors.New("no FAT")
}

// reader reads the file of a path in a volume, at most limit bytes. A missing file is [fs.ErrNotExist].
type reader func(path string, limit int64) ([]byte, error)

// open returns a reader of the volume's files, and the function that ends it.
func (m Machine) open(v volume) (reader, func(), error) {
	if v.iso {
		f, err := os.Open(v.device)
		if err != nil {
			return nil, nil, err
		}
		return func(path string, limit int64) ([]byte, error) { return readISO(f, path, limit) }, func() { _ = f.Close() }, nil
	}
	dir, unmount, err := m.Mount(v.device)
	if err != nil {
		return nil, nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		unmount()
		return nil, nil, err
	}
	return func(path string, limit int64) ([]byte, error) { return readFile(root, path, limit) }, func() { _ = root.Close(); unmount() }, nil
}

// mount mounts a vfat volume at a folder. The kernel parses what an attacker may have written; all that this changes are names and content of its files.
func mount(device, at string) (string, func(), error) {
	if err := os.MkdirAll(at, 0o700); err != nil {
		return "", nil, err
	}
	if err := unix.Mount(device, at, "vfat", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return "", nil, fmt.Errorf("mount %s: %w", device, err)
	}
	return at, func() { _ = unix.Unmount(at, unix.MNT_DETACH) }, nil
}

// medium reads the config medium: a vfat volume with metadata.yaml and, unless DHCP configures the network, network.yaml.
func (m Machine) medium() (*Found, error) {
	v, err := m.one(layout.ConfigLabel)
	if err != nil {
		return nil, err
	}
	f := &Found{}
	f.From = v.device
	return f, m.with(v, func(read reader) error {
		b, err := read(layout.MetadataFile, maxMedium)
		if err != nil {
			return err
		}
		f.Document = b
		f.Network, err = read(layout.NetworkFile, maxMedium)
		if missing(err) {
			return nil
		}
		return err
	})
}

// with calls use with a reader of the volume's files. Its errors name the device.
func (m Machine) with(v volume, use func(reader) error) error {
	read, done, err := m.open(v)
	if err == nil {
		defer done()
		err = use(read)
	}
	if err != nil {
		return fmt.Errorf("the volume %s on %s: %w", v.label, v.device, err)
	}
	return nil
}
