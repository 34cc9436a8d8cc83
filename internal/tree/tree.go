// Package tree walks and removes folders of the state disk. Pods, or an attacker who was root before the reboot, may have left in them any number of
// entries, at any depth, with any name that the kernel allows (B8).
//
// The use of memory and open files does not depend on what is in a folder, no link is followed, and every error except ENOENT is returned.
package tree

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	// maxDepth is how many folders deep [Walk] and [RemoveAll] go. Paths of this depth fit into PATH_MAX. Only image layers and volumes have deeper folders.
	maxDepth = 12
	// maxNames is how many names of a folder are in memory at once.
	maxNames = 100
)

// Each calls do with each entry of a folder, in no order. do may remove the entry: readdir(3) still returns the others. A missing folder has none.
func Each(folder string, do func(at string, d fs.DirEntry) error) error {
	f, err := os.OpenFile(folder, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		entries, err := f.ReadDir(maxNames)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, d := range entries {
			if err := do(filepath.Join(folder, d.Name()), d); err != nil {
				return err
			}
		}
	}
}

// Walk calls visit with top and everything below it, with a folder before its entries. visit may remove what it is called with, and return [fs.SkipDir] for
// a folder. For one that is more than maxDepth folders deep, Walk calls deep, and does not look into it.
func Walk(top string, visit func(at string, d fs.DirEntry) error, deep func(at string) error) error {
	info, err := os.Lstat(top)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return walk(top, fs.FileInfoToDirEntry(info), maxDepth, visit, deep)
}

func walk(at string, d fs.DirEntry, depth int, visit func(at string, d fs.DirEntry) error, deep func(at string) error) error {
	if d.IsDir() && depth < 0 {
		return deep(at)
	}
	if err := visit(at, d); err != nil || !d.IsDir() {
		if d.IsDir() && errors.Is(err, fs.SkipDir) {
			return nil
		}
		return err
	}
	return Each(at, func(at string, d fs.DirEntry) error { return walk(at, d, depth-1, visit, deep) })
}
