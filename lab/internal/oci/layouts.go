package oci

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
)

// maxEntry bounds one file of a layout in a tar, in bytes.
const maxEntry = 4 << 30

// Layouts returns the OCI image layouts that path stands for: path itself if it is one,
// the layout in a tar, or those in the tars of a folder. Tars are unpacked below scratch.
func Layouts(path, scratch string) ([]string, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	tars := []string{path}
	if fi.IsDir() {
		if _, err := os.Stat(filepath.Join(path, "index.json")); err == nil {
			return []string{path}, nil
		}
		if tars, err = filepath.Glob(filepath.Join(path, "*.tar")); err != nil {
			return nil, err
		}
		if len(tars) == 0 {
			return nil, fmt.Errorf("images: %s has neither an index.json nor a *.tar: give an OCI image layout, or a folder of layouts in tars", path)
		}
		slices.Sort(tars)
	}
	var dirs []string
	for _, t := range tars {
		if err := os.MkdirAll(scratch, 0o755); err != nil {
			return nil, err
		}
		dir, err := os.MkdirTemp(scratch, "layout-")
		if err != nil {
			return nil, err
		}
		if err := untar(t, dir); err != nil {
			return nil, fmt.Errorf("images: %s: %w", t, err)
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

// layoutFile matches the only names that a layout has.
var layoutFile = regexp.MustCompile(`^(oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})$`)

func untar(path, dir string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755); err != nil {
		return err
	}
	r := tar.NewReader(f)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeDir {
			continue
		}
		if h.Typeflag != tar.TypeReg || !layoutFile.MatchString(h.Name) || h.Size > maxEntry {
			return fmt.Errorf("%q is no file of an OCI image layout", h.Name)
		}
		w, err := os.Create(filepath.Join(dir, h.Name))
		if err != nil {
			return err
		}
		_, err = io.CopyN(w, r, h.Size)
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
	}
}
