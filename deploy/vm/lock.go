package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/muster-k8s/muster/deploy/sbom"
	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// mirror fetches the indexes of the mirrors that packages come from.
func mirror(ctx context.Context, o options, dir string) (*apt, error) {
	sources := defaultSources()
	if o.sources != "" {
		b, err := os.ReadFile(o.sources)
		if err != nil {
			return nil, err
		}
		sources = string(b)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	return newApt(ctx, abs, sources)
}

// writeLock writes the lock file for the present state of the mirror, the programs and the tools.
func writeLock(ctx context.Context, o options, stdout, log io.Writer) error {
	work, err := os.MkdirTemp("", "muster-lock-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	l, err := toolchain(ctx, o)
	if err != nil {
		return err
	}
	if l.Programs, err = pinnedPrograms(o, l.Go); err != nil {
		return err
	}
	b := base{work}
	a, err := mirror(ctx, o, filepath.Join(work, "apt"))
	if err != nil {
		return err
	}
	if l.Packages, err = a.resolve(ctx); err != nil {
		return err
	}
	c := cache{dir: o.cache, log: log}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	pool := filepath.Join(work, "pool")
	if err := c.packages(ctx, o, l.Packages, pool); err != nil {
		return err
	}
	if l.Root, err = debootstrap(ctx, o, l, b, pool, log); err != nil {
		return err
	}
	root, err := os.Open(b.root())
	if err != nil {
		return err
	}
	defer root.Close()
	status, err := merge(io.Discard, root, tree{}, installed)
	if err != nil {
		return err
	}
	if _, err := billed(l, status); err != nil {
		return err
	}
	if err := c.put(b.root(), rootName(l.Root)); err != nil {
		return err
	}
	if err := os.WriteFile(o.lock, l.Format(), 0o644); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s: %d packages, root %s\n", o.lock, len(l.Packages), l.Root)
	return err
}

// pinnedPrograms returns the lock file's entries for the programs in -containerd, if tools/kube/sha256sums.json has
// the same sums (S1). The caller may have compared them already, but the folder is in a cache, whose content may have
// changed since.
func pinnedPrograms(o options, goVersion string) ([]lock.Program, error) {
	const repin = "go run ./lab kube-binaries --pin"
	file := filepath.Join(o.source, "tools", "kube", "sha256sums.json")
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var pin struct {
		Go   string            `json:"go"`
		Sums map[string]string `json:"sums"`
	}
	if err := json.Unmarshal(b, &pin); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if pin.Go != goVersion {
		return nil, fmt.Errorf("%s is of %s, and here is %s: install it, or write the file with `%s`", file, pin.Go, goVersion, repin)
	}
	var out []lock.Program
	for _, name := range lockedPrograms {
		sum, err := sumOf(filepath.Join(o.containerd, name))
		if err != nil {
			return nil, err
		}
		if sum.String() != pin.Sums[name] { // S1
			return nil, fmt.Errorf("%s has SHA-256 %s, but %s has %q: remove the folder and run `make kube` to build it again, or, after a change of tools/kube, write the file with `%s`",
				filepath.Join(o.containerd, name), sum, file, pin.Sums[name], repin)
		}
		out = append(out, lock.Program{Name: name, Sum: sum})
	}
	return out, nil
}

// billed compares dpkg's list of installed packages with the lock file, and returns the packages of the image for its
// bill of materials.
func billed(l lock.Lock, status []byte) ([]sbom.Debian, error) {
	packages, err := sbom.ParseStatus(status)
	if err != nil {
		return nil, err
	}
	have := map[string]bool{}
	for _, p := range packages {
		have[lock.Package{Name: p.Name, Version: p.Version, Architecture: p.Architecture}.String()] = true
	}
	var out []sbom.Debian
	var errs []error
	for _, p := range l.Packages {
		// The kernel and the loader are unpacked beside the root.
		if !have[p.String()] && p.Name != loaderPackage && !strings.HasPrefix(p.Name, kernelPrefix) {
			errs = append(errs, fmt.Errorf("the lock file names %s, which is not in the image", p))
		}
		delete(have, p.String())
		out = append(out, sbom.Debian{Name: p.Name, Version: p.Version, Architecture: p.Architecture, SHA256: p.Sum})
	}
	for p := range have {
		errs = append(errs, fmt.Errorf("the image has %s, which the lock file doesn't name", p))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, refresh)
	}
	return out, nil
}
