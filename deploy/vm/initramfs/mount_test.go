package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// B8: an attacker who was root before the reboot leaves links at paths where this program, systemd or containerd
// makes folders and files.
func TestNoLinkOfTheStateDiskIsFollowed(t *testing.T) {
	dir := t.TempDir()
	elsewhere, top := filepath.Join(dir, "elsewhere"), filepath.Join(dir, "var")
	link := func(at, to string) {
		t.Helper()
		if err := errors.Join(os.RemoveAll(at), os.Symlink(to, at)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(elsewhere, 0o755); err != nil {
		t.Fatal(err)
	}
	link(top, elsewhere)
	for range 2 {
		if err := prepare(top, 0o755, []string{"lib", "log/journal"}, []string{"lib/muster", "lib/containerd"}); err != nil {
			t.Fatal(err)
		}
		for _, folder := range []string{top, filepath.Join(top, "lib"), filepath.Join(top, "log"), filepath.Join(top, "log", "journal")} {
			if info, err := os.Lstat(folder); err != nil || !info.IsDir() {
				t.Errorf("%s: %v, %v", folder, info, err)
			}
		}
		for _, at := range []string{"lib/muster", "lib/containerd/cri/containers", "lib/containerd/s/snapshots/1/fs", "lib/containerd/fifo"} {
			if _, err := os.Lstat(filepath.Join(top, at)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is there: %v", at, err)
			}
		}
		if left, err := os.ReadDir(elsewhere); err != nil || len(left) > 0 {
			t.Errorf("%v, %v", left, err)
		}
		link(filepath.Join(top, "log"), elsewhere)
		link(filepath.Join(top, "lib/muster"), elsewhere)
		if err := errors.Join(os.MkdirAll(filepath.Join(top, "lib/containerd/cri"), 0o755), os.MkdirAll(filepath.Join(top, "lib/containerd/s/snapshots/1"), 0o755), os.MkdirAll(filepath.Join(top, "lib/containerd/s/snapshots/2/fs"), 0o755)); err != nil {
			t.Fatal(err)
		}
		link(filepath.Join(top, "lib/containerd/cri/containers"), elsewhere)
		link(filepath.Join(top, "lib/containerd/s/snapshots/1/fs"), elsewhere)
		link(filepath.Join(top, "lib/containerd/s/snapshots/2/fs/bin"), "usr/bin") // a container's own
		if err := unix.Mkfifo(filepath.Join(top, "lib/containerd/fifo"), 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatal(err)
		}
	}
	if err := prepare(top, 0o755, []string{"lib", "log/journal"}, []string{"lib/muster", "lib/containerd"}); err != nil {
		t.Fatal(err)
	}
	if to, err := os.Readlink(filepath.Join(top, "lib/containerd/s/snapshots/2/fs/bin")); err != nil || to != "usr/bin" {
		t.Errorf("a link of a container: %q, %v", to, err)
	}
	id := filepath.Join(dir, "machine-id")
	link(id, filepath.Join(elsewhere, "made"))
	made, err := machineIDOf(id)
	if err != nil || len(made) != 33 {
		t.Errorf("%q, %v", made, err)
	}
	if left, err := os.ReadDir(elsewhere); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	if again, err := machineIDOf(id); err != nil || !bytes.Equal(again, made) {
		t.Errorf("%q, was %q, %v", again, made, err)
	}
}

// B8: a file that root can't delete would survive the comparison of the disk.
func TestNoAttributeKeepsAFileFromRoot(t *testing.T) {
	top := filepath.Join(t.TempDir(), "etc-kubernetes")
	file := filepath.Join(top, "manifests", "evil.yaml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	set := func(at string, flags int) {
		f, err := os.Open(at)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	const immutable, appendOnly = 0x10, 0x20
	t.Cleanup(func() { _ = prepare(top, 0o700, nil, []string{"."}) })
	for _, at := range []struct {
		name  string
		flags int
	}{{file, immutable}, {filepath.Dir(file), appendOnly}, {top, immutable}} {
		set(at.name, at.flags)
	}
	if err := os.Remove(file); err == nil {
		t.Fatal("the attributes do nothing")
	}
	if err := prepare(top, 0o700, nil, []string{"."}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(file)); err != nil {
		t.Error(err)
	}
}
