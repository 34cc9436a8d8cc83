package tree

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// RemoveAll is [os.RemoveAll] for trees that pods have made, or root before the reboot. Such trees can be so deep that holding each folder open exhausts
// files or memory, and so wide that reopening a folder after every few names takes hours, at every boot. RemoveAll moves folders below maxDepth to the top
// of the tree, and removes them there. A link is removed, never followed, and attributes that prevent a removal are cleared.
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
	return mutably(func() error { return os.Remove(at) }, place{unix.AT_FDCWD, filepath.Dir(at)}, place{unix.AT_FDCWD, at})
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
	r := remover{top: top}
	if err := r.empty(top, 0); err != nil {
		return errors.Join(err, r.close())
	}
	for r.tooDeep != nil {
		at, name := r.tooDeep, r.name
		r.tooDeep, r.name = nil, ""
		if err := errors.Join(r.empty(at, 0), at.Close()); err != nil {
			return errors.Join(err, r.close())
		}
		if err := unlink(int(top.Fd()), name, unix.AT_REMOVEDIR); err != nil {
			return errors.Join(fmt.Errorf("remove %q: %w", name, err), r.close())
		}
	}
	return nil
}

// open opens a folder by its name in another one.
func open(in int, name string) (*os.File, error) {
	fd, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// remover empties a folder in rounds. Each empties one folder, 12 folders deep, and leaves what is deeper for the next round.
type remover struct {
	top *os.File
	// tooDeep is the first folder that was too deep in this round, moved to top under name; the others of the round are moved into it. So each folder is read
	// in one round only, and no new one is made, for which a full disk may have no room. It is nil if none was too deep.
	tooDeep *os.File
	name    string
}

func (r *remover) close() error {
	if r.tooDeep == nil {
		return nil
	}
	return r.tooDeep.Close()
}

// empty removes the content of a folder, until it finds none. It reads the folder to its end before it starts again, because ext4 then scans the emptied
// blocks again.
func (r *remover) empty(folder *os.File, depth int) error {
	for {
		f, err := open(int(folder.Fd()), ".")
		if err != nil {
			return err
		}
		removed, err := r.emptyOnce(f, depth)
		if err := errors.Join(err, f.Close()); err != nil || removed == 0 {
			return err
		}
	}
}

func (r *remover) emptyOnce(folder *os.File, depth int) (removed int, err error) {
	for {
		names, err := folder.Readdirnames(maxNames)
		if errors.Is(err, io.EOF) {
			return removed, nil
		}
		if err != nil {
			return removed, err
		}
		for _, name := range names {
			if name == r.name {
				continue
			}
			if err := r.remove(folder, name, depth); err != nil {
				return removed, fmt.Errorf("remove %q: %w", name, err)
			}
			removed++
		}
	}
}

// remove removes an entry of a folder. depth is that folder's depth below the folder of this round.
func (r *remover) remove(folder *os.File, name string, depth int) error {
	in := int(folder.Fd())
	err := unlink(in, name, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case !errors.Is(err, unix.EISDIR):
		return err
	case depth == maxDepth:
		return r.leave(in, name)
	}
	inside, err := open(in, name)
	if err != nil {
		return err
	}
	if err := errors.Join(r.empty(inside, depth+1), inside.Close()); err != nil {
		return err
	}
	return unlink(in, name, unix.AT_REMOVEDIR)
}

// leave leaves a folder for the next round.
func (r *remover) leave(in int, name string) (err error) {
	if r.tooDeep != nil {
		return move(in, name, int(r.tooDeep.Fd()), rand.Text())
	}
	as := rand.Text()
	if err := move(in, name, int(r.top.Fd()), as); err != nil {
		return err
	}
	r.name = as
	r.tooDeep, err = open(int(r.top.Fd()), as)
	return err
}

func unlink(in int, name string, flags int) error {
	return mutably(func() error { return unix.Unlinkat(in, name, flags) }, place{in, "."}, place{in, name})
}

func move(in int, name string, to int, as string) error {
	return mutably(func() error { return unix.Renameat(in, name, to, as) }, place{in, "."}, place{in, name}, place{to, "."})
}
