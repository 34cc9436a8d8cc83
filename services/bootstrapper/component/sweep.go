package component

import (
	"archive/tar"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/muster-k8s/muster/internal/tree"
)

// Sweep removes from [Folders] all files that are neither a component of the list nor from an archive of it, and calls removes with each name before (B8).
// The list must be installed.
func (in *Installer) Sweep(list []Component, removes func(name string)) error {
	listed, err := in.Files(list)
	if err != nil {
		return err
	}
	for _, folder := range Folders {
		top := filepath.Join(in.root, folder)
		remove := func(at string) error {
			removes(folder + strings.TrimPrefix(at, top))
			return tree.RemoveAll(at)
		}
		err := tree.Walk(top, func(at string, d fs.DirEntry) error {
			if d.IsDir() || listed[folder+strings.TrimPrefix(at, top)] {
				return nil
			}
			return remove(at) // also a link in the place of the folder itself
		}, remove)
		if err != nil {
			return err
		}
	}
	return nil
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
