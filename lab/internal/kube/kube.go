// Package kube builds the Kubernetes programs that the lab runs, from the Go modules that tools/kube (and, of the
// release that a test upgrades from, tools/kube-previous) pins, once for each content of that pin.
//
// A build is named by its inputs (go.mod, go.sum, the Go version, the linker flags). So a call with a warm cache only
// hashes 700 MB, in two seconds, and two checkouts can share a cache without sharing a wrong binary. The cache is not
// trusted: the module's sha256sums.json has the hash of each program, which is checked at each call.
package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The versions that tools/kube/go.mod pins; a test compares them.
const (
	Version           = "v1.36.1"
	ContainerdVersion = "v2.2.9"
	EtcdTag           = "3.6.16-0" // the image tag; the module is v3.6.16
	CoreDNSTag        = "v1.14.7"
	PauseTag          = "3.10.2"
)

// A Release is a release of Kubernetes that the lab builds.
type Release struct {
	Module   string   // the folder below tools that pins it
	Version  string   // of Kubernetes, as v1.36.1
	Programs []string // the names of the files in a build
	// Tags of images in the lab's registry.
	EtcdTag, CoreDNSTag, PauseTag string
}

// Current is the release of the lab's clusters, with everything else that machines run.
var Current = Release{
	Module: "kube", Version: Version, EtcdTag: EtcdTag, CoreDNSTag: CoreDNSTag, PauseTag: PauseTag,
	Programs: []string{
		"containerd", "containerd-shim-runc-v2", "coredns", "ctr", "etcd", "kube-apiserver",
		"kube-controller-manager", "kube-proxy", "kube-scheduler", "kubeadm", "kubectl", "kubelet",
	},
}

// Previous is a release that clusters are upgraded from. Its pin has only Kubernetes' programs: its etcd and CoreDNS
// are those of [Current], in images of their own with older tags, so that an upgrade exchanges them too.
var Previous = Release{
	Module: "kube-previous", Version: "v1.35.4", EtcdTag: "3.6.15-0", CoreDNSTag: "v1.14.6", PauseTag: "3.10.1",
	Programs: []string{"kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubeadm", "kubectl", "kubelet"},
}

func (r Release) module(source string) string { return filepath.Join(source, "tools", r.Module) }

const sumsFile = "sha256sums.json"

// Pin is sha256sums.json: the programs that a build must result in. A program that Go builds depends only on its
// modules, flags and compiler.
type Pin struct {
	ID   string            `json:"id"` // of the build
	Go   string            `json:"go"` // as runtime.Version prints it
	Sums map[string]string `json:"sums"`
}

// A Build is a directory of programs.
type Build struct {
	Release Release
	Dir     string            // holds a file for each of the release's programs
	ID      string            // 32 hex digits over all inputs
	Sums    map[string]string // program → SHA-256, lower-case hex

	pinned bool // Sums are those of the pin
}

// Pin returns the content for sha256sums.json.
func (b Build) Pin() Pin { return Pin{b.ID, runtime.Version(), b.Sums} }

// CacheDir is the lab's cache folder: $XDG_CACHE_HOME/muster, or ~/.cache/muster.
func CacheDir() (string, error) {
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder: %w; set XDG_CACHE_HOME or HOME", err)
	}
	return filepath.Join(d, "muster"), nil
}

func (r Release) ldflags() string {
	minor := strings.Split(r.Version, ".")[1]
	const v, c = "k8s.io/component-base/version", "github.com/containerd/containerd/v2/version"
	return strings.Join([]string{
		"-s", "-w",
		"-X " + v + ".gitVersion=" + r.Version,
		"-X " + v + ".gitMajor=1", "-X " + v + ".gitMinor=" + minor, "-X " + v + ".gitTreeState=archive",
		"-X " + v + ".gitCommit=0000000000000000000000000000000000000000",
		"-X " + v + ".buildDate=1970-01-01T00:00:00Z", // two builds of one pin are the same bytes
		"-X " + c + ".Version=" + ContainerdVersion,
		"-X " + c + ".Package=github.com/containerd/containerd/v2",
	}, " ")
}

// Binaries returns the build of the release by the checkout source, making it first if the
// cache has none (13 minutes cold on two cores, seconds with a warm Go build cache).
// Progress goes to log.
func (r Release) Binaries(ctx context.Context, source, cache string, log io.Writer) (Build, error) {
	b, err := r.expected(source, cache)
	if err != nil {
		return Build{}, fmt.Errorf("tools/%s: %w; run from a checkout or name it with --source", r.Module, err)
	}
	if b.load() == nil {
		return b, Used(b.Dir)
	}
	unlock, err := Lock(filepath.Join(cache, "kube"))
	if err != nil {
		return Build{}, err
	}
	defer unlock()
	switch err := b.load(); {
	case err == nil: // another process built it while this one waited
		return b, nil
	case !errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(log, "the cache is thrown away: %v\n", err)
		if err := os.RemoveAll(b.Dir); err != nil {
			return Build{}, err
		}
	}
	if _, err := b.make(ctx, r.module(source), r.compile, log); err != nil {
		return Build{}, err
	}
	return b, errors.Join(b.load(), Prune(filepath.Dir(b.Dir)))
}

// Rebuild returns a build that was made now, whatever the cache has or another process puts there meanwhile: programs
// to be pinned come from the module's sources, which Go compares with go.sum (S1). Its Sums are those of the
// compiler's output, and not of the files in Dir.
func (r Release) Rebuild(ctx context.Context, source, cache string, log io.Writer) (Build, error) {
	return r.rebuild(ctx, source, cache, r.compile, log)
}

func (r Release) rebuild(ctx context.Context, source, cache string, with compiler, log io.Writer) (Build, error) {
	b, err := r.expected(source, cache)
	if err != nil {
		return Build{}, err
	}
	unlock, err := Lock(filepath.Join(cache, "kube"))
	if err != nil {
		return Build{}, err
	}
	defer unlock()
	sums, err := b.make(ctx, r.module(source), with, log)
	if err != nil {
		return Build{}, err
	}
	b.pinned = b.pinned && maps.Equal(sums, b.Sums)
	b.Sums = sums
	return b, Prune(filepath.Dir(b.Dir))
}

// Pinned reports whether the programs are those that sha256sums.json names.
func (b Build) Pinned() bool { return b.pinned }

// expected returns the build of the release, with the sums that the pin has for it. Another compiler results in other
// programs: then they are only compared with the list in the cache, which detects damage, but no attack.
func (r Release) expected(source, cache string) (Build, error) {
	module := r.module(source)
	id, err := r.identify(module, runtime.Version())
	if err != nil {
		return Build{}, err
	}
	b := Build{Release: r, Dir: filepath.Join(cache, "kube", id), ID: id}
	p, err := readPin(module)
	if p.ID == id {
		b.Sums, b.pinned = p.Sums, true
	}
	return b, err
}

func readPin(module string) (p Pin, err error) {
	j, err := os.ReadFile(filepath.Join(module, sumsFile))
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(j, &p); err != nil {
		return p, fmt.Errorf("%s: %w", sumsFile, err)
	}
	return p, nil
}

func (r Release) identify(module, goVersion string) (string, error) {
	h := sha256.New()
	for _, f := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(module, f))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%d\n%s", len(b), b)
	}
	fmt.Fprintf(h, "%s %s/%s\n%s\n", goVersion, runtime.GOOS, runtime.GOARCH, r.ldflags())
	return hex.EncodeToString(h.Sum(nil)[:16]), nil
}

// make puts new programs into the cache, in place of existing ones, and returns their sums. They are built and hashed
// in a private folder (S1): a build takes minutes, and other users may write to the cache. The copies are compared
// when they are used, by [Build.load].
func (b Build) make(ctx context.Context, module string, with compiler, log io.Writer) (map[string]string, error) {
	private, err := os.MkdirTemp("", "muster-kube-") // 0700
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(private)
	fmt.Fprintf(log, "building Kubernetes %s (up to a quarter of an hour the first time)\n", b.Release.Version)
	if err := with(ctx, module, private); err != nil {
		return nil, err
	}
	sums := map[string]string{}
	for _, p := range b.Release.Programs {
		if sums[p], err = Sum(filepath.Join(private, p)); err != nil { // S1
			return nil, err
		}
	}
	fmt.Fprintf(log, "copying the programs into %s\n", b.Dir)
	if err := b.fill(private, sums); err != nil {
		return nil, err
	}
	fmt.Fprintf(log, "built: %s\n", b.Dir)
	return sums, nil
}

// fill puts a copy of programs into the cache, with the list of their sums.
func (b Build) fill(from string, sums map[string]string) error {
	fresh, err := os.MkdirTemp(filepath.Dir(b.Dir), "building-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(fresh) // finds nothing after the rename
	for _, p := range b.Release.Programs {
		if err := copyProgram(filepath.Join(from, p), filepath.Join(fresh, p)); err != nil {
			return err
		}
	}
	j, err := json.MarshalIndent(sums, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(fresh, sumsFile), j, 0o644); err != nil {
		return err
	}
	if err := errors.Join(os.Chmod(fresh, 0o755), os.RemoveAll(b.Dir)); err != nil {
		return err
	}
	return os.Rename(fresh, b.Dir)
}

func copyProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// compiler builds the programs of a module into a folder.
type compiler func(ctx context.Context, module, into string) error

func (r Release) compile(ctx context.Context, module, into string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", r.ldflags(), "-o", into+"/", "tool")
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-mod=readonly", "GOAMD64=v1", "GOEXPERIMENT=", "GOFIPS140=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build Kubernetes in %s: %w\n%s", module, err, out)
	}
	if !slices.Contains(r.Programs, "etcd") {
		return nil
	}
	// etcd's main package is named after its folder, "server".
	return os.Rename(filepath.Join(into, "server"), filepath.Join(into, "etcd"))
}

// load compares each program with its sum.
func (b *Build) load() error {
	j, err := os.ReadFile(filepath.Join(b.Dir, sumsFile))
	if err != nil {
		return err
	}
	if !b.pinned {
		b.Sums = nil
		if err := json.Unmarshal(j, &b.Sums); err != nil {
			return err
		}
	}
	for _, p := range b.Release.Programs {
		got, err := Sum(b.Path(p))
		if err != nil {
			return fmt.Errorf("incomplete: %w", err)
		}
		if got != b.Sums[p] { // S1
			return fmt.Errorf("%s has SHA-256 %s, want %s", b.Path(p), got, b.Sums[p])
		}
	}
	return nil
}

// Path returns the path of one of the release's programs.
func (b Build) Path(program string) string { return filepath.Join(b.Dir, program) }

// Sum returns the SHA-256 of a file as lower-case hex.
func Sum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Lock takes the lock file of a cache folder, waiting for another process that has it.
func Lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// Used notes that a cache entry is in use.
func Used(entry string) error {
	now := time.Now()
	return os.Chtimes(entry, now, now)
}

// Prune removes the entries of a cache folder that were not used for a week. The caller holds the folder's lock.
func Prune(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil || !e.IsDir() || time.Since(fi.ModTime()) < 7*24*time.Hour {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Tools builds small programs of the project itself (package paths like "./lab/echo"), and the etcdctl that
// tools/etcdctl pins, into the folder dest; Go's build cache makes it fast.
func Tools(ctx context.Context, source, dest string, packages ...string) error {
	return errors.Join(
		tools(ctx, source, dest, nil, packages...),
		tools(ctx, filepath.Join(source, "tools", "etcdctl"), dest, []string{"GOWORK=off", "GOFLAGS=-mod=readonly"}, "tool"),
	)
}

func tools(ctx context.Context, module, dest string, env []string, packages ...string) error {
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", dest + "/"}, packages...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = module
	cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0"), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s in %s: %w\n%s", strings.Join(packages, " "), module, err, out)
	}
	return nil
}
