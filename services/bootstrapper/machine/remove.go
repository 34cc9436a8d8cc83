package machine

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
)

const (
	// removeDepth is how many folders deep [RemoveAll] goes. Paths of so many names are shorter than PATH_MAX.
	removeDepth = 12
	// removeNames is how many names of a folder it reads at once.
	removeNames = 100
)

// RemoveAll is [os.RemoveAll] for trees that pods have made. Those can be so deep that a program which holds each folder open has no files or memory left,
// at every boot. This one moves what is more than removeDepth folders deep to the top of the tree, and goes on there. A link is removed, never followed.
func RemoveAll(at string) error {
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.IsDir() {
		top, err := os.OpenRoot(at)
		if err != nil {
			return err
		}
		if err := errors.Join(empty(top, top, ".", 0), top.Close()); err != nil {
			return err
		}
	}
	return os.Remove(at)
}

// empty removes the content of a folder, whose path below top is at.
func empty(top, folder *os.Root, at string, depth int) error {
	for {
		entries, err := some(folder)
		if err != nil || len(entries) == 0 {
			return err
		}
		for _, e := range entries {
			name := e.Name()
			switch {
			case !e.IsDir():
				err = folder.Remove(name)
			case depth == removeDepth:
				err = top.Rename(path.Join(at, name), rand.Text())
			default:
				var inside *os.Root
				if inside, err = folder.OpenRoot(name); err == nil {
					if err = errors.Join(empty(top, inside, path.Join(at, name), depth+1), inside.Close()); err == nil {
						err = folder.Remove(name)
					}
				}
			}
			if err != nil {
				return err
			}
		}
	}
}

// some returns up to removeNames entries of a folder.
func some(folder *os.Root) ([]fs.DirEntry, error) {
	f, err := folder.Open(".")
	if err != nil {
		return nil, err
	}
	entries, err := f.ReadDir(removeNames)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return entries, errors.Join(err, f.Close())
}
