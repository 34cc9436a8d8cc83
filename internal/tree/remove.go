package tree

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// RemoveAll is [os.RemoveAll] for trees that pods have made. Those can be so deep that a program which holds each folder open has no files or memory left,
// and so wide that one which looks at a folder anew for each few names takes hours, at every boot. This one moves what is more than maxDepth folders deep
// to the top of the tree, and goes on there. A link is removed, never followed.
func RemoveAll(at string) error {
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.IsDir() {
		if err := Empty(at); err != nil {
			return err
		}
	}
	return os.Remove(at)
}

// Empty removes the content of a folder, and keeps the folder itself, which may be a mount point. A missing folder is empty.
func Empty(folder string) error {
	top, err := open(unix.AT_FDCWD, folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer top.Close()
	return empty(top, top, 0)
}

// open opens a folder by its name in another one.
func open(in int, name string) (*os.File, error) {
	fd, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// empty removes the content of a folder, until it finds none. It reads the folder to its end before it begins again: ext4 would look at each block that it
// has emptied already.
func empty(top, folder *os.File, depth int) error {
	for {
		f, err := open(int(folder.Fd()), ".")
		if err != nil {
			return err
		}
		removed, err := emptyOnce(top, f, depth)
		if err := errors.Join(err, f.Close()); err != nil || removed == 0 {
			return err
		}
	}
}

func emptyOnce(top, folder *os.File, depth int) (removed int, err error) {
	for {
		names, err := folder.Readdirnames(maxNames)
		if errors.Is(err, io.EOF) {
			return removed, nil
		}
		if err != nil {
			return removed, err
		}
		for _, name := range names {
			if err := remove(top, folder, name, depth); err != nil {
				return removed, fmt.Errorf("remove %q: %w", name, err)
			}
			removed++
		}
	}
}

// remove removes an entry of a folder that is so many folders below top.
func remove(top, folder *os.File, name string, depth int) error {
	in := int(folder.Fd())
	err := unix.Unlinkat(in, name, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case !errors.Is(err, unix.EISDIR):
		return err
	case depth == maxDepth:
		return unix.Renameat(in, name, int(top.Fd()), rand.Text())
	}
	inside, err := open(in, name)
	if err != nil {
		return err
	}
	if err := errors.Join(empty(top, inside, depth+1), inside.Close()); err != nil {
		return err
	}
	return unix.Unlinkat(in, name, unix.AT_REMOVEDIR)
}
