package tree

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// These are FS_IMMUTABLE_FL and FS_APPEND_FL of linux/fs.h.
const immutable, appendOnly = 0x10, 0x20

// Mutable clears the attributes of a folder or regular file that prevent root from changing or deleting it (chattr(1)). name is relative to an open folder.
// It reports whether name is a folder.
func Mutable(in int, name string) (isFolder bool, err error) {
	var is unix.Statx_t
	if err := unix.Statx(in, name, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_TYPE, &is); err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	kind := is.Mode & unix.S_IFMT
	isFolder = kind == unix.S_IFDIR
	if is.Attributes&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND) == 0 || !isFolder && kind != unix.S_IFREG {
		return isFolder, nil
	}
	fd, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags&^(immutable|appendOnly))
	}
	if err != nil {
		return false, fmt.Errorf("clear the attributes of %s: %w", name, err)
	}
	return isFolder, nil
}

// place is a name in an open folder.
type place struct {
	in   int
	name string
}

// mutably calls do, and once more without the attributes of the places if these may have prevented it.
func mutably(do func() error, places ...place) error {
	err := do()
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	for _, p := range places {
		if _, merr := Mutable(p.in, p.name); merr != nil {
			return errors.Join(err, merr)
		}
	}
	return do()
}
