package main

import (
	"archive/tar"
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/internal/image/layout"
)

//go:embed all:files
var files embed.FS

// masked units never start. Those that extend PCRs by themselves would change the values that were predicted for the
// owner's policy; the others are ways in, or work that a read-only root does not have.
var masked = []string{
	"systemd-pcrphase.service", "systemd-pcrphase-sysinit.service", "systemd-pcrphase-initrd.service",
	"systemd-pcrmachine.service", "systemd-pcrfs@.service", "systemd-pcrfs-root.service",
	"getty@.service", "serial-getty@.service", "console-getty.service", "container-getty@.service", "autovt@.service", "getty.target",
	"systemd-logind.service", "user@.service", "user-runtime-dir@.service", // what lingers would run as its user, from homes on the state disk
	"sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target", "suspend-then-hibernate.target",
	"systemd-suspend.service", "systemd-hibernate.service", "systemd-hybrid-sleep.service", "systemd-suspend-then-hibernate.service",
	"emergency.service", "rescue.service", "debug-shell.service", "ctrl-alt-del.target",
	"systemd-firstboot.service", "systemd-sysext.service", "systemd-machine-id-commit.service", "systemd-sysusers.service",
	"dpkg-db-backup.timer", "dpkg-db-backup.service", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer",
}

// silenced are generators whose units are not wanted: for any partitions on the disks, and for logins.
var silenced = []string{"systemd-gpt-auto-generator", "systemd-getty-generator", "systemd-debug-generator", "systemd-cryptsetup-generator", "systemd-veritysetup-generator", "systemd-system-update-generator"}

// enabled maps units to the target that wants them.
var enabled = map[string]string{
	"/etc/systemd/system/containerd.service":                       "multi-user.target",
	"/etc/systemd/system/muster-measured.service":                  "multi-user.target",
	"/etc/systemd/system/tmp.mount":                                "local-fs.target",
	"/usr/lib/systemd/system/muster-bootstrapper.service":          "multi-user.target",
	"/usr/lib/systemd/system/muster-attester.service":              "multi-user.target",
	"/usr/lib/systemd/system/systemd-networkd.service":             "multi-user.target",
	"/usr/lib/systemd/system/systemd-networkd-wait-online.service": "network-online.target",
	"/usr/lib/systemd/system/systemd-timesyncd.service":            "sysinit.target",
}

// removed are paths of Debian's root, with all below, that the image does not have: those on the state disk, those
// that each boot creates, and those that only a package manager reads.
var removed = []string{"var", "boot", "run", "tmp", "dev", "proc", "sys", "mnt", "media", "srv", "home", "etc/apt", "etc/group-", "etc/gshadow-", "etc/passwd-", "etc/shadow-", "etc/subgid-", "etc/subuid-", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/machine-id", "etc/mtab", "etc/fstab", "etc/network", "usr/share/zsh", "usr/local", "opt", "etc/systemd/system",
	// Programs for users, or that change the user: the image has no users. The units that would start them are masked
	// too.
	"usr/sbin/agetty", "usr/sbin/getty", "usr/sbin/sulogin", "usr/bin/login", "usr/bin/su", "usr/bin/newgrp", "usr/bin/sg"}

// waysIn are programs that Debian's part must not have: a build that gets one by a dependency fails.
var waysIn = []string{"usr/sbin/sshd", "usr/sbin/dropbear", "usr/sbin/in.telnetd", "usr/sbin/telnetd", "usr/sbin/in.rshd", "usr/sbin/xinetd", "usr/sbin/inetd"}

// folders that the root needs as mount points.
var folders = []string{"boot", "dev", "etc/cni/net.d", "etc/kubernetes", "etc/muster", "home", "mnt", "opt/cni", "proc", "run", "srv", "sys", "tmp", "usr/local/bin", "usr/local/lib/muster", "var"}

// tree is what the image adds to Debian's root: path without leading slash → entry.
type tree map[string]entry

type entry struct {
	header  tar.Header
	content []byte
}

func (t tree) put(name string, kind byte, mode int64, link string, content []byte) {
	t[name] = entry{tar.Header{Typeflag: kind, Mode: mode, Linkname: link, Size: int64(len(content))}, content}
}
func (t tree) file(name string, mode int64, content []byte) {
	t.put(name, tar.TypeReg, mode, "", content)
}
func (t tree) link(name, to string) { t.put(name, tar.TypeSymlink, 0o777, to, nil) }
func (t tree) dir(name string)      { t.put(name, tar.TypeDir, 0o755, "", nil) }

// folder adds all that lies below dir of a file system.
func (t tree) folder(from fs.FS, dir, into string) error {
	return fs.WalkDir(from, dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil || rel == "." {
			return err
		}
		name := path.Join(into, filepath.ToSlash(rel))
		switch {
		case d.IsDir():
			if _, ok := t[name]; !ok {
				t.dir(name)
			}
			return nil
		case !d.Type().IsRegular():
			return fmt.Errorf("%s is neither a file nor a folder", p)
		}
		b, err := fs.ReadFile(from, p)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if info.Mode().Perm()&0o111 != 0 {
			mode = 0o755
		}
		t.file(name, mode, b)
		return nil
	})
}

// additions collects the files of the image beside Debian's packages.
func additions(o options, b base, kernel string, programs map[string]string, config []byte) (tree, error) {
	t := tree{}
	for _, d := range folders {
		t.dir(d)
	}
	if err := t.folder(os.DirFS(filepath.Join(b.kernel(), "lib", "modules")), kernel, "usr/lib/modules/"+kernel); err != nil {
		return nil, err
	}
	// How it was built: kubeadm's checks look there.
	how, err := os.ReadFile(filepath.Join(b.kernel(), "boot", "config-"+kernel))
	if err != nil {
		return nil, err
	}
	t.file("usr/lib/modules/"+kernel+"/config", 0o644, how)
	if err := t.folder(files, "files/root", ""); err != nil {
		return nil, err
	}
	for _, unit := range []string{"muster-bootstrapper.service", "muster-attester.service", "muster-renewal.service", "muster-orders.service", "muster-reset.service", "muster-upgrade.service", "muster-rotation.service"} {
		c, err := os.ReadFile(filepath.Join(o.source, "deploy", "systemd", unit))
		if err != nil {
			return nil, err
		}
		t.file("usr/lib/systemd/system/"+unit, 0o644, c)
	}
	for program, from := range programs {
		c, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		t.file(program, 0o755, c)
	}
	for _, u := range masked {
		t.link("etc/systemd/system/"+u, "/dev/null")
	}
	for _, g := range silenced {
		t.link("etc/systemd/system-generators/"+g, "/dev/null")
	}
	for unit, target := range enabled {
		t.link("etc/systemd/system/"+target+".wants/"+path.Base(unit), unit)
	}
	t.link("etc/systemd/system/default.target", "/usr/lib/systemd/system/multi-user.target")
	t.link("etc/hosts", layout.RunHosts)
	t.link("etc/resolv.conf", layout.RunResolv)
	t.link("etc/mtab", "../proc/self/mounts") // as systemd-tmpfiles wants it
	t.file("etc/machine-id", 0o444, nil)
	t.file("etc/fstab", 0o644, nil)
	t.file("etc/os-release", 0o644, osRelease(o))
	t.file("etc/muster/image.yaml", 0o644, config)
	t.file("etc/muster/metadata.yaml", 0o644, nil)
	if o.images != "" {
		if err := t.images(o.images); err != nil {
			return nil, err
		}
	}
	if o.add != "" {
		return t, t.folder(os.DirFS(o.add), ".", "")
	}
	return t, nil
}

func osRelease(o options) []byte {
	return fmt.Appendf(nil, "ID=muster\nID_LIKE=debian\nNAME=Muster\nPRETTY_NAME=\"Muster %s\"\nVERSION_ID=%q\nIMAGE_ID=muster\nIMAGE_VERSION=%q\n", o.version, o.version, o.version)
}

// merge writes Debian's root and the additions as one archive, and returns Debian's list of installed packages. It
// refuses a root that allows a login.
func merge(w io.Writer, debian io.Reader, add tree, date time.Time) (status []byte, err error) {
	out := tar.NewWriter(w)
	var shadow []byte
	have := map[string]bool{}
	in := tar.NewReader(debian)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("Debian's root: %w", err) //nolint:staticcheck // ST1005: Debian is a name
		}
		name := path.Clean(h.Name)
		switch name {
		case "var/lib/dpkg/status":
			if status, err = io.ReadAll(in); err != nil {
				return nil, err
			}
		case "etc/shadow":
			if shadow, err = io.ReadAll(in); err != nil {
				return nil, err
			}
			add.file(name, h.Mode, shadow)
			continue
		}
		if _, ours := add[name]; name == "." || ours || slices.ContainsFunc(removed, func(r string) bool { return name == r || strings.HasPrefix(name, r+"/") }) {
			continue
		}
		have[name] = true
		if slices.Contains(waysIn, name) {
			return nil, fmt.Errorf("%s lets people in: a package of Debian's has brought it", name)
		}
		h.Name = name
		if h.Typeflag == tar.TypeReg {
			// There are no logins, so no program needs to give root: neither by its mode nor by capabilities
			// (capabilities(7)).
			h.Mode &= 0o777
			delete(h.PAXRecords, "SCHILY.xattr.security.capability")
			delete(h.Xattrs, "security.capability") //nolint:staticcheck // SA1019: deprecated, but the writer takes them from here too
		}
		if err := put(out, h, in, date); err != nil {
			return nil, err
		}
	}
	if err := locked(shadow); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(add)) {
		var parents []string
		for d := path.Dir(name); d != "." && !have[d]; d = path.Dir(d) {
			if _, ours := add[d]; !ours {
				parents = append(parents, d)
			}
			have[d] = true
		}
		for _, d := range slices.Backward(parents) {
			if err := put(out, &tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}, nil, date); err != nil {
				return nil, err
			}
		}
		have[name] = true
		e := add[name]
		e.header.Name = name
		if err := put(out, &e.header, bytes.NewReader(e.content), date); err != nil {
			return nil, err
		}
	}
	return status, out.Close()
}

func put(out *tar.Writer, h *tar.Header, content io.Reader, date time.Time) error {
	h.ModTime, h.AccessTime, h.ChangeTime, h.Format = date, time.Time{}, time.Time{}, tar.FormatPAX
	h.Uname, h.Gname = "", ""
	if err := out.WriteHeader(h); err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	_, err := io.Copy(out, content)
	return err
}

// locked refuses password files that allow a login (shadow(5)).
func locked(shadow []byte) error {
	if !bytes.Contains(append([]byte("\n"), shadow...), []byte("\nroot:")) {
		return errors.New("/etc/shadow: root is not in it")
	}
	for line := range strings.Lines(string(shadow)) {
		f := strings.Split(line, ":")
		if len(f) < 2 || !strings.HasPrefix(f[1], "*") && !strings.HasPrefix(f[1], "!") {
			return fmt.Errorf("/etc/shadow: %s has a password", f[0])
		}
	}
	return nil
}

// squash makes the file system of the root, and returns Debian's list of packages.
func squash(ctx context.Context, o options, b base, add tree, to string) ([]byte, error) {
	debian, err := os.Open(b.root())
	if err != nil {
		return nil, err
	}
	defer debian.Close()
	r, w := io.Pipe()
	var status []byte
	done := make(chan error, 1)
	go func() {
		s, err := merge(w, debian, add, o.date)
		status = s
		w.CloseWithError(err)
		done <- err
	}()
	os.Remove(to)
	cmd := command(ctx, o, "mksquashfs", "-", to, "-tar", "-quiet", "-no-progress", "-comp", "zstd", "-Xcompression-level", "5", "-root-mode", "0755")
	cmd.Stdin = r
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		// It makes the user that it runs as the owner of the root folder, without an option against that for
		// archives. In a user namespace of its own that is root.
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: uid, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: gid, Size: 1}},
		}
	}
	said, err := cmd.CombinedOutput()
	err = explain("mksquashfs", said, err)
	r.CloseWithError(errors.New("mksquashfs ended"))
	return status, errors.Join(<-done, err)
}
