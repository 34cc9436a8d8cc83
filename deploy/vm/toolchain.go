package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// toolPackages are Debian's packages on the build machine whose version can change bytes of the image, in order.
var toolPackages = []string{"apt", "dosfstools", "dpkg", "kmod", "libzstd1", "mmdebstrap", "mtools", "squashfs-tools"}

// lockedPrograms are those of [programs] that the lock file names, in order; the others are built from this checkout.
var lockedPrograms = []string{"containerd", "containerd-shim-runc-v2", "ctr"}

// pinnedGo are variables of the go command that change its output. An empty one counts as not set, so that the file of `go env -w` would decide: GOENV=off.
var pinnedGo = []string{"GOENV=off", "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOAMD64=v1", "GOFLAGS=", "GOEXPERIMENT=", "GOFIPS140=off"}

// goTool runs the go command in the checkout.
func goTool(ctx context.Context, o options, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = o.source
	cmd.Env = append(os.Environ(), pinnedGo...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w\n%s", args[0], err, stderr.Bytes())
	}
	return out, nil
}

// toolchain returns the part of a lock file about the tools of this machine.
func toolchain(ctx context.Context, o options) (lock.Lock, error) {
	version, err := goTool(ctx, o, "env", "GOVERSION")
	if err != nil {
		return lock.Lock{}, err
	}
	l := lock.Lock{Go: string(bytes.TrimSpace(version))}
	list, err := toolOutput(ctx, o, "dpkg-query", append([]string{"-W", "-f=${Package} ${Version}\n"}, toolPackages...)...)
	if err != nil {
		return l, fmt.Errorf("%w; `make deps` installs what is missing", err)
	}
	for line := range strings.Lines(string(list)) {
		f := strings.Fields(line)
		if len(f) != 2 {
			return l, fmt.Errorf("dpkg-query printed %q; `make deps` installs what is missing", line)
		}
		l.Tools = append(l.Tools, lock.Tool{Name: f[0], Version: f[1]})
	}
	return l, nil
}

// readLock returns the lock file, if its tools are those of this machine.
func readLock(ctx context.Context, o options) (lock.Lock, error) {
	b, err := os.ReadFile(o.lock)
	if err != nil {
		return lock.Lock{}, err
	}
	l, err := lock.Parse(b)
	if err != nil {
		return l, fmt.Errorf("%s: %w", o.lock, err)
	}
	here, err := toolchain(ctx, o)
	if err != nil {
		return l, err
	}
	if here.Go != l.Go {
		return l, fmt.Errorf("%s is for %s, and here is %s: install it, or let Go fetch it with `make vm-image GOTOOLCHAIN=%[2]s`; or %[4]s", o.lock, l.Go, here.Go, refresh)
	}
	if !slices.Equal(here.Tools, l.Tools) {
		return l, fmt.Errorf("%s is for the tools %v, and here are %v: install those versions, or %s", o.lock, l.Tools, here.Tools, refresh)
	}
	for _, name := range lockedPrograms {
		if !slices.ContainsFunc(l.Programs, func(p lock.Program) bool { return p.Name == name }) {
			return l, fmt.Errorf("%s has no program %s; %s", o.lock, name, refresh)
		}
	}
	return l, nil
}

// programs copies the Go programs of the root into dir, checks them, and returns path in the root → file.
func programs(o options, l lock.Lock, dir string) (map[string]string, error) {
	out := map[string]string{}
	from := map[string]string{"bootstrapper": o.bin}
	for _, name := range lockedPrograms {
		from[name] = o.containerd
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	for name, folder := range from {
		file := filepath.Join(dir, name)
		sum, err := copyFile(filepath.Join(folder, name), file)
		if err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(l.Programs, func(p lock.Program) bool { return p.Name == name }); i < 0 {
			err = builtHere(file, l.Go)
		} else if want := l.Programs[i].Sum; sum != want { // S1
			err = fmt.Errorf("%s has SHA-256 %s, but %s has %s: remove the folder and run `make kube` to build it again, or %s", filepath.Join(folder, name), sum, o.lock, want, refresh)
		}
		if err != nil {
			return nil, err
		}
		out["usr/bin/"+name] = file
	}
	return out, nil
}

// builtHere refuses a program that was built with another compiler or other flags than the standard ones. With -trimpath, the go command does not record
// -ldflags: `make build` sets them, and nothing here can see others.
func builtHere(file, version string) error {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	want := map[string]string{"go": version, "-buildmode": "exe", "-compiler": "gc", "-trimpath": "true", "CGO_ENABLED": "0", "GOOS": "linux", "GOARCH": "amd64", "GOAMD64": "v1"}
	has := map[string]string{"go": info.GoVersion}
	for _, s := range info.Settings {
		has[s.Key] = s.Value
	}
	keys := maps.Clone(want)
	maps.Copy(keys, has)
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if has[key] != want[key] {
			errs = append(errs, fmt.Errorf("%s was built with %s=%q, want %q: `make build` builds it", filepath.Base(file), key, has[key], want[key]))
		}
	}
	return errors.Join(errs...)
}
