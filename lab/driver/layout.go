package driver

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// layoutOf gives the folder of an OCI image layout: path itself if it is one, else what the
// tar archive at path holds, unpacked below the lab's folder.
func (l *Lab) layoutOf(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if s, err := os.Stat(abs); err != nil || s.IsDir() {
		return abs, err
	}
	dir := filepath.Join(l.Dir, "layouts", strings.TrimSuffix(filepath.Base(abs), ".tar"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := os.Open(abs)
	if err != nil {
		return "", err
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir, nil
		}
		if err != nil {
			return "", fmt.Errorf("%s: %w", abs, err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := root.MkdirAll(filepath.Dir(h.Name), 0o755); err != nil {
			return "", err
		}
		out, err := root.Create(h.Name)
		if err != nil {
			return "", err
		}
		_, err = io.Copy(out, r)
		if err := errors.Join(err, out.Close()); err != nil {
			return "", err
		}
	}
}
