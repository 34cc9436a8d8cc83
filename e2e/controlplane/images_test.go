package controlplane

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// B9: the operator of the registry moves every tag of Kubernetes' images to other programs. A control plane and a
// worker start the images that the owner listed, and none of the others.
func TestMovedTagsAtTheMirrorRunNothing(t *testing.T) {
	c := &cluster{Cluster: labtest.UpEmpty(t, "muster-tags"), planes: 1}
	t.Cleanup(func() {
		if t.Failed() {
			c.logs(t)
		}
	})
	text, err := os.ReadFile(filepath.Join(c.OwnerDir(), "components.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	list, err := versions.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	listed, err := versions.ParseImages(list.Images)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(filepath.Join(c.Dir, "tools", "pause"))
	if err != nil {
		t.Fatal(err)
	}
	hostile := map[string]string{} // digest → name
	for name, image := range listed {
		img := hostileImage(t, name, program)
		d, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		hostile[d.String()] = name
		ref := image.Repository + ":" + image.Tag
		if err := l.AppendImage(img, layout.WithAnnotations(map[string]string{"io.containerd.image.name": ref})); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Push(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	// The tag now refers to it.
	first := c.First(t)
	c.Add(t, first, driver.Node{Name: node(2), JoinEndpoints: []string{labtest.Joinservice}})
	moved := listed[versions.Pause]
	tag := moved.Repository + ":" + moved.Tag
	c.Must(t, node(2), "", "ctr", "-n", "attack", "images", "pull", "--hosts-dir", "/etc/containerd/certs.d", tag)
	if out := c.Must(t, node(2), "", "ctr", "-n", "attack", "images", "ls"); strings.Contains(out, moved.Digest) {
		t.Fatalf("the mirror's tag was not moved: %s", out)
	}

	c.Init(t, "planes")
	c.ready(t, node(1), node(2))
	labtest.Eventually(t, c.servicesEverywhere)
	labtest.Eventually(t, func(ctx context.Context) error { return c.RunsListed(ctx, listed, 1, 2) })
	for _, n := range []string{node(1), node(2)} {
		out := c.Must(t, n, "", "ctr", "-n", "k8s.io", "images", "ls")
		for digest, name := range hostile {
			if strings.Contains(out, digest) {
				t.Errorf("%s has pulled the hostile %s:\n%s", n, name, out)
			}
		}
		pause := c.Must(t, n, "", "ctr", "-n", "k8s.io", "containers", "ls")
		if !strings.Contains(pause, moved.Digest) {
			t.Errorf("%s: pods' sandboxes are not the listed image:\n%s", n, pause)
		}
	}
}

// hostileImage runs a program of the attacker's at the path of the genuine one.
func hostileImage(t *testing.T, name string, program []byte) v1.Image {
	t.Helper()
	at := "usr/local/bin/" + name
	if name == versions.Pause || name == versions.CoreDNS {
		at = name
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: at, Mode: 0o755, Size: int64(len(program))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(program); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Config.Entrypoint = "linux", "amd64", []string{"/" + path.Clean(at)}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}
