package cpio

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sample(t *testing.T) *Archive {
	t.Helper()
	a := &Archive{}
	for _, err := range []error{
		a.Dir("/dev"), a.CharDevice("/dev/console", 0o600, 5, 1),
		a.File("/init", 0o755, []byte("odd")), a.File("/lib/a/b", 0o644, bytes.Repeat([]byte("x"), 4097)), a.File("lib/a/c", 0o600, nil), a.Dir("/lib/a"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return a
}

func TestAnotherProgramReadsTheArchive(t *testing.T) {
	b := sample(t).Bytes()
	if !bytes.Equal(b, sample(t).Bytes()) {
		t.Error("the same files give another archive")
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "cpio", "-i", "--quiet")
	cmd.Dir, cmd.Stdin = dir, bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	for name, want := range map[string]struct {
		mode os.FileMode
		size int64
	}{"init": {0o755, 3}, "lib/a/b": {0o644, 4097}, "lib/a/c": {0o600, 0}, "dev/console": {os.ModeDevice | os.ModeCharDevice | 0o600, 0}} {
		st, err := os.Lstat(filepath.Join(dir, name))
		if err != nil || st.Mode() != want.mode || (st.Mode().IsRegular() && st.Size() != want.size) {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
}

func TestNamesThatAreTwiceOrNoneAreRefused(t *testing.T) {
	a := sample(t)
	for _, name := range []string{"/init", "init", "/x/../init", "/", "", "a\x00b"} {
		if err := a.File(name, 0o644, nil); err == nil {
			t.Errorf("%q was added", name)
		}
	}
}
