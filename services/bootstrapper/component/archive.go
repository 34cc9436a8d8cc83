package component

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// archiveName is the name of the archive itself in the folder that it was unpacked into. The unpacked files are compared with it, since the archive is
// the only verified source on the disk (B8).
func archiveName(c Component) string { return fmt.Sprintf(".muster-archive-%x", c.sha256[:16]) }

// unpacked reports whether all files of the archive are in place and unchanged.
func (in *Installer) unpacked(root *os.Root, c Component) (bool, error) {
	name := path.Join(c.rel, archiveName(c))
	sum, _, err := digest(root, name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, refusePath(err)
	}
	if sum != c.sha256 {
		return false, nil // another archive, or one that an attacker changed
	}
	f, err := root.Open(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	same := true
	err = in.walk(f, func(name string, h *tar.Header, content io.Reader) error {
		if h.Typeflag != tar.TypeReg || !same {
			return nil
		}
		want := sha256.New()
		if _, err := io.Copy(want, content); err != nil {
			return err
		}
		have, mode, err := digest(root, path.Join(c.rel, name))
		same = err == nil && bytes.Equal(want.Sum(nil), have[:]) && mode == fs.FileMode(h.Mode).Perm()
		return nil
	})
	return same && err == nil, err
}

// unpack places the files of the verified archive tmp. The first pass reads every header and writes nothing, so that a bad archive has no effect.
func (in *Installer) unpack(root *os.Root, c Component, tmp string) error {
	f, err := root.Open(tmp)
	if err != nil {
		return err
	}
	defer f.Close()
	err = in.walk(f, func(name string, _ *tar.Header, _ io.Reader) error { return notTooDeep(path.Join(c.rel, name)) })
	if err != nil {
		return err
	}
	if err := root.MkdirAll(c.rel, 0o755); err != nil {
		return refusePath(err)
	}
	err = in.walk(f, func(name string, h *tar.Header, content io.Reader) error {
		full := path.Join(c.rel, name)
		if h.Typeflag == tar.TypeDir {
			if err := clearWay(root, full); err != nil {
				return err
			}
			if err := root.MkdirAll(full, 0o755); err != nil {
				return refusePath(err)
			}
			return nil
		}
		t, err := spool(root, content, h.Size)
		if err != nil {
			return err
		}
		defer func() { _ = root.Remove(t) }()
		return settle(root, t, full, fs.FileMode(h.Mode).Perm())
	})
	if err != nil {
		return err
	}
	return settle(root, tmp, path.Join(c.rel, archiveName(c)), 0o600)
}

// walk calls visit for each file and folder. All other entries, and names that lead outside, are refused with COMPONENT_PATH (B4).
func (in *Installer) walk(f *os.File, visit func(name string, h *tar.Header, content io.Reader) error) error {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r, err := plain(f)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	var total int64
	for tr, n := tar.NewReader(r), 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			if n == 0 {
				return refuseArchive("it is empty")
			}
			return nil
		}
		if err != nil {
			return refuseArchive("it can't be read: %w", err)
		}
		if n >= in.limits.Entries {
			return refuseArchive("it has more than %d entries", in.limits.Entries)
		}
		name, use, err := entry(h)
		if err != nil {
			return err
		}
		if !use {
			continue
		}
		if total += h.Size; h.Size < 0 || total > in.limits.Unpacked {
			return refuseArchive("it unpacks to more than %d bytes", in.limits.Unpacked)
		}
		if h.Typeflag == tar.TypeReg && seen[name] {
			return refuseArchive("it has %q twice", name)
		}
		seen[name] = true
		if err := visit(name, h, tr); err != nil {
			return err
		}
	}
}

// entry returns the name of one header, and whether it is used.
func entry(h *tar.Header) (name string, use bool, err error) {
	switch h.Typeflag {
	case tar.TypeXGlobalHeader:
		return "", false, nil
	case tar.TypeReg, tar.TypeDir:
	default:
		return "", false, refuseArchive("%q is neither a file nor a folder", h.Name)
	}
	name = path.Clean(h.Name)
	if path.IsAbs(h.Name) || !filepath.IsLocal(name) {
		return "", false, refuseArchive("%q leads out of its folder", h.Name)
	}
	if name == "." {
		return "", false, nil
	}
	return name, true, nil
}

// plain decompresses f if it is compressed with gzip.
func plain(f io.Reader) (io.Reader, error) {
	b := bufio.NewReader(f)
	if head, err := b.Peek(2); err == nil && head[0] == 0x1f && head[1] == 0x8b {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, refuseArchive("its compression can't be read: %w", err)
		}
		return z, nil
	}
	return b, nil
}

func refuseArchive(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_COMPONENT_PATH, "archive: "+format, args...)
}
