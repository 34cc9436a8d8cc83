package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/internal/tree"
)

type mount struct {
	kind, target, options string
	flags                 uintptr
}

// kernelMounts are moved into the machine's root.
var kernelMounts = []mount{
	{"proc", "/proc", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{"sysfs", "/sys", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{"devtmpfs", "/dev", "mode=0755", unix.MS_NOSUID},
	{"tmpfs", "/run", "mode=0755", unix.MS_NOSUID | unix.MS_NODEV},
}

func mountKernel() error {
	for _, m := range kernelMounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.target, m.kind, m.flags, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	// The firmware's event log; a machine without one has no such file system to show.
	_ = unix.Mount("securityfs", "/sys/kernel/security", "securityfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	return emptyFolder(pluginFolder)
}

// pluginFolder is image.yaml's volumePluginDir. The kubelet runs the programs in it as root, and kube-controller-manager's container has it.
const pluginFolder = "/run/kubelet-volumeplugins"

// emptyFolder makes a folder that is read-only for all users, also inside containers (B8).
func emptyFolder(at string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size=4k"); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	return nil
}

// modulesFile lists modules, one path a line, in the order in which they load.
const modulesFile = "/etc/modules"

func loadModules(list string) error {
	b, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(b)) {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		// ENODEV: a module for an instruction set or a hypervisor that this machine lacks. ENOENT: for the symbols of such a module.
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("load %s: %w", filepath.Base(name), err)
		}
	}
	return nil
}

// stateFolder is where the whole file system of the state disk is mounted.
const stateFolder = "/run/muster/state"

// kept are the folders of the root that are on the state disk. The rest of the root is read-only: systemd does not
// read units, generators or its own configuration from the disk, in particular not from /usr/local.
var kept = []struct {
	at   string // in the root
	perm fs.FileMode
	with []string // folders inside that must exist
	// trees are folders inside that programs use before the bootstrapper compares the disk with the cluster's list, each
	// after the one that it is in.
	trees []string
}{
	{"/var", 0o755, []string{"lib", "log/journal", "cache", "spool", "tmp"}, []string{
		"lib/muster", "lib/muster/attester", "lib/kubelet", "lib/containerd", "lib/etcd", "lib/systemd", "lib/dbus", "lib/cni", "lib/private", "log", "cache", "spool",
	}},
	{"/etc/kubernetes", 0o700, nil, []string{"."}},
	{"/etc/cni/net.d", 0o755, nil, []string{"."}},
	{"/opt/cni", 0o755, []string{"bin"}, []string{"."}},
	{"/usr/local/bin", 0o755, nil, []string{"."}},
	{"/usr/local/lib/muster", 0o755, nil, []string{"."}},
}

// unchecked are folders inside those trees from whose content filesAlone removes nothing, since links are usual there. The
// bootstrapper removes wrong links from all but the snapshots and the volumes of images before the kubelet starts. Those
// it removes. Where a pod without rights can write, its content must be in this list: of the others, folders are removed
// that are deeper than those of any program.
var unchecked = []string{
	"lib/containerd/*/snapshots/*/fs", "lib/containerd/*/snapshots/*/work", "lib/containerd/*/containers/*/volumes", "lib/kubelet/pki", "lib/kubelet/plugins", "lib/kubelet/pods/*/volumes",
}

// stateFlags: no program on the disk makes its caller root, and no file is a device. Containers have their own: the
// overlays that they run on are mounts of their own, without these flags.
const stateFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME

// mountState puts the state disk's folders into the root. They are named after their place there.
func mountState(device, root string) error {
	if err := os.MkdirAll(stateFolder, 0o700); err != nil {
		return err
	}
	if err := unix.Mount(device, stateFolder, "ext4", stateFlags, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	for _, k := range kept {
		from := filepath.Join(stateFolder, strings.ReplaceAll(k.at[1:], "/", "-"))
		if err := prepare(from, k.perm, k.with, k.trees); err != nil {
			return err
		}
		if err := bind(from, root+k.at); err != nil {
			return err
		}
	}
	v := filepath.Join(stateFolder, "var")
	if err := os.Chmod(filepath.Join(v, "tmp"), fs.ModeSticky|0o777); err != nil {
		return err
	}
	// Debian has a link there: a folder in its place would persist files that belong in memory.
	if err := linkTo("/run", filepath.Join(v, "run")); err != nil {
		return err
	}
	return machineID(filepath.Join(stateFolder, "machine-id"), root+"/etc/machine-id")
}

// prepare makes a folder of the state disk and its required subfolders. It removes anything in their place that is no
// folder, and from its trees everything that is neither a folder nor a regular file. An attacker who was root before
// the reboot could otherwise leave a link, and so have another folder mounted, written to or deleted before the
// bootstrapper compares the disk (B8).
func prepare(top string, perm fs.FileMode, with, trees []string) error {
	if err := folder(top, perm); err != nil {
		return err
	}
	for _, inside := range with {
		at := top
		for part := range strings.SplitSeq(inside, "/") {
			at = filepath.Join(at, part)
			if err := folder(at, perm); err != nil {
				return err
			}
		}
	}
	for _, tree := range trees {
		if err := filesAlone(top, tree); err != nil {
			return err
		}
	}
	return nil
}

// filesAlone removes everything that is neither a folder nor a regular file from a folder below top, what is too deep for
// the programs that read it, and a file in the place of the folder itself. It clears the attributes immutable and
// append-only of the rest (chattr(1)).
func filesAlone(top, inside string) error {
	inside = filepath.Join(top, inside)
	return tree.Walk(inside, func(at string, d fs.DirEntry) error {
		if !d.IsDir() && (!d.Type().IsRegular() || at == inside) {
			return tree.RemoveAll(at)
		}
		if _, err := tree.Mutable(unix.AT_FDCWD, at); err != nil || !d.IsDir() {
			return err
		}
		for _, pattern := range unchecked {
			if fits, err := filepath.Match(filepath.Join(top, pattern), at); err != nil {
				return err
			} else if fits {
				if err := mutableBelow(unix.AT_FDCWD, at, 1); err != nil {
					return err
				}
				return fs.SkipDir
			}
		}
		return nil
	}, tree.RemoveAll)
}

// isFolder reports whether a folder is there, and not a link to one. An error is not taken for a missing file: a link may be
// there when the next program looks.
func isFolder(at string) (bool, error) {
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && info.IsDir(), err
}

// linkTo makes a symbolic link, unless it is there.
func linkTo(target, at string) error {
	if to, err := os.Readlink(at); err == nil && to == target {
		return nil
	}
	if err := tree.RemoveAll(at); err != nil {
		return err
	}
	return os.Symlink(target, at)
}

func folder(at string, perm fs.FileMode) error {
	if _, err := tree.Mutable(unix.AT_FDCWD, filepath.Dir(at)); err != nil {
		return err
	}
	is, err := isFolder(at)
	if err != nil {
		return err
	}
	if !is {
		if err := errors.Join(tree.RemoveAll(at), os.MkdirAll(at, perm)); err != nil {
			return err
		}
	}
	if _, err := tree.Mutable(unix.AT_FDCWD, at); err != nil {
		return err
	}
	// Whoever may write it could put another folder in the place of one inside.
	return errors.Join(os.Lchown(at, os.Geteuid(), -1), os.Chmod(at, perm))
}

// maxDepth is how many folders inside of each other mutableBelow opens: a process of the initramfs may have 4096 files
// open at first (Linux, INR_OPEN_MAX).
const maxDepth = 1000

// mutableBelow clears the attributes of everything in a folder, at most maxDepth folders deep: of what other programs than
// this one and the bootstrapper remove. Those two clear them as they remove. A pod may have made any
// number of files there, and paths of any length: neither may keep the machine from starting.
func mutableBelow(in int, name string, depth int) error {
	fd, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	for {
		some, err := f.Readdirnames(100)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, entry := range some {
			isFolder, err := tree.Mutable(fd, entry)
			if err == nil && isFolder && depth < maxDepth {
				err = mutableBelow(fd, entry, depth+1)
			}
			if err != nil {
				return fmt.Errorf("in %s: %w", name, err)
			}
		}
	}
}

// machineID writes the ID into the root that systemd and the kubelet know this installation by
// (machine-id(5)): made once, then kept.
func machineID(file, over string) error {
	b, err := machineIDOf(file)
	if err != nil {
		return err
	}
	if err := write(layout.RunMachine, b); err != nil {
		return err
	}
	return bind(layout.RunMachine, over)
}

// machineIDSize is the size of an ID and the end of its line, in bytes.
const machineIDSize = 33

// machineIDOf returns the ID in the file, which it makes if there is none.
func machineIDOf(file string) ([]byte, error) {
	// Root can have left a link, or a file that is larger than the memory.
	if info, err := os.Lstat(file); err == nil && info.Mode().IsRegular() && info.Size() == machineIDSize {
		b, err := os.ReadFile(file)
		if id, derr := hex.DecodeString(strings.TrimSpace(string(b))); err == nil && derr == nil && len(id) == 16 {
			return b, nil
		}
	}
	if err := tree.RemoveAll(file); err != nil {
		return nil, err
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	b := fmt.Appendf(nil, "%x\n", id)
	return b, os.WriteFile(file, b, 0o444)
}

// programPath is the path of the root's programs. It has no folder of the state disk (B8).
const programPath = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"

// switchRoot makes root the machine's root and executes its init program.
func switchRoot(root string) error {
	for _, name := range []string{"/init", modulesFile, "/lib"} { // the memory of files that are not needed any more
		_ = os.RemoveAll(name)
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return fmt.Errorf("run /sbin/init: %w", unix.Exec("/sbin/init", []string{"/sbin/init"}, []string{programPath, "TERM=linux"}))
}
