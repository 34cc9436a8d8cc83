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

// deep makes so many folders, each in the one before, with a file and a link in each.
func deep(t *testing.T, folder, target string, depth int) {
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
		deep(t, branch, kept, 400)
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

// A folder of a pod can have millions of names. If each hundred of them needs a new look at the folder from its beginning, a boot takes hours.
func TestAWideFolderIsOpenedOnlyTwice(t *testing.T) {
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
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
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
	if opened > 2 || deleted != names {
		t.Errorf("opened %d times, %d names deleted", opened, deleted)
	}
}
