package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tests is a package of tests that note that they ran. The last one fails unless a file exists.
const tests = `package p

import (
	"os"
	"testing"
)

func ran(t *testing.T) {
	f, err := os.OpenFile(os.Getenv("RAN"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(t.Name() + "\n"); err != nil {
		t.Fatal(err)
	}
}

func TestOne(t *testing.T)  { ran(t) }
func TestWait1(t *testing.T) { t.Parallel(); ran(t) }
func TestTwo(t *testing.T)  { ran(t) }
func TestWait2(t *testing.T) { t.Parallel(); ran(t) }
func TestLast(t *testing.T) {
	ran(t)
	if _, err := os.Stat(os.Getenv("RAN") + ".good"); err != nil {
		t.Error(err)
	}
}
`

func TestWhatHasPassedIsNotRunAgain(t *testing.T) {
	dir, state, ran := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "ran")
	t.Setenv("RAN", ran)
	t.Chdir(dir)
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "git", append([]string{"-c", "user.name=x", "-c", "user.email=x@example.com"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	write("go.mod", "module example.com/p\n\ngo 1.26\n")
	write("p_test.go", tests)
	git("init", "-q")
	git("add", ".")
	git("commit", "-qm", "x")
	runs := func(ok bool, want ...string) string {
		t.Helper()
		if err := os.Remove(ran); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		var out bytes.Buffer
		err := run(t.Context(), []string{"-state", state, "-together", "TestWait1|TestWait2", "-files", ". :(exclude)*.md", "."}, &out)
		if (err == nil) != ok {
			t.Fatalf("%v\n%s", err, &out)
		}
		text, err := os.ReadFile(ran)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if got := strings.Fields(string(text)); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("it ran %q, want %q\n%s", got, want, &out)
		}
		return out.String()
	}
	all := []string{"TestOne", "TestTwo", "TestLast", "TestWait1", "TestWait2"}
	runs(false, all...) // one fails, and the others run
	if out := runs(false, "TestLast"); !strings.Contains(out, "passed in an earlier run") {
		t.Error(out)
	}
	write(ran+".good", "")
	if out := runs(true, "TestLast"); !strings.Contains(out, "in all") {
		t.Error(out)
	}
	runs(true)
	write("new", "") // an uncommitted change
	runs(true, all...)
	git("add", ".")
	git("commit", "-qm", "y")
	runs(true, all...) // another commit
	runs(true)
	write("notes.md", "") // not one of the tests' files
	runs(true)
	git("add", ".")
	git("commit", "-qm", "z")
	runs(true)
	if err := run(t.Context(), []string{"-state", state, "-files", "nothing", "."}, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "no file has a name like") {
		t.Errorf("files that do not exist: %v", err)
	}
	if err := run(t.Context(), []string{"-state", state, "-together", "TestWait1|TestWait3", "."}, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "TestWait3, which is no test") {
		t.Errorf("a test that was renamed: %v", err)
	}
	write("p_test.go", "package p\n")
	if err := run(t.Context(), []string{"-state", state, "."}, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "no test") {
		t.Errorf("a package without tests: %v", err)
	}
}
