package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// spec returns an image of a program that was compiled as the services are.
func spec(t *testing.T, archs ...string) imageSpec {
	t.Helper()
	dir := t.TempDir()
	source, binary := filepath.Join(dir, "main.go"), filepath.Join(dir, "kms")
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() { println(1) }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := imageSpec{Name: "registry.example/muster/kms", Tag: "v0.1.0", Entrypoint: "/kms"}
	for _, arch := range archs {
		from := platformBinary{arch, binary + "-" + arch, binary + "-" + arch}
		if err := compile(t.Context(), os.Stderr, source, from.Path, arch, "v0.1.0", ""); err != nil {
			t.Fatal(err)
		}
		s.Binaries = append(s.Binaries, from)
	}
	return s
}

func TestAnImageIsValidAndRunsAsNobody(t *testing.T) {
	s := spec(t, "amd64")
	img, err := buildImage(s, s.Binaries[0])
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.Config.User != nonRoot || config.Architecture != "amd64" || config.OS != "linux" || config.Config.Entrypoint[0] != "/kms" {
		t.Errorf("%+v", config)
	}
}

func TestTheSameBinaryGivesTheSameArchive(t *testing.T) {
	dir := t.TempDir()
	var archives [][]byte
	var refs []string
	for i := range 2 {
		path := filepath.Join(dir, fmt.Sprint(i))
		ref, err := writeImage(spec(t, "amd64", "arm64"), path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		archives, refs = append(archives, b), append(refs, ref)
	}
	if refs[0] != refs[1] || !bytes.Equal(archives[0], archives[1]) {
		t.Errorf("%s and %s", refs[0], refs[1])
	}
	if !strings.HasPrefix(refs[0], "registry.example/muster/kms@sha256:") {
		t.Error(refs[0])
	}
}

func TestAnArchiveIsAWholeLayoutWithBothNames(t *testing.T) {
	for _, archs := range [][]string{{"amd64"}, {"amd64", "arm64"}} {
		t.Run(strings.Join(archs, " and "), func(t *testing.T) { layoutOf(t, archs) })
	}
}

func layoutOf(t *testing.T, archs []string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kms.tar")
	ref, err := writeImage(spec(t, archs...), path)
	if err != nil {
		t.Fatal(err)
	}
	files := untar(t, path)
	var index v1.IndexManifest
	if err := json.Unmarshal(files["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, b := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(read); err != nil {
		t.Error(err)
	}
	var names []string
	for _, d := range index.Manifests {
		names = append(names, d.Annotations["io.containerd.image.name"])
		if _, ok := files["blobs/sha256/"+d.Digest.Hex]; !ok {
			t.Errorf("manifest %s is missing", d.Digest)
		}
	}
	if len(names) != 2 || names[0] != "registry.example/muster/kms:v0.1.0" || names[1] != ref {
		t.Errorf("names %q, reference %s", names, ref)
	}
	var platforms []string
	inner := read
	if len(archs) > 1 {
		if inner, err = read.ImageIndex(index.Manifests[0].Digest); err != nil {
			t.Fatal(err)
		}
	}
	all, err := inner.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all.Manifests[:len(archs)] {
		img, err := inner.Image(d.Digest)
		if err != nil {
			t.Fatal(err)
		}
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		platforms = append(platforms, config.Architecture)
		if d.Platform.Architecture != config.Architecture {
			t.Errorf("an image for %s is listed for %s", config.Architecture, d.Platform.Architecture)
		}
	}
	if !slices.Equal(platforms, archs) {
		t.Errorf("images for %q", platforms)
	}
	for name, b := range files {
		if sum, ok := strings.CutPrefix(name, "blobs/sha256/"); ok && fmt.Sprintf("%x", sha256.Sum256(b)) != sum {
			t.Errorf("%s has other content", name)
		}
	}
}

func TestABinaryThatNeedsALinkerIsRefused(t *testing.T) {
	s := spec(t, "amd64")
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := buildImage(s, platformBinary{"amd64", shell, shell}); err == nil {
		t.Error("an image of a shell without its libraries was built")
	}
}

func TestABinaryOfAnotherArchitectureIsRefused(t *testing.T) {
	s := spec(t, "amd64", "arm64")
	amd64, arm64 := s.Binaries[0].Path, s.Binaries[1].Path
	for _, wrong := range []platformBinary{{"amd64", arm64, amd64}, {"arm64", amd64, arm64}, {"amd64", amd64, arm64}, {"riscv64", amd64, amd64}} {
		if _, err := buildImage(s, wrong); err == nil {
			t.Errorf("%+v was taken", wrong)
		}
	}
	for _, right := range s.Binaries {
		if _, err := buildImage(s, right); err != nil {
			t.Errorf("%+v: %v", right, err)
		}
	}
}

func untar(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	files := map[string][]byte{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = b
	}
}
