package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// debianPackages are the packages of the root beside Debian's essential ones.
var debianPackages = []string{
	"systemd", "systemd-sysv", "systemd-timesyncd", "udev", "dbus", "kmod", "mount", "util-linux",
	"e2fsprogs", "cryptsetup-bin", // state disk
	"iproute2", "iptables", "nftables", "conntrack", "ethtool", "socat", "procps", // kubelet, kube-proxy, kubeadm's checks
	"runc", "containernetworking-plugins", "ca-certificates",
	"apparmor", // containerd loads its profile with the parser
}

const (
	suite         = "bookworm"
	architecture  = "amd64"
	kernelPackage = "linux-image-cloud-amd64"
	kernelPrefix  = "linux-image-" // a dependency of the package above
	loaderPackage = "systemd-boot-efi"
	mergedPackage = "usr-is-merged" // mmdebstrap's hook installs it
	keyring       = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// essentialPackages is apt's name for the packages that mmdebstrap installs first: apt includes itself, mmdebstrap
// does not.
const essentialPackages = "?and(?essential,?not(?exact-name(apt)))"

// refresh ends errors about a lock file that does not match.
const refresh = "`make vm-lock` writes a lock file of what there is now, for you to look at"

// leftOut are paths that no package may fill: they have no reader on a node.
var leftOut = []string{"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/usr/share/bash-completion/*", "/usr/share/lintian/*"}

// defaultSources are Debian's own; apt checks signatures with the keyring, independent of the mirror.
func defaultSources() string {
	var b strings.Builder
	for _, s := range []string{"debian " + suite, "debian " + suite + "-updates", "debian-security " + suite + "-security"} {
		fmt.Fprintf(&b, "deb [signed-by=%s] http://deb.debian.org/%s main\n", keyring, s)
	}
	return b.String()
}

// base is Debian's part, in the folder of the build: the checked files are used, also if another process writes to
// the cache.
type base struct{ dir string }

func (b base) root() string   { return filepath.Join(b.dir, "root.tar") }
func (b base) kernel() string { return filepath.Join(b.dir, "kernel") }
func (b base) loader() string { return filepath.Join(b.dir, "loader") }

// fetch returns Debian's part of the image, as the lock file names it. A file in the cache is not trusted by its
// name: each must have the SHA-256 of the lock file, or is made again.
func fetch(ctx context.Context, o options, l lock.Lock, work string, log io.Writer) (base, error) {
	b := base{filepath.Join(work, "debian")}
	c := cache{dir: o.cache, log: log}
	unlock, err := c.lock()
	if err != nil {
		return b, err
	}
	defer unlock()
	for _, dir := range []string{b.kernel(), b.loader()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return b, err
		}
	}
	kernel, err := kernelOf(l)
	if err != nil {
		return b, err
	}
	loader, ok := l.Package(loaderPackage)
	if !ok {
		return b, fmt.Errorf("the lock file has no package %s; %s", loaderPackage, refresh)
	}
	needed := []lock.Package{kernel, loader}
	cached, err := c.take(rootName(l.Root), b.root(), l.Root)
	if err != nil {
		return b, err
	}
	if !cached {
		needed = l.Packages
	}
	pool := filepath.Join(b.dir, "pool")
	if err := c.packages(ctx, o, needed, pool); err != nil {
		return b, err
	}
	if !cached {
		sum, err := debootstrap(ctx, o, l, b, pool, log)
		if err != nil {
			return b, err
		}
		if sum != l.Root { // S1
			return b, fmt.Errorf("the packages of the lock file give a root of SHA-256 %s, but the lock file has %s: the root depends on something on this machine that the lock file doesn't pin; %s", sum, l.Root, refresh)
		}
		if err := c.put(b.root(), rootName(sum)); err != nil {
			return b, err
		}
	}
	return b, b.extract(ctx, o, pool, kernel, loader)
}

func rootName(s lock.Sum) string { return "root-" + s.String() + ".tar" }

// kernelOf returns the package with the kernel, of which there is one.
func kernelOf(l lock.Lock) (lock.Package, error) {
	var found []lock.Package
	for _, p := range l.Packages {
		if strings.HasPrefix(p.Name, kernelPrefix) {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		return lock.Package{}, fmt.Errorf("the lock file has %d packages %s…, want one; %s", len(found), kernelPrefix, refresh)
	}
	return found[0], nil
}

// extract unpacks kernel and loader, which are not installed in the root.
func (b base) extract(ctx context.Context, o options, pool string, kernel, loader lock.Package) error {
	o.date = installed
	for p, into := range map[lock.Package]string{kernel: b.kernel(), loader: b.loader()} {
		if err := tool(ctx, o, "dpkg-deb", "-x", filepath.Join(pool, poolName(p)), into); err != nil {
			return err
		}
	}
	version, err := kernelVersion(b.kernel())
	if err != nil {
		return err
	}
	return tool(ctx, o, "depmod", "-b", b.kernel(), version)
}

// installed is the time of Debian's packages' installation. Some packages write it into files; it is always the
// same, so that the cache serves builds of every date.
var installed = time.Unix(1767225600, 0)

// debootstrap installs packages of pool into a root, and returns the SHA-256 of its archive. mmdebstrap knows of no other packages.
func debootstrap(ctx context.Context, o options, l lock.Lock, b base, pool string, log io.Writer) (lock.Sum, error) {
	o.date = installed
	list := filepath.Join(b.dir, "sources.list")
	repository, err := repository(ctx, o, l, pool)
	if err != nil {
		return lock.Sum{}, err
	}
	// The lock file has checked them, and apt compares each with the index, which was made from the lock file.
	if err := os.WriteFile(list, []byte("deb [trusted=yes] copy:"+repository+" "+suite+" main\n"), 0o644); err != nil {
		return lock.Sum{}, err
	}
	fmt.Fprintln(log, "Debian's packages: installing them into a folder; this takes some minutes")
	args := []string{
		"--mode=root", "--variant=essential", "--format=tar", "--components=main", "--quiet",
		"--include=" + strings.Join(debianPackages, ","), `--aptopt=APT::Sandbox::User "root"`,
		// Without it, perl is installed, to merge what is already merged.
		"--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
		`--customize-hook=rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d`, // they name a folder of this build
	}
	for _, p := range leftOut {
		args = append(args, "--dpkgopt=path-exclude="+p)
	}
	if err := tool(ctx, o, "mmdebstrap", append(args, suite, b.root(), list)...); err != nil {
		return lock.Sum{}, err
	}
	return sumOf(b.root())
}

// repository writes an index for the packages of pool, like a mirror's, and returns its folder.
func repository(ctx context.Context, o options, l lock.Lock, pool string) (string, error) {
	dir, err := filepath.Abs(filepath.Dir(pool))
	if err != nil {
		return "", err
	}
	var index bytes.Buffer
	for _, p := range l.Packages {
		file := filepath.Join(pool, poolName(p))
		control, err := toolOutput(ctx, o, "dpkg-deb", "-f", file)
		if err != nil {
			return "", err
		}
		info, err := os.Stat(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&index, "%s\nFilename: %s/%s\nSize: %d\nSHA256: %s\n\n", bytes.TrimSpace(control), filepath.Base(pool), filepath.Base(file), info.Size(), p.Sum)
	}
	const list = "main/binary-" + architecture + "/Packages"
	release := fmt.Sprintf("Suite: %[1]s\nCodename: %[1]s\nComponents: main\nArchitectures: %[2]s\nSHA256:\n %[3]x %[4]d %[5]s\n", suite, architecture, sha256.Sum256(index.Bytes()), index.Len(), list)
	top := filepath.Join(dir, "dists", suite)
	return dir, errors.Join(os.MkdirAll(filepath.Join(top, filepath.Dir(list)), 0o755),
		os.WriteFile(filepath.Join(top, list), index.Bytes(), 0o644), os.WriteFile(filepath.Join(top, "Release"), []byte(release), 0o644))
}

// kernelVersion reads it from the path of the modules in the kernel's package.
func kernelVersion(dir string) (string, error) {
	all, err := os.ReadDir(filepath.Join(dir, "lib", "modules"))
	if err != nil || len(all) != 1 {
		return "", fmt.Errorf("%s: want the modules of one kernel, not of %d: %w", dir, len(all), err)
	}
	return all[0].Name(), nil
}

// environment is that of programs that build the image: the same on each machine, except for the proxy settings.
func environment(home string) []string {
	env := []string{"HOME=" + home, "TZ=UTC", "LC_ALL=C.UTF-8", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, name := range []string{"TMPDIR", "http_proxy", "https_proxy", "no_proxy"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// tool runs a program of Debian's with a fixed time and language.
func tool(ctx context.Context, o options, name string, args ...string) error {
	out, err := command(ctx, o, name, args...).CombinedOutput()
	return explain(name, out, err)
}

func toolOutput(ctx context.Context, o options, name string, args ...string) ([]byte, error) {
	cmd := command(ctx, o, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	return out, explain(name, stderr.Bytes(), err)
}

func command(ctx context.Context, o options, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(environment("/nonexistent"), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", o.date.Unix()))
	return cmd
}

func explain(name string, out []byte, err error) error {
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w; `make deps` installs it", err)
	}
	if err != nil {
		const most = 4000
		return fmt.Errorf("%s: %w\n%s", name, err, out[max(0, len(out)-most):])
	}
	return nil
}
