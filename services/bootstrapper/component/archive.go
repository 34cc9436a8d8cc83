package component

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
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

// receipt stands in the folder of an unpacked archive: what it put there.
type receipt struct {
	SHA256 string            `json:"sha256"`
	Files  map[string]string `json:"files"` // path below the folder → SHA-256
}

// maxReceipt bounds a receipt, in bytes.
const maxReceipt = 16 << 20

func receiptName(c Component) string { return fmt.Sprintf(".muster-archive-%x", c.sha256[:16]) }

// unpacked says whether all that the archive holds is in place.
func unpacked(root *os.Root, c Component) (bool, error) {
	f, err := root.Open(path.Join(c.rel, receiptName(c)))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, refusePath(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxReceipt))
	if err != nil {
		return false, err
	}
	var r receipt
	if json.Unmarshal(b, &r) != nil || r.SHA256 != hex.EncodeToString(c.sha256[:]) {
		return false, nil // unpack anew
	}
	for name, want := range r.Files {
		sum, _, err := digest(root, path.Join(c.rel, name))
		if err != nil || hex.EncodeToString(sum[:]) != want {
			return false, nil // missing or changed: unpack anew
		}
	}
	return true, nil
}

// unpack places the files of the verified archive tmp. The first pass reads every header
// and writes nothing, so that a bad archive has no effect.
func (in *Installer) unpack(root *os.Root, c Component, tmp string) error {
	f, err := root.Open(tmp)
	if err != nil {
		return err
	}
	defer f.Close()
	err = in.walk(f, func(string, *tar.Header, io.Reader) error { return nil })
	if err != nil {
		return err
	}
	if err := root.MkdirAll(c.rel, 0o755); err != nil {
		return refusePath(err)
	}
	r := receipt{SHA256: hex.EncodeToString(c.sha256[:]), Files: map[string]string{}}
	err = in.walk(f, func(name string, h *tar.Header, content io.Reader) error {
		full := path.Join(c.rel, name)
		if h.Typeflag == tar.TypeDir {
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
		if err := settle(root, t, full, fs.FileMode(h.Mode).Perm()); err != nil {
			return err
		}
		sum, _, err := digest(root, full)
		r.Files[name] = hex.EncodeToString(sum[:])
		return err
	})
	if err != nil {
		return err
	}
	return writeReceipt(root, c, r)
}

func writeReceipt(root *os.Root, c Component, r receipt) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, tmp, err := create(root)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return settle(root, tmp, path.Join(c.rel, receiptName(c)), 0o644)
}

// walk calls visit for each file and folder. Anything else, and any name that is not
// inside, is refused with COMPONENT_PATH (B4).
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

// entry says what to do with one header.
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

// plain undoes gzip, if that is what f is compressed with.
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
