package oci

import (
	"archive/tar"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func program(t *testing.T, content string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(p, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestALayoutOfTheSameFilesIsTheSame(t *testing.T) {
	images := []Image{{Ref: "registry.k8s.io/pause:3.10.2", Entrypoint: []string{"/pause"}, Files: map[string]string{"/pause": program(t, "one")}}}
	digest := func(cache string, images []Image) string {
		t.Helper()
		dir, _, err := Layout(t.Context(), images, cache)
		if err != nil {
			t.Fatal(err)
		}
		descs, _, err := open(dir)
		if err != nil {
			t.Fatal(err)
		}
		return descs[0].Digest.String()
	}
	a := digest(t.TempDir(), images)
	if b := digest(t.TempDir(), images); a != b {
		t.Errorf("%s and %s", a, b)
	}
	cache := t.TempDir()
	digest(cache, images)
	images[0].Files = map[string]string{"/pause": program(t, "two")}
	if digest(cache, images) == a {
		t.Error("another program gave the cached image")
	}
	images[0].Files = map[string]string{"/pause": program(t, "one")}
	images[0].Version = "3.10.1"
	if digest(cache, images) == a {
		t.Error("another release of the same program gave the same image")
	}
}

func TestPushedImagesAreFoundByPathAndTagWhateverRegistryTheyName(t *testing.T) {
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	host := strings.TrimPrefix(srv.URL, "http://")
	images := []Image{
		{Ref: "registry.k8s.io/coredns/coredns:v1.14.7", Files: map[string]string{"/coredns": program(t, "coredns")}},
		{Ref: "ghcr.io/muster-k8s/kms:dev", Files: map[string]string{"/kms": program(t, "kms")}},
	}
	dir, _, err := Layout(t.Context(), images, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// The same, packed as a release would be.
	packed := t.TempDir()
	pack(t, dir, filepath.Join(packed, "all.tar"))
	unpacked, err := Layouts(packed, filepath.Join(t.TempDir(), "scratch"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Push(t.Context(), unpacked[0], host); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"coredns/coredns:v1.14.7", "muster-k8s/kms:dev"} {
		ref, err := name.ParseReference(host+"/"+path, name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := remote.Image(ref, remote.WithContext(t.Context()), remote.WithTransport(srv.Client().Transport)); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestTargetKeepsTagOrDigest(t *testing.T) {
	sum := strings.Repeat("ab", 32)
	for ref, want := range map[string]string{
		"registry.k8s.io/pause:3.10.2":         "lan:5000/pause:3.10.2",
		"ghcr.io/muster-k8s/kms@sha256:" + sum: "lan:5000/muster-k8s/kms@sha256:" + sum,
		"busybox:1":                            "lan:5000/busybox:1",
		"localhost:5000/a/b:c":                 "lan:5000/a/b:c",
	} {
		got, err := target(ref, "lan:5000")
		if err != nil || got.Name() != want {
			t.Errorf("%s became %v, %v, want %s", ref, got, err, want)
		}
	}
}

func TestATarThatIsNoLayoutIsRefused(t *testing.T) {
	for _, entry := range []string{"../evil", "/etc/passwd", "blobs/sha256/short", "manifest.json"} {
		dir := t.TempDir()
		f, err := os.Create(filepath.Join(dir, "x.tar"))
		if err != nil {
			t.Fatal(err)
		}
		w := tar.NewWriter(f)
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: entry, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if dirs, err := Layouts(dir, t.TempDir()); err == nil {
			t.Errorf("%s became %v", entry, dirs)
		}
	}
	if dirs, err := Layouts(t.TempDir(), t.TempDir()); err == nil {
		t.Errorf("an empty folder became %v", dirs)
	}
}

// pack makes a tar of a layout.
func pack(t *testing.T, dir, to string) {
	t.Helper()
	f, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
