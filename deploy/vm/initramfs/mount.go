package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
)

type mount struct {
	kind, target, options string
	flags                 uintptr
}

// kernelMounts go with the machine into its root.
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
		// ENODEV: a module for an instruction set that this CPU lacks; another does its work.
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("load %s: %w", filepath.Base(name), err)
		}
	}
	return nil
}

// stateFolder is where the whole file system of the state disk can be seen.
const stateFolder = "/run/muster/state"

// kept are the folders of the root that lie on the state disk. The rest of the root can't be written: nothing of the
// disk is where systemd looks for units, generators or its own configuration, of /usr/local in particular.
var kept = []struct {
	at   string // in the root
	perm fs.FileMode
	with []string // folders inside that must be there
}{
	{"/var", 0o755, []string{"lib", "log/journal", "cache", "spool", "tmp"}},
	{"/etc/kubernetes", 0o700, nil},
	{"/etc/cni/net.d", 0o755, nil},
	{"/opt/cni", 0o755, []string{"bin"}},
	{"/usr/local/bin", 0o755, nil},
	{"/usr/local/lib/muster", 0o755, nil},
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
		for _, dir := range append([]string{"."}, k.with...) {
			if err := os.MkdirAll(filepath.Join(from, dir), k.perm); err != nil {
				return err
			}
		}
		if err := bind(from, root+k.at); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(stateFolder, "var", "tmp"), fs.ModeSticky|0o777); err != nil {
		return err
	}
	return machineID(filepath.Join(stateFolder, "machine-id"), root+"/etc/machine-id")
}

// machineID gives the root the ID that systemd and the kubelet know this installation by
// (machine-id(5)): made once, then kept.
func machineID(file, over string) error {
	b, err := os.ReadFile(file)
	if id, derr := hex.DecodeString(strings.TrimSpace(string(b))); err != nil || derr != nil || len(id) != 16 {
		id = make([]byte, 16)
		_, _ = rand.Read(id) // never fails
		id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
		b = fmt.Appendf(nil, "%x\n", id)
		if err := os.WriteFile(file, b, 0o444); err != nil {
			return err
		}
	}
	if err := write(layout.RunMachine, b); err != nil {
		return err
	}
	return bind(layout.RunMachine, over)
}

// switchRoot makes root the machine's root and runs its init program in place of this one.
func switchRoot(root string) error {
	for _, name := range []string{"/init", modulesFile, "/lib"} { // the memory of what is not needed any more
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
	return fmt.Errorf("run /sbin/init: %w", unix.Exec("/sbin/init", []string{"/sbin/init"}, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin", "TERM=linux"}))
}
