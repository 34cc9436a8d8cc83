package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// cache is a folder of files that are named by their SHA-256. It is not trusted: another process that can write to it
// can only make a build slower.
type cache struct {
	dir string
	log io.Writer
}

// lock prevents two builds from making the same file. It ends with the process.
func (c cache) lock() (unlock func(), err error) {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(c.dir, ".lock"), os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// take copies a file out of the cache, if it exists and has this SHA-256. The copy is compared, so that another
// process cannot change it afterwards.
func (c cache) take(name, to string, want lock.Sum) (bool, error) {
	from := filepath.Join(c.dir, name)
	got, err := copyFile(from, to)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if got != want { // S1
		fmt.Fprintf(c.log, "the cache's %s has SHA-256 %s: it is thrown away\n", from, got)
		return false, errors.Join(os.Remove(from), os.Remove(to))
	}
	now := time.Now()
	_ = os.Chtimes(from, now, now) // it may be another user's
	return true, nil
}

// put copies a file into the cache, and removes files that were not used for a month.
func (c cache) put(from, name string) error {
	to := filepath.Join(c.dir, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	// In a new folder: at a predictable name, another user of the cache could have put a link.
	fresh, err := os.MkdirTemp(filepath.Dir(to), ".new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(fresh) }()
	if _, err := copyFile(from, filepath.Join(fresh, "file")); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(fresh, "file"), to); err != nil {
		return err
	}
	root, err := os.OpenRoot(c.dir)
	if err != nil {
		return err
	}
	err = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != filepath.Ext(name) {
			return err
		}
		info, err := d.Info()
		if err == nil && time.Since(info.ModTime()) > 30*24*time.Hour {
			err = root.Remove(path)
		}
		return err
	})
	return errors.Join(err, root.Close())
}

// packages puts .deb files into a folder, out of the cache or from a mirror.
func (c cache) packages(ctx context.Context, o options, want []lock.Package, pool string) error {
	if err := os.MkdirAll(pool, 0o755); err != nil {
		return err
	}
	var missing []lock.Package
	for _, p := range want {
		ok, err := c.take(packageName(p), filepath.Join(pool, poolName(p)), p.Sum)
		if err != nil {
			return err
		}
		if !ok {
			missing = append(missing, p)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	fmt.Fprintf(c.log, "Debian's packages: fetching %d of %d\n", len(missing), len(want))
	a, err := mirror(ctx, o, filepath.Join(filepath.Dir(pool), "apt"))
	if err != nil {
		return err
	}
	return c.download(ctx, a, missing, pool)
}

// download fetches packages from a mirror into a folder and the cache.
func (c cache) download(ctx context.Context, a *apt, want []lock.Package, pool string) error {
	if err := a.moved(want); err != nil {
		return err
	}
	files, err := a.download(ctx, want)
	if err != nil {
		return err
	}
	for _, p := range want {
		to := filepath.Join(pool, poolName(p))
		got, err := copyFile(files[p], to)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if got != p.Sum { // S1
			return fmt.Errorf("%s: the mirror sent SHA-256 %s, but the lock file has %s", p, got, p.Sum)
		}
		if err := c.put(to, packageName(p)); err != nil {
			return err
		}
	}
	return nil
}

// packageName is that of a package in the cache, and poolName in the folder of a build.
func packageName(p lock.Package) string { return filepath.Join("packages", p.Sum.String()+".deb") }
func poolName(p lock.Package) string {
	return strings.Join([]string{p.Name, strings.ReplaceAll(p.Version, ":", "%3a"), p.Architecture}, "_") + ".deb"
}

// copyFile copies a file and returns the SHA-256 of what was written.
func copyFile(from, to string) (lock.Sum, error) {
	in, err := os.Open(from)
	if err != nil {
		return lock.Sum{}, err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return lock.Sum{}, err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, h), in)
	return lock.Sum(h.Sum(nil)), errors.Join(err, out.Close())
}
