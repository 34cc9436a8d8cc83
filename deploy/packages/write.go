package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/md5" //nolint:gosec // the list of files in a Debian package is of MD5 sums; it protects nothing
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// debian describes a package to be built.
type debian struct {
	name, section, summary, text string
	depends, recommends          string            // may be empty
	files                        []file            // what it installs
	control                      map[string][]byte // maintainer scripts
}

// write packs it with dpkg-deb. Owner, order and times of all entries are the same each time.
func (p debian) write(ctx context.Context, to, version string, c contents) error {
	dir, err := os.MkdirTemp("", "muster-package-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	size := 0
	var md5sums strings.Builder
	slices.SortFunc(p.files, func(a, b file) int { return cmp.Compare(a.path, b.path) })
	for _, f := range p.files {
		if err := put(dir, f); err != nil {
			return err
		}
		size += (len(f.content) + 1023) / 1024                                                 // in KiB, each file rounded up (deb-control(5))
		fmt.Fprintf(&md5sums, "%x  %s\n", md5.Sum(f.content), strings.TrimPrefix(f.path, "/")) //nolint:gosec // as above
	}
	control := []file{{"/DEBIAN/control", 0o644, p.controlFile(version, c.arch, size)}, {"/DEBIAN/md5sums", 0o644, []byte(md5sums.String())}}
	for name, script := range p.control {
		control = append(control, file{"/DEBIAN/" + name, 0o755, script})
	}
	for _, f := range control {
		if err := put(dir, f); err != nil {
			return err
		}
	}
	if err := settle(dir, c.date); err != nil {
		return err
	}
	// One thread: with more, the block boundaries of xz would depend on their number.
	compression := []string{"-Zxz", fmt.Sprintf("-z%d", c.level), "--threads-max=1"}
	if c.level == 0 {
		compression = []string{"-Znone"}
	}
	cmd := exec.CommandContext(ctx, "dpkg-deb", slices.Concat([]string{"--root-owner-group"}, compression, []string{"--build", dir, to})...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", c.date.Unix()))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dpkg-deb: %w\n%s", err, out)
	}
	return nil
}

func (p debian) controlFile(version, arch string, size int) []byte {
	var b bytes.Buffer
	field := func(name, value string) {
		if value != "" {
			fmt.Fprintf(&b, "%s: %s\n", name, value)
		}
	}
	field("Package", p.name)
	field("Version", version)
	field("Architecture", arch)
	field("Maintainer", "The Muster authors <noreply@muster.dev>")
	field("Installed-Size", fmt.Sprint(size))
	field("Depends", p.depends)
	field("Recommends", p.recommends)
	field("Section", p.section)
	field("Priority", "optional")
	field("Homepage", "https://github.com/muster-k8s/muster")
	field("Description", p.summary+"\n "+strings.ReplaceAll(p.text, "\n", "\n "))
	return b.Bytes()
}

func put(dir string, f file) error {
	to := filepath.Join(dir, f.path)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, f.content, f.mode)
}

// settle sets the time of everything below dir, and the modes that a umask may have changed.
func settle(dir string, date time.Time) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	return fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := os.FileMode(0o644)
		if d.IsDir() || info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		return errors.Join(root.Chmod(path, mode), root.Chtimes(path, date, date))
	})
}

// writeTarball writes the files below the folder top, at the paths that they have on a machine.
func writeTarball(to, top string, files []file, c contents) error {
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(a.path, b.path) })
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, c.level)
	if err != nil {
		return err
	}
	w := tar.NewWriter(z)
	for _, f := range files {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: path.Join(top, f.path), Mode: int64(f.mode), Size: int64(len(f.content)), ModTime: c.date, Format: tar.FormatUSTAR}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := w.Write(f.content); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return os.WriteFile(to, out.Bytes(), 0o644)
}
