package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// nonRoot is the user of the image. The chart sets another where a root-owned file must be read.
const nonRoot = "65532:65532"

// imageSpec describes an image.
type imageSpec struct {
	Name       string // without tag and digest
	Tag        string
	Revision   string // Git commit, may be empty
	Binaries   []platformBinary
	Entrypoint string // absolute path of the binary in the image
}

// platformBinary has the static binaries of one architecture: that of the entry point, and that of /probe.
type platformBinary struct{ Arch, Path, Probe string }

// machines are the ELF machines of the architectures.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// buildImage returns an image of one layer with two files. It does not depend on the time or the place of the build.
func buildImage(spec imageSpec, from platformBinary) (v1.Image, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, f := range []struct{ from, to string }{{from.Path, spec.Entrypoint}, {from.Probe, "/probe"}} {
		binary, err := os.ReadFile(f.from)
		if err != nil {
			return nil, err
		}
		if err := checkStatic(binary, from.Arch); err != nil {
			return nil, fmt.Errorf("%s: %w", f.from, err)
		}
		if err := putFile(w, strings.TrimPrefix(f.to, "/"), 0o555, binary); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	opener := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil }
	compressed, err := tarball.LayerFromOpener(opener, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img, err = mutate.AppendLayers(img, compressed)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", from.Arch
	config.Created = v1.Time{Time: time.Unix(0, 0).UTC()}
	for i := range config.History {
		config.History[i].Created = config.Created
	}
	config.Config = v1.Config{
		Entrypoint: []string{spec.Entrypoint},
		User:       nonRoot,
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":    filepath.Base(spec.Entrypoint),
			"org.opencontainers.image.source":   "https://github.com/muster-k8s/muster",
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.version":  spec.Tag,
			"org.opencontainers.image.revision": spec.Revision,
		},
	}
	return mutate.ConfigFile(img, config)
}

// checkStatic refuses a binary that could not start on this architecture, in an image without other files.
func checkStatic(binary []byte, arch string) error {
	f, err := elf.NewFile(bytes.NewReader(binary))
	if err != nil {
		return fmt.Errorf("want a Linux binary: %w", err)
	}
	want, known := machines[arch]
	if !known {
		return fmt.Errorf("the architecture is amd64 or arm64, not %q", arch)
	}
	if f.Machine != want {
		return fmt.Errorf("it is for %s, not for %s", f.Machine, arch)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("it needs a dynamic linker: build it with CGO_ENABLED=0")
		}
	}
	return nil
}

// writeImage writes the image as an OCI image layout in a tar (OCI Image Format, image-layout) and returns its
// reference by digest.
func writeImage(spec imageSpec, path string) (string, error) {
	archive, ref, err := ociArchive(spec)
	if err != nil {
		return "", err
	}
	// By rename: a concurrent reader sees the old archive or the new one.
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, archive, 0o644); err != nil {
		return "", err
	}
	return ref, os.Rename(tmp, path)
}

// blobsOf returns the manifest's descriptor of an image, and all its blobs, the manifest first.
func blobsOf(img v1.Image, arch string) (v1.Descriptor, [][]byte, error) {
	manifest, err := img.RawManifest()
	if err != nil {
		return v1.Descriptor{}, nil, err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return v1.Descriptor{}, nil, err
	}
	blobs := [][]byte{manifest, config}
	layers, err := img.Layers()
	if err != nil {
		return v1.Descriptor{}, nil, err
	}
	for _, l := range layers {
		r, err := l.Compressed()
		if err != nil {
			return v1.Descriptor{}, nil, err
		}
		b, err := io.ReadAll(r)
		if err != nil {
			return v1.Descriptor{}, nil, err
		}
		blobs = append(blobs, b)
	}
	d := describe(types.OCIManifestSchema1, manifest)
	d.Platform = &v1.Platform{OS: "linux", Architecture: arch}
	return d, blobs, nil
}

func describe(kind types.MediaType, content []byte) v1.Descriptor {
	return v1.Descriptor{MediaType: kind, Size: int64(len(content)), Digest: v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%x", sha256.Sum256(content))}}
}

func ociArchive(spec imageSpec) ([]byte, string, error) {
	var blobs [][]byte
	var images []v1.Descriptor
	for _, from := range spec.Binaries {
		img, err := buildImage(spec, from)
		if err != nil {
			return nil, "", err
		}
		d, more, err := blobsOf(img, from.Arch)
		if err != nil {
			return nil, "", err
		}
		images, blobs = append(images, d), append(blobs, more...)
	}
	desc := images[0]
	if len(images) > 1 {
		index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: images})
		if err != nil {
			return nil, "", err
		}
		desc, blobs = describe(types.OCIImageIndex, index), append(blobs, index)
	}
	byDigest := spec.Name + "@" + desc.Digest.String()
	// Listed twice: containerd assigns the names that it finds here to an imported image, and serves a pod's image by
	// digest from the node only if the image has that name.
	top, err := json.Marshal(v1.IndexManifest{
		SchemaVersion: 2, MediaType: types.OCIImageIndex,
		Manifests: []v1.Descriptor{named(desc, spec.Name+":"+spec.Tag, spec.Tag), named(desc, byDigest, "")},
	})
	if err != nil {
		return nil, "", err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := putFile(w, "oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return nil, "", err
	}
	if err := putFile(w, "index.json", 0o644, top); err != nil {
		return nil, "", err
	}
	for _, b := range blobs {
		if err := putFile(w, fmt.Sprintf("blobs/sha256/%x", sha256.Sum256(b)), 0o644, b); err != nil {
			return nil, "", err
		}
	}
	err = w.Close() // it writes the end of the archive
	return out.Bytes(), byDigest, err
}

// named returns a copy of d with the name that containerd reads, and the tag that others do.
func named(d v1.Descriptor, containerd, tag string) v1.Descriptor {
	d.Annotations = map[string]string{"io.containerd.image.name": containerd}
	if tag != "" {
		d.Annotations["org.opencontainers.image.ref.name"] = tag
	}
	return d
}

func putFile(w *tar.Writer, name string, mode int64, content []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content)), ModTime: time.Unix(0, 0), Format: tar.FormatUSTAR}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}
