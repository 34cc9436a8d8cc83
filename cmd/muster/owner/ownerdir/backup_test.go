package ownerdir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestABackupIsPrivateAndWholeOrNotThere(t *testing.T) {
	old := syscall.Umask(0)
	t.Cleanup(func() { syscall.Umask(old) })
	d := mustCreate(t, filepath.Join(t.TempDir(), "muster-prod"), example(t))
	var synced []string
	d.sync = func(f *os.File) error { synced = append(synced, filepath.Base(f.Name())); return f.Sync() }
	now := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC)
	files := map[string][]byte{"a.yaml": []byte("a"), "b.yaml": []byte("b")}
	path, err := d.Backup(now, files)
	if err != nil || path != d.File("backups/20260102T030405.006Z") {
		t.Fatal(path, err)
	}
	for name, content := range files {
		got, err := os.ReadFile(filepath.Join(path, name))
		st, serr := os.Stat(filepath.Join(path, name))
		if err != nil || serr != nil || string(got) != string(content) || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %q %v %v", name, got, err, serr)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", st, err)
	}
	// Files, then their folder, then the folder's parent.
	if n := len(synced); n < 4 || !slices.Equal(synced[n-4:n-2], []string{"a.yaml", "b.yaml"}) || !strings.HasSuffix(synced[n-2], ".new") || synced[n-1] != "backups" {
		t.Errorf("synced in the order %q", synced)
	}
	if _, err := d.Backup(now, files); err == nil {
		t.Error("a backup was replaced")
	}
	full := errors.New("no space left")
	d.sync = func(*os.File) error { return full }
	if _, err := d.Backup(now.Add(time.Second), files); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	entries, err := os.ReadDir(d.File("backups"))
	if err != nil || len(entries) != 1 {
		t.Errorf("%v, %v: half a backup was left", entries, err)
	}
	view, err := View(d.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = view.Close() }()
	if _, err := view.Backup(now, files); err == nil || errors.Is(err, fs.ErrExist) {
		t.Errorf("written without the lock: %v", err)
	}
}
