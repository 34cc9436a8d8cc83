package main

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// debianPackages are what the root has beside Debian's essential packages.
var debianPackages = []string{
	"systemd", "systemd-sysv", "systemd-timesyncd", "udev", "dbus", "kmod", "mount", "util-linux",
	"e2fsprogs", "cryptsetup-bin", // state disk
	"iproute2", "iptables", "nftables", "conntrack", "ethtool", "socat", "procps", // kubelet, kube-proxy, kubeadm's checks
	"runc", "containernetworking-plugins", "ca-certificates",
	"apparmor", // containerd loads its profile with the parser
}

const (
	suite         = "bookworm"
	kernelPackage = "linux-image-cloud-amd64"
	loaderPackage = "systemd-boot-efi"
	keyring       = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// leftOut are paths that no package may fill: a node has no reader.
var leftOut = []string{"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/usr/share/bash-completion/*", "/usr/share/lintian/*"}

// defaultSources are Debian's own; apt checks signatures with the keyring, whatever mirror answers.
func defaultSources() string {
	var b strings.Builder
	for _, s := range []string{"debian " + suite, "debian " + suite + "-updates", "debian-security " + suite + "-security"} {
		fmt.Fprintf(&b, "deb [signed-by=%s] http://deb.debian.org/%s main\n", keyring, s)
	}
	return b.String()
}

//go:embed files/kernel.sh
var kernelHook string

// base is what comes from Debian.
type base struct{ dir string }

func (b base) root() string   { return filepath.Join(b.dir, "root.tar") }
func (b base) kernel() string { return filepath.Join(b.dir, "kernel") }
func (b base) loader() string { return filepath.Join(b.dir, "loader") }

// fetch gives Debian's part of the image. The cache names it by what was asked for; refresh asks
// Debian anew, and takes those packages from the cache that didn't change.
func fetch(ctx context.Context, o options, log io.Writer) (base, error) {
	sources := defaultSources()
	if o.sources != "" {
		b, err := os.ReadFile(o.sources)
		if err != nil {
			return base{}, err
		}
		sources = string(b)
	}
	id := sha256.Sum256([]byte(strings.Join([]string{"3", suite, sources, strings.Join(debianPackages, ","), kernelPackage, loaderPackage, strings.Join(leftOut, ","), kernelHook}, "\n")))
	b := base{filepath.Join(o.cache, fmt.Sprintf("debian-%x", id[:8]))}
	if err := os.MkdirAll(o.cache, 0o755); err != nil {
		return b, err
	}
	unlock, err := lock(filepath.Join(o.cache, ".lock"))
	if err != nil {
		return b, err
	}
	defer unlock()
	if _, err := os.Stat(b.dir); err == nil && !o.refresh {
		fmt.Fprintf(log, "Debian's packages: those of the last build, in %s; -refresh asks for newer ones\n", b.dir)
		return b, nil
	}
	tmp, err := os.MkdirTemp(o.cache, "making-")
	if err != nil {
		return b, err
	}
	defer os.RemoveAll(tmp)
	if err := debootstrap(ctx, base{tmp}, o, sources, log); err != nil {
		return b, err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return b, err
	}
	if err := os.RemoveAll(b.dir); err != nil {
		return b, err
	}
	return b, os.Rename(tmp, b.dir)
}

// lock keeps two builds from making the same thing. It ends with the process.
func lock(file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// installed is the time of Debian's packages' installation. Some packages write it into files; it is always the
// same, so that the cache serves builds of every date.
var installed = time.Unix(1767225600, 0)

func debootstrap(ctx context.Context, b base, o options, sources string, log io.Writer) error {
	o.date = installed
	debs := filepath.Join(o.cache, "packages")
	downloaded := filepath.Join(b.dir, "deb")
	list := filepath.Join(b.dir, "sources.list")
	hook := filepath.Join(b.dir, "kernel.sh")
	for _, dir := range []string{debs, downloaded, b.kernel(), b.loader()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := errors.Join(os.WriteFile(list, []byte(sources), 0o644), os.WriteFile(hook, []byte(kernelHook), 0o755)); err != nil {
		return err
	}
	fmt.Fprintln(log, "Debian's packages: asking for them and installing them into a folder; this takes some minutes")
	args := []string{
		"--mode=root", "--variant=essential", "--format=tar", "--components=main", "--quiet",
		"--include=" + strings.Join(debianPackages, ","), "--aptopt=Acquire::Retries \"3\"",
		// Packages stay in the cache; apt compares them with the signed index before it takes them.
		"--skip=essential/unlink",
		// Without it, perl comes in, to merge what is merged.
		"--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
		`--setup-hook=mkdir -p "$1/var/cache/apt/archives"`, "--setup-hook=sync-in " + debs + " /var/cache/apt/archives",
		"--customize-hook=sync-out /var/cache/apt/archives " + debs,
		fmt.Sprintf("--customize-hook=%s %s %s %s %s", hook, debs, downloaded, kernelPackage, loaderPackage),
	}
	for _, p := range leftOut {
		args = append(args, "--dpkgopt=path-exclude="+p)
	}
	if err := tool(ctx, o, "mmdebstrap", append(args, suite, b.root(), list)...); err != nil {
		return err
	}
	all, err := filepath.Glob(filepath.Join(downloaded, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range all {
		into := b.kernel()
		if strings.HasPrefix(filepath.Base(deb), loaderPackage) {
			into = b.loader()
		}
		if err := tool(ctx, o, "dpkg-deb", "-x", deb, into); err != nil {
			return err
		}
	}
	version, err := kernelVersion(b.kernel())
	if err != nil {
		return err
	}
	return tool(ctx, o, "depmod", "-b", b.kernel(), version)
}

// kernelVersion reads it where the kernel's package puts its modules.
func kernelVersion(dir string) (string, error) {
	all, err := os.ReadDir(filepath.Join(dir, "lib", "modules"))
	if err != nil || len(all) != 1 {
		return "", fmt.Errorf("%s: want the modules of one kernel, not of %d: %w", dir, len(all), err)
	}
	return all[0].Name(), nil
}

// tool runs a program of Debian's with a fixed time and language.
func tool(ctx context.Context, o options, name string, args ...string) error {
	return toolInput(ctx, nil, o, name, args...)
}

func toolInput(ctx context.Context, in io.Reader, o options, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", o.date.Unix()), "TZ=UTC", "LC_ALL=C.UTF-8", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.Stdin = in
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w; `make deps` installs it", err)
	}
	if err != nil {
		const most = 4000
		return fmt.Errorf("%s: %w\n%s", name, err, out[max(0, len(out)-most):])
	}
	return nil
}
