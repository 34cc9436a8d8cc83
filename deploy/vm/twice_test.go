//go:build image

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
	"golang.org/x/sys/unix"
)

// It takes minutes, so it has a target of its own: make test-image.
func TestTwoBuildsFromNothingButPackagesAreTheSameBytes(t *testing.T) {
	containerd := os.Getenv("MUSTER_VM_CONTAINERD")
	if containerd == "" {
		t.Fatal("MUSTER_VM_CONTAINERD is not set: run `make test-image`")
	}
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { // other users go through it
		t.Fatal(err)
	}
	vm := filepath.Join(dir, "vm")
	output(t, exec.CommandContext(t.Context(), "go", "build", "-o", vm, "."))
	modules := output(t, exec.CommandContext(t.Context(), "go", "env", "GOMODCACHE"))
	build := func(cmd *exec.Cmd, source, bin, containerd, cache, out string) string {
		t.Helper()
		cmd.Args = append(cmd.Args, vm, "-source", source, "-bin", bin, "-containerd", containerd, "-version", "v0.0.0-test", "-allow-no-owner-key", "-cache", cache, "-o", out)
		cmd.Env = append(os.Environ(), cmd.Env...)
		start := time.Now()
		printed := output(t, cmd)
		t.Logf("%.0f s: %v\n%s", time.Since(start).Seconds(), cmd.Args, printed)
		return printed
	}
	out, cache := filepath.Join(dir, "out"), filepath.Join(dir, "cache")
	first := build(exec.CommandContext(t.Context(), "env"), "../..", "../../bin", containerd, cache, out)

	// All paths and settings differ, the caches are empty, and the bootstrapper is compiled again.
	other := filepath.Join(dir, "elsewhere")
	source, programs, home := filepath.Join(other, "checkout"), filepath.Join(other, "programs"), filepath.Join(other, "home")
	copyCheckout(t, source)
	compile := exec.CommandContext(t.Context(), "make", "-s", "-C", source, "build", "COMMANDS=bootstrapper", "BIN="+programs)
	compile.Env = append(os.Environ(), "GOCACHE="+filepath.Join(other, "gocache"))
	output(t, compile)
	// containerd's were compiled and compared with tools/kube/sha256sums.json when they came into the cache.
	for _, from := range []string{filepath.Join(containerd, "containerd"), filepath.Join(containerd, "containerd-shim-runc-v2"), filepath.Join(containerd, "ctr")} {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		place(t, programs, filepath.Base(from), string(b))
	}
	place(t, home, ".mtoolsrc", "MTOOLS_NO_VFAT=1\nMTOOLS_LOWER_CASE=1\n")
	place(t, other, "tmp/there", "")
	second := exec.CommandContext(t.Context(), "taskset", "-c", "0", "sh", "-c", `umask 077; exec "$@"`, "sh")
	second.Dir = home
	second.Env = []string{"HOME=" + home, "USER=alice", "TZ=Pacific/Kiritimati", "LANG=de_DE.UTF-8", "LC_ALL=de_DE.UTF-8", "TMPDIR=" + filepath.Join(other, "tmp"), "XDG_CACHE_HOME=" + filepath.Join(other, "xdg"),
		"GOMODCACHE=" + modules, "GOAMD64=v3", "GOFLAGS=-ldflags=-w", "SOURCE_DATE_EPOCH=1", "TAR_OPTIONS=--mtime=@1", "SQFS_OPTIONS=x", "GZIP=-1"}
	if got := build(second, source, programs, programs, filepath.Join(other, "cache"), filepath.Join(other, "out")); got != first {
		t.Errorf("with other folders and settings it made\n%s\nand before\n%s", got, first)
	}

	// Another user, who may read Go's module cache: reading it needs no root. mmdebstrap does, so the user's cache has the root of the second build, and
	// nothing else: the user fetches kernel and boot loader.
	const nobody = 65534
	user := filepath.Join(dir, "nobody")
	roots, err := filepath.Glob(filepath.Join(other, "cache", "root-*.tar"))
	if err != nil || len(roots) != 1 {
		t.Fatal(roots, err)
	}
	if err := os.MkdirAll(filepath.Join(user, "cache"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := copyFile(roots[0], filepath.Join(user, "cache", filepath.Base(roots[0]))); err != nil {
		t.Fatal(err)
	}
	output(t, exec.CommandContext(t.Context(), "chown", "-R", "65534:65534", user))
	third := exec.CommandContext(t.Context(), "env")
	third.Env = []string{"HOME=" + user, "TMPDIR=" + user, "XDG_CACHE_HOME=" + user, "GOMODCACHE=" + modules}
	third.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: []uintptr{unix.CAP_DAC_READ_SEARCH}}
	if got := build(third, "../..", "../../bin", containerd, filepath.Join(user, "cache"), filepath.Join(user, "out")); got != first {
		t.Errorf("another user made\n%s\nand root\n%s", got, first)
	}
	for _, file := range []string{lockFile, billFile} { // the builder signs these lines
		if !regexp.MustCompile(`(?m)^[0-9a-f]{64}  ` + regexp.QuoteMeta(file) + `$`).MatchString(first) {
			t.Errorf("no line names %s", file)
		}
	}
	b, err := os.ReadFile(filepath.Join(out, billFile))
	if err != nil {
		t.Fatal(err)
	}
	bill, err := json.Read(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(bill); err != nil {
		t.Error(err)
	}
	runbookRuns(t, cache)
}

// output runs a command and returns what it prints.
func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	return strings.TrimSpace(string(out))
}

// copyCheckout copies the files that git tracks, or would track.
func copyCheckout(t *testing.T, to string) {
	t.Helper()
	list := exec.CommandContext(t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = "../.."
	for name := range strings.SplitSeq(strings.TrimRight(output(t, list), "\x00"), "\x00") {
		b, err := os.ReadFile(filepath.Join("..", "..", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed, and not committed yet
		}
		if err != nil {
			t.Fatal(err)
		}
		place(t, to, name, string(b))
	}
}

// runbookRuns checks whether Debian's part of the image in cache has the programs of the block that a machine
// executes when etcd has lost its quorum: there are no logins, so the block comes with an image of its own
// (docs/runbooks.md).
func runbookRuns(t *testing.T, cache string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?ms)^```sh title=quorum-force\n(.*?)^```$").FindSubmatch(page)
	roots, err := filepath.Glob(filepath.Join(cache, "root-*.tar"))
	if err != nil || len(roots) != 1 || block == nil {
		t.Fatal(roots, err)
	}
	f, err := os.Open(roots[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	has := map[string]bool{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if dir := path.Base(path.Dir(h.Name)); dir == "bin" || dir == "sbin" {
			has[path.Base(h.Name)] = true
		}
	}
	looked := 0
	for _, word := range regexp.MustCompile(`[a-z][a-z0-9-]*`).FindAllString(regexp.MustCompile(`(?m)\s#.*$`).ReplaceAllString(string(block[1]), ""), -1) {
		if _, err := exec.LookPath(word); err != nil {
			continue // no program on this machine either
		}
		if looked++; !has[word] {
			t.Errorf("docs/runbooks.md, quorum-force: the image has no %s", word)
		}
	}
	if looked < 8 {
		t.Errorf("only %d programs were looked for", looked)
	}
}
