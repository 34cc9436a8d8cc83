package component

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Sweep removes from [Folders] all files that are neither a component of the list nor from an archive of it, and returns their names (B8). The list must
// be installed.
func (in *Installer) Sweep(list []Component) (removed []string, err error) {
	listed, err := in.Files(list)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(in.root)
	if err != nil {
		return nil, err
	}
	defer root.Close() //nolint:errcheck // a failed removal is returned at once
	for _, folder := range Folders {
		top := strings.TrimPrefix(folder, "/")
		if info, err := root.Lstat(top); err == nil && !info.IsDir() { // a link, which the walk would follow
			removed = append(removed, folder)
			if err := root.Remove(top); err != nil {
				return removed, err
			}
			continue
		}
		err := fs.WalkDir(root.FS(), top, func(at string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			name := path.Join("/", at)
			if err != nil || d.IsDir() || listed[name] {
				return err
			}
			removed = append(removed, name)
			return root.Remove(at)
		})
		if err != nil {
			return removed, err
		}
	}
	return removed, nil
}

// unpackedNames returns the files that an archive has put into its folder, and the archive itself.
func (in *Installer) unpackedNames(c Component) ([]string, error) {
	root, err := os.OpenRoot(filepath.Join(in.root, c.folder))
	if err != nil {
		return nil, err
	}
	defer root.Close() //nolint:errcheck // nothing is written through it
	f, err := root.Open(path.Join(c.rel, archiveName(c)))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names := []string{archiveName(c)}
	return names, in.walk(f, func(name string, h *tar.Header, _ io.Reader) error {
		if h.Typeflag == tar.TypeReg {
			names = append(names, name)
		}
		return nil
	})
}
