package tree

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// deep makes depth folders, each in the one before, with a file and a link in each. It calls last, unless it is nil, with the last of them.
func deep(t *testing.T, folder, target string, depth int, last func(*os.Root)) {
	t.Helper()
	at, err := os.OpenRoot(folder)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("x", 255)
	for range depth {
		err := errors.Join(at.WriteFile("file", nil, 0o600), at.Symlink(target, "link"), at.Mkdir(name, 0o755))
		next, err2 := at.OpenRoot(name)
		if err := errors.Join(err, err2, at.Close()); err != nil {
			t.Fatal(err)
		}
		at = next
	}
	if last != nil {
		last(at)
	}
	if err := at.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDeepAndLargeTreesAreRemovedWithFewFiles(t *testing.T) {
	top, kept := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(kept, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(top, "tree")
	for i := range 3 {
		branch := filepath.Join(tree, fmt.Sprint(i))
		if err := os.MkdirAll(branch, 0o755); err != nil {
			t.Fatal(err)
		}
		deep(t, branch, kept, 400, nil)
	}
	for i := range 3 * maxNames {
		if err := os.WriteFile(filepath.Join(tree, fmt.Sprint("file", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 128, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	err := RemoveAll(tree)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(tree); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is there: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(kept, "file")); err != nil {
		t.Errorf("a link was followed: %v", err)
	}
	for name, put := range map[string]func(string) error{
		"nothing": func(string) error { return nil },
		"a file":  func(at string) error { return os.WriteFile(at, nil, 0o600) },
		"a link":  func(at string) error { return os.Symlink(kept, at) },
	} {
		at := filepath.Join(top, "at")
		if err := put(at); err != nil {
			t.Fatal(err)
		}
		err := RemoveAll(at)
		if _, lerr := os.Lstat(at); err != nil || !errors.Is(lerr, fs.ErrNotExist) {
			t.Errorf("%s: %v, %v", name, err, lerr)
		}
	}
	if _, err := os.Lstat(kept); err != nil {
		t.Error(err)
	}
}

// A folder of a pod can have millions of names. If each hundred of them, or each twelve of the folders that are inside of each other there, needs a new look
// at the folder from its beginning, a boot takes hours.
func TestAWideFolderIsOpenedOnlyTwice(t *testing.T) {
	for _, depth := range []int{0, 400} {
		tree := filepath.Join(t.TempDir(), "tree")
		if err := os.Mkdir(tree, 0o755); err != nil {
			t.Fatal(err)
		}
		const names = 20 * maxNames
		for i := range names {
			if err := os.WriteFile(filepath.Join(tree, fmt.Sprint(i)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		deep(t, tree, "x", depth, nil)
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.InotifyAddWatch(fd, tree, unix.IN_OPEN|unix.IN_DELETE); err != nil {
			t.Fatal(err)
		}
		if err := RemoveAll(tree); err != nil {
			t.Fatal(err)
		}
		opened, deleted := 0, 0
		for b := make([]byte, 64<<10); ; {
			n, err := unix.Read(fd, b)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			for at := 0; at < n; {
				// inotify(7): wd, mask, cookie, and the length of the name that follows, four bytes each
				mask, length := binary.NativeEndian.Uint32(b[at+4:]), binary.NativeEndian.Uint32(b[at+12:])
				switch {
				case mask&unix.IN_DELETE != 0:
					deleted++
				case mask&unix.IN_OPEN != 0 && length == 0:
					opened++
				}
				at += unix.SizeofInotifyEvent + int(length)
			}
		}
		if err := unix.Close(fd); err != nil {
			t.Fatal(err)
		}
		if opened > 3 || deleted < names { // the kernel joins the first two, unless something is between them
			t.Errorf("%d folders deep: opened %d times, %d names deleted", depth, opened, deleted)
		}
	}
}

// B8: root, or a pod with the capability, can leave files that root can't delete as they are.
func TestNoAttributeKeepsAFileFromItsRemoval(t *testing.T) {
	for _, depth := range []int{0, 1, maxDepth, maxDepth + 1, 1100} {
		top := filepath.Join(t.TempDir(), "top")
		if err := os.Mkdir(top, 0o755); err != nil {
			t.Fatal(err)
		}
		var flagged []*os.File // what is left would keep the test's folder
		flag := func(in *os.Root, name string, attribute int) {
			f, err := in.Open(name)
			if err == nil {
				flagged = append(flagged, f)
				err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, attribute)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			for _, f := range flagged {
				_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)
				_ = f.Close()
			}
		})
		deep(t, top, "x", depth, func(last *os.Root) {
			if err := errors.Join(last.WriteFile("immutable", nil, 0o600), last.Mkdir("append", 0o755), last.WriteFile("append/file", nil, 0o600), last.Mkdir("folder", 0o755)); err != nil {
				t.Fatal(err)
			}
			flag(last, "immutable", immutable)
			flag(last, "append/file", appendOnly)
			flag(last, "append", appendOnly)
			flag(last, "folder", immutable)
			flag(last, ".", immutable)
		})
		if err := RemoveAll(top); err != nil {
			t.Errorf("%d folders deep: %v", depth, err)
		}
		if _, err := os.Lstat(top); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%d folders deep: it is there: %v", depth, err)
		}
	}
}
