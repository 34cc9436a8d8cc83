package machine

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/image"
	"github.com/muster-k8s/muster/lab/internal/lan"
)

// programs is where components are installed. On a real machine it lies on a disk and outlives a reboot.
const programs = "usr/local/bin"

// disks are the folders of a machine that lie on the host's disk. containerd's snapshots
// can't lie on an overlay, and the others must survive a reboot.
var disks = map[string]string{ // name below disk/ → path in the machine
	"containerd": "/var/lib/containerd",
	"kubelet":    "/var/lib/kubelet",
	"etcd":       "/var/lib/etcd",
	"muster":     "/var/lib/muster",
	"enabled":    enabledDir,
	"kubernetes": "/etc/kubernetes",
	"log":        "/var/log",
}

// notCopied are entries of the host's /etc that a machine must not have: they are its own,
// or they are secrets of the host.
var notCopied = []string{
	"kubernetes", "cni", "containerd", "muster", "systemd", "machine-id", "hostname", "hosts", "resolv.conf",
	"shadow", "shadow-", "gshadow", "gshadow-", "ssh", "sudoers", "sudoers.d",
}

// A rootfs makes a root file system below root; the first error stays.
type rootfs struct {
	root string
	err  error
}

func (r *rootfs) path(p string) string { return filepath.Join(r.root, p) }

func (r *rootfs) do(what string, f func() error) {
	if r.err == nil {
		if err := f(); err != nil {
			r.err = fmt.Errorf("%s: %w", what, err)
		}
	}
}

func (r *rootfs) mkdir(paths ...string) {
	for _, p := range paths {
		r.do("make folder", func() error { return os.MkdirAll(r.path(p), 0o755) })
	}
}

func (r *rootfs) mount(source, at, kind string, flags uintptr, data string) {
	r.do("mount "+at, func() error { return unix.Mount(source, r.path(at), kind, flags, data) })
}

func (r *rootfs) write(at, content string) {
	r.do("write", func() error { return os.WriteFile(r.path(at), []byte(content), 0o644) })
}

// bindFile mounts a file of the host over a file of the machine, which it makes.
func (r *rootfs) bindFile(source, at string) {
	r.mkdir(filepath.Dir(at))
	r.do("make "+at, func() error {
		f, err := os.OpenFile(r.path(at), os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		return f.Close()
	})
	r.mount(source, at, "", unix.MS_BIND, "")
}

// console gives the machine a console of its own, a file, if the host has one: a machine's output must not appear on
// the host's.
func (r *rootfs) console(file string) {
	if _, err := os.Stat(r.path("dev/console")); err != nil {
		return
	}
	r.do("make console", func() error {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		return f.Close()
	})
	r.mount(file, "dev/console", "", unix.MS_BIND, "")
}

// makeRoot builds the machine's root file system and moves into it.
func makeRoot(s Spec) error {
	r := rootfs{root: filepath.Join(s.Dir, "root")}
	// No mount made here may reach the host.
	r.do("make mounts private", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") })
	r.mkdir("/")
	r.mount("tmpfs", "/", "tmpfs", 0, "mode=755")
	r.mkdir("usr", "etc", "opt", "var/lib", "var/tmp", "run", "tmp", "proc", "sys", "dev", "root", "home", "mnt", ".old")
	for _, p := range []string{"tmp", "var/tmp"} {
		r.do("chmod", func() error { return os.Chmod(r.path(p), fs.ModeSticky|0o777) })
	}
	r.do("link", func() error { return os.Symlink("/run", r.path("var/run")) })
	r.usrMerge()
	r.overlay("usr", s.Layers, true)
	r.overlay("opt", s.Layers, false)
	r.keepPrograms(s)
	r.etc(s)
	if s.KeepEtc {
		r.keep("etc", filepath.Join(s.Dir, "disk", "etc"), r.path("etc"))
	}
	for name, at := range disks {
		from := filepath.Join(s.Dir, "disk", name)
		r.mkdir(at)
		r.do("make disk", func() error { return os.MkdirAll(from, 0o755) })
		r.mount(from, at, "", unix.MS_BIND, "")
	}
	r.mount("tmpfs", "run", "tmpfs", 0, "mode=755")
	r.mkdir("run/lock")
	r.mount("proc", "proc", "proc", 0, "")
	r.mount("sysfs", "sys", "sysfs", 0, "")
	r.mount("/dev", "dev", "", unix.MS_BIND|unix.MS_REC, "")
	r.console(filepath.Join(s.Dir, "console"))
	r.cgroups(s.Cgroups)
	r.sysctls()
	if s.TPMSocket != "" {
		r.bindFile(s.TPMSocket, image.TPMSocket)
	}
	r.do("pivot into the new root", func() error {
		if err := unix.Chdir(r.root); err != nil {
			return err
		}
		if err := unix.PivotRoot(".", ".old"); err != nil {
			return err
		}
		return errors.Join(unix.Chdir("/"), unix.Unmount("/.old", unix.MNT_DETACH), os.Remove("/.old"))
	})
	// Containers and the kubelet pass mounts on to each other.
	r.do("share mounts", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "") })
	return r.err
}

// usrMerge repeats the host's /bin, /lib and so on, which are links into /usr.
func (r *rootfs) usrMerge() {
	for _, l := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		target, err := os.Readlink("/" + l)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		r.do("read the host's /"+l+" (a merged /usr is needed)", func() error { return err })
		r.do("link", func() error { return os.Symlink(target, r.path(l)) })
	}
}

// overlay mounts the layers' folder of this name, over the host's if wanted, below a
// writable layer in memory.
func (r *rootfs) overlay(name string, layers []string, overHost bool) {
	var lower []string
	for _, l := range layers {
		if d := filepath.Join(l, name); isDir(d) {
			lower = append(lower, d)
		}
	}
	if overHost {
		lower = append(lower, "/"+name)
	}
	if len(lower) == 0 {
		return
	}
	up, work := ".overlay/"+name+"/up", ".overlay/"+name+"/work"
	r.mkdir(up, work)
	r.mount("overlay", name, "overlay", 0,
		"lowerdir="+strings.Join(lower, ":")+",upperdir="+r.path(up)+",workdir="+r.path(work))
}

// keepPrograms mounts the folder of [programs] again, with a writable layer on the machine's disk. Its lower layers are those
// of /usr, since the overlay there can't be the layer of another one on each kernel.
func (r *rootfs) keepPrograms(s Spec) {
	var lower []string
	for _, l := range append(slices.Clone(s.Layers), "/") {
		if d := filepath.Join(l, programs); isDir(d) {
			lower = append(lower, d)
		}
	}
	if len(lower) == 0 {
		return
	}
	r.mkdir(programs)
	r.keep(programs, filepath.Join(s.Dir, "disk", "programs"), lower...)
}

// keep mounts an overlay at a folder whose writable layer is on the machine's disk.
func (r *rootfs) keep(at, disk string, lower ...string) {
	up, work := filepath.Join(disk, "up"), filepath.Join(disk, "work")
	for _, d := range []string{up, work} {
		r.do("make disk", func() error { return os.MkdirAll(d, 0o755) })
	}
	r.mount("overlay", at, "overlay", 0, "lowerdir="+strings.Join(lower, ":")+",upperdir="+up+",workdir="+work)
}

func isDir(p string) bool {
	fi, err := os.Stat(p)
	return err == nil && fi.IsDir()
}

func (r *rootfs) etc(s Spec) {
	entries, err := os.ReadDir("/etc")
	r.do("read /etc", func() error { return err })
	copyInto := func(from ...string) {
		r.do("fill /etc", func() error {
			args := append([]string{"-a", "-t", r.path("etc"), "--"}, from...)
			if out, err := exec.Command("cp", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("cp: %w: %s", err, out)
			}
			return nil
		})
	}
	var keep []string
	for _, e := range entries {
		if !slices.Contains(notCopied, e.Name()) {
			keep = append(keep, filepath.Join("/etc", e.Name()))
		}
	}
	copyInto(keep...)
	for _, l := range slices.Backward(s.Layers) { // the topmost layer wins
		if d := filepath.Join(l, "etc"); isDir(d) {
			copyInto(d + "/.")
		}
	}
	r.mkdir("etc/cni/net.d", "etc/muster")
	r.write("etc/hostname", s.Name+"\n")
	r.write("etc/hosts", "127.0.0.1 localhost\n"+s.Address+" "+s.Name+"\n")
	r.write("etc/resolv.conf", "nameserver "+lan.Gateway+"\n") // nothing listens there: names outside the cluster fail at once
	id := make([]byte, 16)
	_, err = rand.Read(id)
	r.do("machine ID", func() error { return err })
	r.write("etc/machine-id", hex.EncodeToString(id)+"\n")
	metadata, err := os.ReadFile(filepath.Join(s.Dir, "metadata.yaml"))
	if !errors.Is(err, fs.ErrNotExist) {
		r.do("metadata", func() error { return err })
		r.write("etc/muster/metadata.yaml", string(metadata))
	}
}

// cgroups mounts the host's hierarchies again. Inside the cgroup namespace their roots are
// the machine's own groups.
func (r *rootfs) cgroups(c host.Cgroups) {
	const at = "sys/fs/cgroup"
	if c.Unified {
		r.mount("cgroup2", at, "cgroup2", 0, "")
		return
	}
	r.mount("tmpfs", at, "tmpfs", 0, "mode=755")
	for _, h := range c.Hierarchies {
		name, opts := h.Name, h.Name
		if n, ok := strings.CutPrefix(h.Name, "name="); ok {
			name, opts = n, "none,"+h.Name
		}
		r.mkdir(at + "/" + name)
		r.mount("cgroup", at+"/"+name, "cgroup", 0, opts)
		if strings.Contains(name, ",") { // cpu,cpuacct is looked for under either name
			for part := range strings.SplitSeq(name, ",") {
				r.do("link", func() error { return os.Symlink(name, r.path(at+"/"+part)) })
			}
		}
	}
}

// sysctls redirects the kubelet's kernel-wide settings to files of the machine's
// own: the host's settings stay as they are.
func (r *rootfs) sysctls() {
	for name, value := range map[string]string{"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"} {
		own := "run/sysctl/" + strings.ReplaceAll(name, "/", ".")
		r.mkdir("run/sysctl")
		r.write(own, value+"\n")
		r.mount(r.path(own), "proc/sys/"+name, "", unix.MS_BIND, "")
	}
	// The ID of this boot: that of the host's kernel would be the same after a restart of the machine, which is recognized by it.
	own := "run/boot_id"
	id, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	r.do("boot ID", func() error { return err })
	r.write(own, string(id))
	r.mount(r.path(own), "proc/sys/kernel/random/boot_id", "", unix.MS_BIND, "")
	r.write("proc/sys/net/ipv4/ip_forward", "1") // this one is the network namespace's
}

// leaveTopCgroup moves PID 1 out of the machine's top cgroup, which here is the root, and
// lets that hand its controllers on; see [makeRoom].
func leaveTopCgroup(c host.Cgroups) error {
	if !c.Unified {
		return nil
	}
	const leaf = "init"
	own := host.Cgroups{Unified: true, Hierarchies: []host.Hierarchy{{Mount: "/sys/fs/cgroup"}}}
	if err := os.Mkdir(filepath.Join("/sys/fs/cgroup", leaf), 0o755); err != nil {
		return err
	}
	if err := own.Enter(leaf, os.Getpid()); err != nil {
		return err
	}
	return own.Create(leaf) // the top group is empty now, so its controllers can be enabled
}
