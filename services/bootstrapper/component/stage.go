package component

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/muster-k8s/muster/trust/attest"
)

// Stage fetches the components of list that are not installed into dir, a folder of its own, and installs nothing. Installations by this Installer take
// them from there, with the same comparison as from a mirror. It refuses with COMPONENT_HASH or COMPONENT_UNAVAILABLE.
func (in *Installer) Stage(ctx context.Context, dir string, list []Component, progress func(string)) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // nothing is written through it
	if err := sweep(root); err != nil {
		return err
	}
	in.staged = dir
	for i, c := range list {
		name := hex.EncodeToString(c.sha256[:])
		if sum, _, err := digest(root, name); err == nil && sum == c.sha256 || in.Installed(c) {
			continue
		}
		progress(fmt.Sprintf("fetching %s (%d of %d)", c.Name(), i+1, len(list)))
		tmp, err := in.fetch(ctx, root, c)
		if err == nil {
			err = settle(root, tmp, name, 0o600)
		}
		if err != nil {
			return attest.Refuse(attest.ReasonOf(err), "%s: %w", c.Name(), err)
		}
	}
	return nil
}

// fromStage copies a component's content from the folder of [Installer.Stage] to a temporary file below root, and returns its name. It compares the hash:
// the folder is on the state disk, on which everything may have been changed (B8).
func (in *Installer) fromStage(root *os.Root, c Component) (name string, err error) {
	if in.staged == "" {
		return "", fs.ErrNotExist
	}
	staged, err := os.OpenRoot(in.staged)
	if err != nil {
		return "", err
	}
	defer staged.Close() //nolint:errcheck // nothing is written through it
	f, err := staged.Open(hex.EncodeToString(c.sha256[:]))
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	name, err = spool(root, io.TeeReader(io.LimitReader(f, in.limits.Download+1), h), in.limits.Download)
	if err == nil && [32]byte(h.Sum(nil)) != c.sha256 {
		err = errors.Join(errors.New("its content has changed"), root.Remove(name))
	}
	return name, err
}

// Installed reports whether a component is in place with the right content.
func (in *Installer) Installed(c Component) bool {
	root, err := os.OpenRoot(filepath.Join(in.root, c.folder))
	if err != nil {
		return false
	}
	defer root.Close() //nolint:errcheck // nothing is written through it
	ok, err := in.present(root, c)
	return err == nil && ok
}

// Files returns the files of the installed components of a list. Archives that are not installed have none.
func (in *Installer) Files(list []Component) (map[string]bool, error) {
	out := map[string]bool{}
	for _, c := range list {
		if !c.extract {
			out[c.Name()] = true
			continue
		}
		names, err := in.unpackedNames(c)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, n := range names {
			out[path.Join(c.Name(), n)] = true
		}
	}
	return out, nil
}

// Remove removes the files of the list old that are not in the list next, which must be installed. Files of neither stay: pods of a network plugin have
// installed them.
func (in *Installer) Remove(old, next []Component) (removed []string, err error) {
	was, err := in.Files(old)
	if err != nil {
		return nil, err
	}
	stays, err := in.Files(next)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(in.root)
	if err != nil {
		return nil, err
	}
	defer root.Close() //nolint:errcheck // a failed removal is returned at once
	for name := range was {
		if stays[name] {
			continue
		}
		err := root.Remove(name[1:])
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return removed, err
		}
		removed = append(removed, name)
	}
	slices.Sort(removed)
	return removed, nil
}
