//go:build vm

package vm

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/muster-k8s/muster/internal/versions"
)

// A machine reaches no registry, and runs the container images of its verified root (docs/air-gap.md, B9).
func TestAMachineWithoutARegistryRunsTheImagesOfItsRoot(t *testing.T) {
	w := bringUp(t)
	image := w.closedImage(t, versions.Pause, versions.Proxy, "podnet", "echo")
	w.policy(t, 9, "closed.yaml", w.image, image)
	w.Muster(t, "policy", "apply", "closed.yaml")
	v := w.worker("node7")
	v.Image = image
	boot := w.join(t, v, node7)
	marker := w.mark(t, "node7")
	w.boot(t, "node7", image)
	w.ready(t, "node7", boot)
	if got := w.pod(t, "node7", "read", "cat", markerFile); got != marker {
		t.Errorf("the marker is %q, want %q", got, marker)
	}
	t.Log(w.shell(t, "node7", "images", "/usr/bin/ctr -n k8s.io images ls -q"))
}

// closedImage builds an image for machines without a registry, with these container images in its root.
func (w *fixture) closedImage(t *testing.T, names ...string) string {
	t.Helper()
	add := t.TempDir()
	hosts := filepath.Join(add, "etc", "containerd", "certs.d", "_default", "hosts.toml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(hosts), 0o755), os.WriteFile(hosts, []byte("[host.\"http://192.168.77.254:9\"]\n  capabilities = [\"pull\", \"resolve\"]\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	image, _, err := w.buildImage(t, "-add", add, "-images", w.layout(t, names...))
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// layout makes an OCI image layout of some of the lab's and of Muster's images.
func (w *fixture) layout(t *testing.T, names ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(w.Dir, "lab.json"))
	if err != nil {
		t.Fatal(err)
	}
	var lab struct {
		Layouts []string `json:"layouts"`
	}
	if err := json.Unmarshal(b, &lab); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	to, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lab.Layouts {
		from, err := layout.ImageIndexFromPath(l)
		if err != nil {
			t.Fatal(err)
		}
		all, err := from.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all.Manifests {
			ref := d.Annotations["io.containerd.image.name"]
			named := func(n string) bool { return strings.Contains(ref, "/"+n+":") }
			if !slices.ContainsFunc(names, named) {
				continue
			}
			img, err := from.Image(d.Digest)
			if err == nil {
				err = to.AppendImage(img, layout.WithAnnotations(d.Annotations))
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s has %s", dir, ref)
			names = slices.DeleteFunc(names, named)
		}
	}
	if len(names) > 0 {
		t.Fatalf("the lab has no image %q", names)
	}
	return dir
}
