package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const (
	// imagesFolder is an OCI image layout in the root. The unit muster-images loads it into containerd at each boot.
	imagesFolder = "usr/share/muster/images"
	// nameAnnotation has the name of an image in a layout (OCI Image Format Specification 1.1, annotations.md); containerdAnnotation is what containerd writes
	// instead, and the name by which it then has the image.
	nameAnnotation       = "org.opencontainers.image.ref.name"
	containerdAnnotation = "io.containerd.image.name"
)

// images adds the container images of an OCI image layout (OCI Image Format Specification 1.1, image-layout.md): for
// each the parts for linux/amd64, compared with its digest. Machines have them as NAME@DIGEST, and as NAME:TAG if the
// layout has a tag, also without a registry (B9).
func (t tree) images(dir string) error {
	layout := imageLayout{dir: dir, into: t}
	text, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		return fmt.Errorf("OCI image layout: %w", err)
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("%s/index.json: %w", dir, err)
	}
	out := v1.IndexManifest{SchemaVersion: 2, MediaType: index.MediaType, Manifests: []v1.Descriptor{}}
	for _, d := range index.Manifests {
		names, err := namesOf(d)
		if err != nil {
			return fmt.Errorf("image %s of %s: %w: copy it with registry and repository as its name, for example `skopeo copy --all --preserve-digests docker://registry.k8s.io/pause@%s oci:%s:registry.k8s.io/pause`",
				d.Digest, dir, err, d.Digest, dir)
		}
		if err := layout.copy(d); err != nil {
			return fmt.Errorf("image %s of %s: %w", names[0], dir, err)
		}
		for _, n := range names {
			d.Annotations = map[string]string{containerdAnnotation: n}
			out.Manifests = append(out.Manifests, d)
		}
	}
	if text, err = json.Marshal(out); err != nil {
		return err
	}
	t.file(path.Join(imagesFolder, "index.json"), 0o644, text)
	t.file(path.Join(imagesFolder, "oci-layout"), 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`))
	for _, d := range []string{"usr/share/muster", imagesFolder, imagesFolder + "/blobs", imagesFolder + "/blobs/sha256"} {
		t.dir(d)
	}
	return nil
}

// namesOf returns the names of an image in containerd: with its digest, then with its tag if there is one.
func namesOf(d v1.Descriptor) ([]string, error) {
	given := cmp.Or(d.Annotations[containerdAnnotation], d.Annotations[nameAnnotation])
	given, _, _ = strings.Cut(given, "@")
	// The names stay unchanged: the library's name for docker.io differs from the kubelet's.
	if tag, err := name.NewTag(given, name.StrictValidation); err == nil {
		return []string{strings.TrimSuffix(given, ":"+tag.TagStr()) + "@" + d.Digest.String(), given}, nil
	}
	if _, err := name.NewRepository(given, name.StrictValidation); err != nil {
		return nil, fmt.Errorf("its name in the layout is %q: %w", given, err)
	}
	return []string{given + "@" + d.Digest.String()}, nil
}

type imageLayout struct {
	dir  string
	into tree
}

// copy adds a manifest or an index, with everything that it needs.
func (l imageLayout) copy(d v1.Descriptor) error {
	text, err := l.blob(d)
	if err != nil {
		return err
	}
	if d.MediaType.IsIndex() {
		index, err := v1.ParseIndexManifest(bytes.NewReader(text))
		if err != nil {
			return fmt.Errorf("index %s: %w", d.Digest, err)
		}
		for _, m := range index.Manifests {
			if m.MediaType.IsImage() && m.Platform != nil && m.Platform.OS == "linux" && m.Platform.Architecture == "amd64" {
				return l.copy(m)
			}
		}
		return fmt.Errorf("index %s has no image for linux/amd64", d.Digest)
	}
	if !d.MediaType.IsImage() {
		return fmt.Errorf("%s is %q, want an image or an index of images", d.Digest, d.MediaType)
	}
	manifest, err := v1.ParseManifest(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("manifest %s: %w", d.Digest, err)
	}
	for _, b := range append(manifest.Layers, manifest.Config) {
		if _, err := l.blob(b); err != nil {
			return err
		}
	}
	return nil
}

// blob adds a blob, and returns it.
func (l imageLayout) blob(d v1.Descriptor) ([]byte, error) {
	if d.Digest.Algorithm != "sha256" {
		return nil, fmt.Errorf("%s: want a SHA-256", d.Digest)
	}
	b, err := os.ReadFile(filepath.Join(l.dir, "blobs", "sha256", d.Digest.Hex))
	if err != nil {
		return nil, fmt.Errorf("%w: copy the image with --all", err)
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != d.Digest.Hex { // S1
		return nil, fmt.Errorf("blob %s has SHA-256 %x: copy the image again", d.Digest, sum)
	}
	l.into.file(path.Join(imagesFolder, "blobs", "sha256", d.Digest.Hex), 0o644, b)
	return b, nil
}
