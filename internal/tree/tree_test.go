package tree

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAWalkSeesAllEntriesUpToItsDepthAndFollowsNoLink(t *testing.T) {
	top, kept := filepath.Join(t.TempDir(), "top"), t.TempDir()
	path := top
	want := []string{top}
	for n := range maxDepth {
		path = filepath.Join(path, fmt.Sprintf("%d\xff", n))
		want = append(want, path)
	}
	tooDeep := filepath.Join(path, "deep")
	if err := errors.Join(os.MkdirAll(filepath.Join(tooDeep, "inside"), 0o755), os.Symlink(kept, filepath.Join(top, "link")), os.WriteFile(filepath.Join(kept, "file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	want = append(want, filepath.Join(top, "link"))
	for n := range 3 * maxNames {
		file := filepath.Join(path, fmt.Sprint(n))
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		want = append(want, file)
	}
	var got, deeper []string
	visit := func(at string, d fs.DirEntry) error {
		got = append(got, at)
		if d.IsDir() {
			return nil
		}
		return os.Remove(at)
	}
	if err := Walk(top, visit, func(at string) error { deeper = append(deeper, at); return nil }); err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) || !slices.Equal(deeper, []string{tooDeep}) {
		t.Errorf("saw %d, want %d; too deep %q", len(got), len(want), deeper)
	}
	got = nil
	if err := Walk(top, func(at string, _ fs.DirEntry) error { got = append(got, at); return fs.SkipDir }, nil); err != nil || len(got) != 1 {
		t.Errorf("%q, %v", got, err)
	}
	if err := errors.Join(Walk(filepath.Join(top, "none"), nil, nil), Each(filepath.Join(top, "none"), nil), Empty(filepath.Join(top, "none"))); err != nil {
		t.Error(err)
	}
	link := filepath.Join(top, "link")
	if err := os.Symlink(kept, link); err != nil {
		t.Fatal(err)
	}
	if Each(link, nil) == nil || Empty(link) == nil {
		t.Error("a link was followed")
	}
	if err := Empty(top); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(top); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if _, err := os.Lstat(filepath.Join(kept, "file")); err != nil {
		t.Error(err)
	}
}

// The bootstrapper's memory has a limit, and a folder can have millions of names.
func TestOnlySomeNamesAreInMemory(t *testing.T) {
	top := t.TempDir()
	for n := range 5000 {
		if err := os.WriteFile(filepath.Join(top, fmt.Sprint(n, strings.Repeat("x", 200))), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	enough := errors.New("enough")
	if err := Walk(top, func(at string, _ fs.DirEntry) error {
		if at == top {
			return nil
		}
		return enough
	}, nil); !errors.Is(err, enough) {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 200<<10 {
		t.Errorf("%d bytes are used", used)
	}
}

// B8: a link in a folder that can't be read would be taken for a missing one.
func TestAnErrorIsNoMissingFolder(t *testing.T) {
	top := t.TempDir()
	hidden := filepath.Join(top, "hidden")
	if err := errors.Join(os.Chmod(top, 0o755), os.Chmod(filepath.Dir(top), 0o755), os.MkdirAll(filepath.Join(hidden, "a"), 0o755), os.Chmod(hidden, 0o700)); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := syscall.Setfsuid(65534); err != nil { // of this thread, which is not root's then
		t.Fatal(err)
	}
	visit := func(string, fs.DirEntry) error { return nil }
	errs := []error{Each(hidden, visit), Walk(hidden, visit, nil), Walk(filepath.Join(hidden, "a"), visit, nil), Empty(hidden), RemoveAll(filepath.Join(hidden, "a"))}
	if err := syscall.Setfsuid(0); err != nil {
		t.Fatal(err)
	}
	for i, err := range errs {
		if !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%d: %v", i, err)
		}
	}
}
