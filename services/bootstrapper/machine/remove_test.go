package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
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
	for i := range 3 * removeNames {
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
