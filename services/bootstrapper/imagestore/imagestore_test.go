package imagestore

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// pulled are images as a pull leaves them: one of them is an index, and only its part for this platform is there.
type pulled struct {
	dir        string // an OCI image layout
	app, proxy string // names with digest
	layers     map[string]string
	index      string // the digest of app's index
}

func pull(t *testing.T) pulled {
	t.Helper()
	image := func() v1.Image {
		img, err := random.Image(2000, 2)
		if err != nil {
			t.Fatal(err)
		}
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		config = config.DeepCopy()
		config.OS, config.Architecture = "linux", runtime.GOARCH
		if img, err = mutate.ConfigFile(img, config); err != nil {
			t.Fatal(err)
		}
		return img
	}
	digest := func(i interface{ Digest() (v1.Hash, error) }) string {
		d, err := i.Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	p := pulled{dir: t.TempDir(), layers: map[string]string{}}
	here, proxy, elsewhere := image(), image(), image()
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: here, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}}},
		mutate.IndexAddendum{Add: elsewhere, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "386"}}}) // amd64 runs it too
	p.index = digest(index)
	p.app, p.proxy = "registry.example/app@"+p.index, "registry.example/proxy@"+digest(proxy)
	for name, img := range map[string]v1.Image{p.app: here, p.proxy: proxy} {
		layers, err := img.Layers()
		if err != nil {
			t.Fatal(err)
		}
		p.layers[name] = hexOf(digest(layers[0]))
	}
	l, err := layout.Write(p.dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	named := func(name string) layout.Option {
		return layout.WithAnnotations(map[string]string{nameAnnotation: name})
	}
	if err := errors.Join(
		l.AppendIndex(index, named(p.app)), l.AppendIndex(index, named("registry.example/app:v1")),
		l.AppendImage(proxy, named(p.proxy)), l.AppendImage(proxy, named("registry.example/proxy:v1")),
	); err != nil {
		t.Fatal(err)
	}
	manifest, err := elsewhere.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range append(manifest.Layers, manifest.Config, v1.Descriptor{Digest: v1.Hash{Hex: hexOf(digest(elsewhere))}}) {
		if err := os.Remove(filepath.Join(p.dir, "blobs/sha256", b.Digest.Hex)); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p pulled) archive(t *testing.T) *bytes.Buffer {
	t.Helper()
	b := new(bytes.Buffer)
	w := tar.NewWriter(b)
	if err := errors.Join(w.AddFS(os.DirFS(p.dir)), w.Close()); err != nil {
		t.Fatal(err)
	}
	return b
}

// rebooted returns the store of a machine that has pulled the images and was rebooted, and what it reports.
func rebooted(t *testing.T, p pulled) (s Store, m *machinetest.Machine, found *[]string) {
	t.Helper()
	m, found = &machinetest.Machine{Root: t.TempDir()}, new([]string)
	s = Store{
		Root: m.Root, Machine: m, Socket: "unix:///run/containerd/containerd.sock", Pause: time.Microsecond, Log: slog.New(slog.DiscardHandler),
		Found: func(what, done string) { *found = append(*found, what+": "+done) },
	}
	if err := m.Runs(machine.UnitContainerd); err != nil {
		t.Fatal(err)
	}
	if err := m.ImportImages(t.Context(), s.Socket, p.archive(t)); err != nil {
		t.Fatal(err)
	}
	return s, m, found
}

func (s Store) list(t *testing.T) []string {
	t.Helper()
	names, err := s.Machine.ImageNames(t.Context(), s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

func (p pulled) names() []string { return []string{p.app, p.proxy} }

func blobAt(s Store, sum string) string { return s.on(blobs + "/sha256/" + sum) }

// Of an unchanged store, all images stay with their digests, and nothing else of it.
func TestImagesStayWithTheirDigests(t *testing.T) {
	p := pull(t)
	s, m, found := rebooted(t, p)
	for _, f := range []string{"io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs/bin/app", "io.containerd.metadata.v1.bolt/more", "opt/bin/evil", blobs + "/sha512/x"} {
		if err := machine.WriteFile(s.on(f), []byte("evil"), 0o700, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	lease := filepath.Join(s.Root, networks, "networks/cbr0/10.0.0.2")
	if err := machine.WriteFile(lease, nil, 0o600, 0o700); err != nil {
		t.Fatal(err)
	}
	before := len(m.Calls())
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); !slices.Equal(got, p.names()) || len(*found) != 0 || !m.Running(machine.UnitContainerd) {
		t.Errorf("%q, found %q", got, *found)
	}
	if got, want := m.Calls()[before:], []string{"list images", "stop containerd.service", "start containerd.service", "list images", "import images", "import images", "list images"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	for _, f := range []string{s.on("io.containerd.snapshotter.v1.overlayfs"), s.on("io.containerd.metadata.v1.bolt/more"), s.on("opt"), s.on(blobs + "/sha512"), s.on(kept), lease} {
		if _, err := os.Lstat(f); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", f, err)
		}
	}
	for _, layer := range p.layers {
		if _, err := os.Stat(blobAt(s, layer)); err != nil {
			t.Error(err)
		}
	}
}

// B8: content whose SHA-256 is not its name is never given to containerd again, nor is an image that lacks something.
func TestAnImageThatWasChangedIsNotKept(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(t *testing.T, s Store, p pulled)
		keeps  func(p pulled) []string
		found  bool
	}{
		"a layer has another byte": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			at := blobAt(s, p.layers[p.proxy])
			b, err := os.ReadFile(at)
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)/2] ^= 1
			if err := os.WriteFile(at, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.app} }, true},
		"a layer of an index's part is missing": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			if err := os.Remove(blobAt(s, p.layers[p.app])); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, false},
		"an index is empty": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			if err := os.WriteFile(blobAt(s, hexOf(p.index)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, true},
		"content is a link": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			at := blobAt(s, p.layers[p.app])
			if err := errors.Join(os.Rename(at, at+"-elsewhere"), os.Symlink(at+"-elsewhere", at)); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, true},
		"content is a folder": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			at := blobAt(s, p.layers[p.app])
			if err := errors.Join(os.Remove(at), os.MkdirAll(filepath.Join(at, "x"), 0o700)); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, true},
		"content is a named pipe, which nobody writes to": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			at := blobAt(s, p.layers[p.app])
			if err := errors.Join(os.Remove(at), unix.Mkfifo(at, 0o600)); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, true},
		"content has a second name": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			if err := os.Link(blobAt(s, p.layers[p.app]), filepath.Join(s.Root, "another")); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, true},
		"content is larger than what is on the disk": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			if err := os.Truncate(blobAt(s, p.layers[p.app]), 1<<40); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.proxy} }, true},
		"the folder of content is a link": {func(t *testing.T, s Store, _ pulled) {
			t.Helper()
			elsewhere := filepath.Join(s.Root, "elsewhere")
			if err := errors.Join(os.MkdirAll(elsewhere+"/keep", 0o700), os.RemoveAll(s.on(blobs)), os.Symlink(elsewhere, s.on(blobs))); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := os.Stat(elsewhere + "/keep"); err != nil {
					t.Error("a link was followed:", err)
				}
			})
		}, func(pulled) []string { return nil }, false},
		"the folder of content is a file": {func(t *testing.T, s Store, _ pulled) {
			t.Helper()
			if err := errors.Join(os.RemoveAll(s.on(blobs)), os.WriteFile(s.on(blobs), nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}, func(pulled) []string { return nil }, false},
		"a file is where an interrupted renewal would be": {func(t *testing.T, s Store, _ pulled) {
			t.Helper()
			if err := os.WriteFile(s.on(kept), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return p.names() }, false},
		"a link is where an interrupted renewal would be": {func(t *testing.T, s Store, _ pulled) {
			t.Helper()
			elsewhere := filepath.Join(s.Root, "elsewhere")
			if err := errors.Join(os.MkdirAll(elsewhere+"/blobs/keep", 0o700), os.Symlink(elsewhere, s.on(kept))); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := os.Stat(elsewhere + "/blobs/keep"); err != nil {
					t.Error("a link was followed:", err)
				}
			})
		}, func(p pulled) []string { return p.names() }, false},
		"there is no content": {func(t *testing.T, s Store, _ pulled) {
			t.Helper()
			if err := os.RemoveAll(s.on("io.containerd.content.v1.content")); err != nil {
				t.Fatal(err)
			}
		}, func(pulled) []string { return nil }, false},
		"the database lists names that contain no digest, another one, or one of another kind": {func(t *testing.T, s Store, p pulled) {
			t.Helper()
			at := s.on("io.containerd.metadata.v1.bolt/meta.db")
			names := fmt.Sprintf("%s\nregistry.example/proxy:v1\nregistry.example/x@sha256:%064x\nregistry.example/x@sha512:%0128x\n@\n\n", p.app, 7, 7)
			if err := os.WriteFile(at, []byte(names), 0o600); err != nil {
				t.Fatal(err)
			}
		}, func(p pulled) []string { return []string{p.app} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := pull(t)
			s, m, found := rebooted(t, p)
			tt.change(t, s, p)
			if err := s.Renew(t.Context()); err != nil {
				t.Fatal(err)
			}
			imports := 0
			for _, call := range m.Calls() {
				if call == "import images" {
					imports++
				}
			}
			if imports -= 1; imports != len(tt.keeps(p)) { // the first one is the test's
				t.Errorf("%d images were given to containerd", imports)
			}
			if got, want := s.list(t), tt.keeps(p); !slices.Equal(got, want) || !m.Running(machine.UnitContainerd) {
				t.Errorf("%q, want %q", got, want)
			}
			if len(*found) > 0 != tt.found || len(*found) > 1 {
				t.Errorf("found %q", *found)
			}
			have, err := os.ReadDir(s.on(blobs + "/sha256"))
			if err != nil && len(tt.keeps(p)) > 0 {
				t.Fatal(err)
			}
			for _, f := range have {
				if sum, err := s.sumOf(blobAt(s, f.Name())); err != nil || sum != f.Name() {
					t.Errorf("%s: %s, %v", f.Name(), sum, err)
				}
			}
		})
	}
}

// A store that can't be read is replaced by an empty one: the images are pulled again.
func TestAStoreThatIsDamagedIsReplaced(t *testing.T) {
	p := pull(t)
	for name, damage := range map[string]func(s *Store, m *machinetest.Machine) error{
		"the import fails": func(_ *Store, m *machinetest.Machine) error {
			m.Step = func(name string) error {
				if name == "images are imported" {
					return errors.New("no space left on device")
				}
				return nil
			}
			return nil
		},
		"the list of an interrupted renewal is no JSON": func(s *Store, _ *machinetest.Machine) error {
			return errors.Join(os.MkdirAll(s.on(kept+"/blobs/sha256"), 0o700), os.WriteFile(s.on(kept+"/index.json"), []byte("{"), 0o600))
		},
		"the list of an interrupted renewal is missing": func(s *Store, _ *machinetest.Machine) error {
			return os.MkdirAll(s.on(kept+"/blobs/sha256"), 0o700)
		},
	} {
		s, m, _ := rebooted(t, p)
		if err := damage(&s, m); err != nil {
			t.Fatal(err)
		}
		if err := s.Renew(t.Context()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		m.Step = nil
		if got := s.list(t); len(got) != 0 || !m.Running(machine.UnitContainerd) {
			t.Errorf("%s: %q", name, got)
		}
		if _, err := os.Lstat(s.on(kept)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// containerd answers only when it has read its database.
func TestContainerdIsAskedUntilItAnswers(t *testing.T) {
	p := pull(t)
	s, m, _ := rebooted(t, p)
	asked := 0
	m.Step = func(name string) error {
		if name == "images are listed" {
			if asked++; asked < 3 {
				return errors.New("server is not initialized yet")
			}
		}
		return nil
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); !slices.Equal(got, p.names()) {
		t.Errorf("%q", got)
	}
}
