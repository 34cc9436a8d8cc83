package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/tree"
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

// These are FS_IMMUTABLE_FL and FS_APPEND_FL of linux/fs.h.
const immutable, appendOnly = 0x10, 0x20

func setFlags(t *testing.T, at string, flags int) {
	t.Helper()
	f, err := os.Open(at)
	if err != nil {
		t.Fatal(err)
	}
	err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // what is left would keep the test's folder
		if f, err := os.Open(at); err == nil {
			_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)
			_ = f.Close()
		}
	})
}

// B8: a file that root can't delete would survive the comparison of the disk.
func TestNoAttributeKeepsAFileFromRoot(t *testing.T) {
	top := filepath.Join(t.TempDir(), "etc-kubernetes")
	file := filepath.Join(top, "manifests", "evil.yaml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	setFlags(t, file, immutable)
	setFlags(t, filepath.Dir(file), appendOnly)
	setFlags(t, top, immutable)
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

// The bootstrapper deletes layers, volumes and keys, too: a file that it can't delete would stop the machine at each boot.
func TestNoAttributeKeepsAFileOfAPodFromRoot(t *testing.T) {
	top := filepath.Join(t.TempDir(), "var")
	trees := []string{"lib/containerd", "lib/kubelet"}
	for _, at := range []string{"lib/containerd/x/snapshots/1/fs", "lib/kubelet/pki", "lib/kubelet/pods/1/volumes"} {
		folder := filepath.Join(top, at, "a", "b")
		file, link := filepath.Join(folder, "file"), filepath.Join(folder, "link")
		if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(file, nil, 0o600), os.Symlink("file", link)); err != nil {
			t.Fatal(err)
		}
		setFlags(t, file, immutable)
		setFlags(t, folder, appendOnly)
		setFlags(t, filepath.Join(top, at), immutable)
		if err := prepare(top, 0o755, []string{"lib"}, trees); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(link); err != nil {
			t.Errorf("a pod's link is removed: %v", err)
		}
		if err := os.RemoveAll(filepath.Join(top, at)); err != nil {
			t.Error(err)
		}
	}
}

func TestTheFoldersOfTheStateDiskAreRoots(t *testing.T) {
	top := filepath.Join(t.TempDir(), "var")
	lib := filepath.Join(top, "lib")
	if err := errors.Join(os.MkdirAll(lib, 0o777), os.Chown(lib, 1000, -1), os.Chown(top, 1000, -1)); err != nil { // as root, as in CI
		t.Fatal(err)
	}
	if err := prepare(top, 0o755, []string{"lib"}, nil); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{top, lib} {
		info, err := os.Lstat(at)
		if err != nil {
			t.Fatal(err)
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); !ok || stat.Uid != 0 || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %+v", at, info.Mode(), info.Sys())
		}
	}
}

// A pod needs no rights to make such folders: in a volume, in its writable layer, and in a volume that its image declares.
func TestAPodsDeepFoldersKeepNoMachineFromStarting(t *testing.T) {
	top := filepath.Join(t.TempDir(), "var")
	for _, writable := range []string{
		"lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/v",
		"lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs", "lib/containerd/io.containerd.grpc.v1.cri/containers/1/volumes/1",
	} {
		deep(t, filepath.Join(top, writable), maxDepth+10, 0)
	}
	if err := prepare(top, 0o755, []string{"lib"}, []string{"lib/kubelet", "lib/containerd"}); err != nil {
		t.Error(err)
	}
}

// deep makes so many folders, each in the one before, and a file with attributes in the last of them, which has them too.
func deep(t *testing.T, folder string, depth, flags int) {
	t.Helper()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	at, err := os.OpenRoot(folder)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("x", 100) // after 41 of these, a path is too long for the kernel
	for range depth {
		err := at.Mkdir(name, 0o755)
		next, err2 := at.OpenRoot(name)
		if err := errors.Join(err, err2, at.Close()); err != nil {
			t.Fatal(err)
		}
		at = next
	}
	if flags != 0 {
		if err := at.WriteFile("file", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"file", "."} {
			f, err := at.Open(name)
			if err == nil {
				err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { // what is left would keep the test's folder
				_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)
				_ = f.Close()
			})
		}
	}
	if err := at.Close(); err != nil {
		t.Fatal(err)
	}
}

// B8: what root has left in the place of a folder, of the machine's ID or of a link can't be deleted as it is.
func TestNoAttributeKeepsAFileInTheWay(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, at string){
		"a file": func(t *testing.T, at string) {
			if err := os.WriteFile(at, []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			setFlags(t, at, immutable)
		},
		"a folder": func(t *testing.T, at string) {
			if err := errors.Join(os.MkdirAll(filepath.Join(at, "inside"), 0o755), os.WriteFile(filepath.Join(at, "inside", "file"), nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			setFlags(t, filepath.Join(at, "inside", "file"), immutable)
			setFlags(t, at, appendOnly)
		},
		"deep folders":                   func(t *testing.T, at string) { deep(t, at, 1100, 0) },
		"deep folders and a file":        func(t *testing.T, at string) { deep(t, at, 1100, immutable) },
		"deep folders to which is added": func(t *testing.T, at string) { deep(t, at, 1100, appendOnly) },
	} {
		t.Run(name, func(t *testing.T) {
			top := filepath.Join(t.TempDir(), "var")
			if err := os.MkdirAll(top, 0o755); err != nil {
				t.Fatal(err)
			}
			if name == "a file" { // a folder stays
				leave(t, filepath.Join(top, "cache"))
			}
			if err := prepare(top, 0o755, []string{"cache"}, nil); err != nil {
				t.Errorf("a folder's place: %v", err)
			}
			leave(t, filepath.Join(top, "run"))
			if err := linkTo("/run", filepath.Join(top, "run")); err != nil {
				t.Errorf("a link's place: %v", err)
			}
			if to, err := os.Readlink(filepath.Join(top, "run")); to != "/run" {
				t.Errorf("it leads to %q, %v", to, err)
			}
			id := filepath.Join(top, "machine-id")
			leave(t, id)
			made, err := machineIDOf(id)
			if again, err2 := machineIDOf(id); err != nil || err2 != nil || len(made) != 33 || !bytes.Equal(again, made) {
				t.Errorf("%q, then %q, %v, %v", made, again, err, err2)
			}
		})
	}
}

// B8: this program has no memory for a file of holes that is as large as a disk can be.
func TestALargeMachineIDIsNotRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "machine-id")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 256<<20)); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	id, err := machineIDOf(file)
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; err != nil || len(id) != 33 || used > 1<<20 {
		t.Errorf("%q, %v, with %d bytes of memory", id, err, used)
	}
	if again, err := machineIDOf(file); err != nil || !bytes.Equal(again, id) {
		t.Errorf("%q, was %q, %v", again, id, err)
	}
}

// B8: the machine's record of its steps is in one of these, before the disk is compared.
func TestNoFileIsLeftInThePlaceOfAFolder(t *testing.T) {
	top := filepath.Join(t.TempDir(), "var")
	var trees []string
	for _, k := range kept {
		if k.at == "/var" {
			trees = k.trees
		}
	}
	for _, at := range []string{"lib/muster", "lib/muster/attester", "lib/kubelet"} {
		if err := errors.Join(os.RemoveAll(top), os.MkdirAll(filepath.Dir(filepath.Join(top, at)), 0o755), os.WriteFile(filepath.Join(top, at), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := prepare(top, 0o755, []string{"lib"}, trees); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(top, at)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", at, err)
		}
	}
}

// B8: root can make folders deeper than any path that a program can use.
func TestDeepFoldersOfRootKeepNoMachineFromStarting(t *testing.T) {
	top := filepath.Join(t.TempDir(), "var")
	deep(t, filepath.Join(top, "lib/muster/x"), 50, 0)
	if err := prepare(top, 0o755, []string{"lib"}, []string{"lib/muster"}); err != nil {
		t.Fatal(err)
	}
	if err := filepath.WalkDir(top, func(_ string, _ fs.DirEntry, err error) error { return err }); err != nil {
		t.Errorf("another program can't walk it: %v", err)
	}
}

// asOther calls do as a user who is not root.
func asOther(t *testing.T, do func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := syscall.Setfsuid(65534); err != nil { // of this thread
		t.Fatal(err)
	}
	do()
	if err := syscall.Setfsuid(0); err != nil {
		t.Fatal(err)
	}
}

// B8: a read error must not be taken for a missing link, which a program would then follow.
func TestAnErrorIsNoMissingFile(t *testing.T) {
	dir := t.TempDir()
	hidden := filepath.Join(dir, "hidden")
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755), os.MkdirAll(filepath.Join(hidden, "a"), 0o755), os.Chmod(hidden, 0o700)); err != nil {
		t.Fatal(err)
	}
	asOther(t, func() {
		if err := tree.RemoveAll(filepath.Join(hidden, "a")); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("remove: %v", err)
		}
		if isFolder, err := isFolder(filepath.Join(hidden, "a")); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("it is a folder: %t, %v", isFolder, err)
		}
	})
}
