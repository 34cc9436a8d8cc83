package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
)

// some is an image for two architectures, and the one of linux/amd64 by itself.
func some(t *testing.T, architectures ...string) (all v1.ImageIndex, ours v1.Image) {
	t.Helper()
	all = empty.Index
	for _, a := range architectures {
		img, err := random.Image(300, 2)
		if err != nil {
			t.Fatal(err)
		}
		all = mutate.AppendManifests(all, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: a}}})
		if a == "amd64" {
			ours = img
		}
	}
	return all, ours
}

func named(n string) layout.Option {
	return layout.WithAnnotations(map[string]string{nameAnnotation: n})
}

// stored makes a layout, and returns the part that goes into the root.
func stored(t *testing.T, fill func(layout.Path) error, change func(dir string)) (tree, error) {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err == nil {
		err = fill(p)
	}
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(dir)
	}
	out := tree{}
	return out, out.images(dir)
}

// B9: the layout that is loaded at a boot names each image by registry, repository and digest, and contains only its
// part for linux/amd64.
func TestImagesOfTheRootAreThoseOfThisArchitectureByDigest(t *testing.T) {
	all, ours := some(t, "arm64", "amd64")
	alone, err := random.Image(200, 1)
	if err != nil {
		t.Fatal(err)
	}
	got, err := stored(t, func(p layout.Path) error {
		if err := p.AppendIndex(all, named("registry.k8s.io/kube-proxy:v1.36.0")); err != nil {
			return err
		}
		return p.AppendImage(alone, named("registry.inside:5000/muster/kms"))
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"", "/blobs", "/blobs/sha256", "/index.json", "/oci-layout"}
	digest := func(h v1.Hash, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, "/blobs/sha256/"+h.Hex)
		return h.String()
	}
	index, single := digest(all.Digest()), digest(alone.Digest())
	digest(ours.Digest())
	for _, img := range []v1.Image{ours, alone} {
		digest(img.ConfigName())
		layers, err := img.Layers()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range layers {
			digest(l.Digest())
		}
	}
	var have []string
	for n, e := range got {
		if rest, ok := strings.CutPrefix(n, imagesFolder); ok {
			have = append(have, rest)
		}
		if n == imagesFolder+"/index.json" {
			var m v1.IndexManifest
			if err := json.Unmarshal(e.content, &m); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, d := range m.Manifests {
				names = append(names, d.Annotations[containerdAnnotation])
			}
			if want := []string{"registry.k8s.io/kube-proxy@" + index, "registry.k8s.io/kube-proxy:v1.36.0", "registry.inside:5000/muster/kms@" + single}; !slices.Equal(names, want) {
				t.Errorf("containerd has %q, want %q", names, want)
			}
		}
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		t.Errorf("the root has %q, want %q", have, want)
	}
}

func TestALayoutThatIsNotWholeIsRefused(t *testing.T) {
	all, ours := some(t, "arm64", "amd64")
	foreign, _ := some(t, "arm64")
	config, err := ours.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	blob := func(dir string) string { return filepath.Join(dir, "blobs", "sha256", config.Hex) }
	add := func(i v1.ImageIndex, n string) func(layout.Path) error {
		return func(p layout.Path) error { return p.AppendIndex(i, named(n)) }
	}
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		fill   func(layout.Path) error
		change func(dir string)
		want   string
	}{
		"no name":                   {add(all, ""), nil, "skopeo copy --all"},
		"a name without a registry": {add(all, "kms"), nil, "skopeo copy --all"},
		"another architecture":      {add(foreign, "registry.k8s.io/etcd"), nil, "no image for linux/amd64"},
		"a blob that was changed":   {add(all, "registry.k8s.io/etcd"), func(dir string) { must(os.WriteFile(blob(dir), []byte("{}"), 0o600)) }, "copy the image again"},
		"a blob that is missing":    {add(all, "registry.k8s.io/etcd"), func(dir string) { must(os.Remove(blob(dir))) }, "copy the image with --all"},
		"no layout":                 {add(all, "registry.k8s.io/etcd"), func(dir string) { must(os.Remove(filepath.Join(dir, "index.json"))) }, "OCI image layout"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := stored(t, tt.fill, tt.change); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}
