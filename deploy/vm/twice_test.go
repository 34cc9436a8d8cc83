//go:build image

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
)

// It takes minutes, so it has a target of its own: make test-image.
func TestTwoBuildsFromNothingButPackagesAreTheSameBytes(t *testing.T) {
	containerd := os.Getenv("MUSTER_VM_CONTAINERD")
	if containerd == "" {
		t.Fatal("MUSTER_VM_CONTAINERD is not set: run `make test-image`")
	}
	var (
		printed [2]bytes.Buffer
		out     string
		cache   string
	)
	for i := range printed {
		out = filepath.Join(t.TempDir(), "out")
		cache = t.TempDir()
		args := []string{"-source", "../..", "-bin", "../../bin", "-containerd", containerd, "-version", "v0.0.0-test", "-allow-no-owner-key", "-cache", cache, "-o", out}
		if err := run(t.Context(), args, &printed[i], t.Output()); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(printed[0].Bytes(), printed[1].Bytes()) {
		t.Errorf("the first build made\n%s\nthe second\n%s", &printed[0], &printed[1])
	}
	t.Logf("\n%s", &printed[0])
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

// runbookRuns looks whether Debian's part of the image in cache has the programs of the block that a machine executes when etcd
// has lost its quorum: nobody logs in there, so the block comes with an image of its own (docs/runbooks.md).
func runbookRuns(t *testing.T, cache string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?ms)^```sh title=quorum-force\n(.*?)^```$").FindSubmatch(page)
	roots, err := filepath.Glob(filepath.Join(cache, "debian-*"))
	if err != nil || len(roots) != 1 || block == nil {
		t.Fatal(roots, err)
	}
	f, err := os.Open(base{roots[0]}.root())
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
