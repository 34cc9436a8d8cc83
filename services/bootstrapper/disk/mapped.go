package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/trust/keys"
)

// mapping is the open volume as the kernel reports it.
type mapping struct {
	id  keys.DiskID // the ID that it was opened with
	dir string      // its folder in sysfs
}

// mapped returns the open volume; nil if it is not open. Its ID is in device-mapper's UUID, which libcryptsetup forms as CRYPT-LUKS2-UUID-NAME without the
// UUID's dashes.
func (l *LUKS) mapped() (*mapping, error) {
	names, err := filepath.Glob(filepath.Join(l.sys, "block/dm-*/dm/name"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was closed meanwhile
		}
		if err != nil {
			return nil, refuse("the state disk: %w", err)
		}
		if strings.TrimSuffix(string(b), "\n") != mappedName {
			continue
		}
		if b, err = os.ReadFile(filepath.Join(filepath.Dir(name), "uuid")); err != nil {
			return nil, refuse("the state disk: %w", err)
		}
		u, isLUKS := strings.CutPrefix(strings.TrimSuffix(string(b), "\n"), "CRYPT-LUKS2-")
		u, isOurs := strings.CutSuffix(u, "-"+mappedName)
		if !isLUKS || !isOurs || len(u) != 32 {
			return nil, refuse("%s is something else than a state disk: %.80q", Mapped, b)
		}
		id, err := keys.ParseDiskID(u[:8] + "-" + u[8:12] + "-" + u[12:16] + "-" + u[16:20] + "-" + u[20:])
		if err != nil {
			return nil, refuse("%s: %w", Mapped, err)
		}
		return &mapping{id: id, dir: filepath.Dir(filepath.Dir(name))}, nil
	}
	return nil, nil
}

// beneath returns the state disk on the device beneath the open volume. Links in /dev depend on what devices report, and an attacker with the hardware
// can add a device that reports the same. The kernel distinguishes the two, and does not reuse the name and number of a device in use.
func (l *LUKS) beneath(m *mapping) (*LUKS, error) {
	dir, err := slave(m.dir)
	if err == nil && l.integrity == luks2.HMACSHA256 { // dm-crypt is on dm-integrity, and that on the device
		dir, err = slave(dir)
	}
	if err != nil {
		return nil, refuse("find the device beneath %s: %w", Mapped, err)
	}
	number, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return nil, refuse("find the device beneath %s: %w", Mapped, err)
	}
	on := *l
	// In sysfs a "!" stands for a name's "/".
	on.device = filepath.Join(l.dev, strings.ReplaceAll(filepath.Base(dir), "!", "/"))
	on.number = strings.TrimSpace(string(number))
	return &on, nil
}

// slave returns the sysfs folder of the one device beneath a mapping.
func slave(dir string) (string, error) {
	slaves, err := os.ReadDir(filepath.Join(dir, "slaves"))
	if err != nil {
		return "", err
	}
	if len(slaves) != 1 {
		return "", fmt.Errorf("%s has %d devices beneath it, and a state disk has 1", filepath.Base(dir), len(slaves))
	}
	return filepath.Join(dir, "slaves", slaves[0].Name()), nil
}

// openDevice opens the device, if it has the right number.
func (l *LUKS) openDevice(flag int) (*os.File, error) {
	f, err := os.OpenFile(l.device, flag, 0)
	if err != nil || l.number == "" {
		return f, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(f.Fd()), &st); err != nil {
		err = fmt.Errorf("%s: %w", l.device, err)
	} else if is := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)); is != l.number {
		err = fmt.Errorf("%s is device %s, and %s is on %s", l.device, is, Mapped, l.number)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
