// Package oci makes container images out of static binaries, without a container
// engine, and hands image layouts to a registry.
//
// Layers are uncompressed: they travel over a veth and are unpacked on the same
// machine, where gzip would only cost time. The same inputs give the same digests.
package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/muster-k8s/muster/lab/internal/kube"
)

// RefAnnotation names an image in a layout's index, with registry and tag or digest: the
// annotation that containerd reads on import.
const RefAnnotation = "io.containerd.image.name"

// The lab's own images.
const (
	PodnetRef = "lab.muster.dev/podnet:v1"
	EchoRef   = "lab.muster.dev/echo:v1"
)

// An Image is one image to make: files (path in the image → path here) and what to run.
type Image struct {
	Ref        string
	Entrypoint []string
	Files      map[string]string
	Version    string            // the label org.opencontainers.image.version: without it, two releases that share a program would share the image
	Sums       map[string]string // SHA-256 (hex) of files whose hash is known already, by path here
}

// Images lists what a cluster of a release pulls. Etcd and CoreDNS are programs of the current release.
func Images(b, current kube.Build, tools string) ([]Image, error) {
	const r = "registry.k8s.io/"
	tags := b.Release
	images := []Image{
		{Ref: r + "pause:" + tags.PauseTag, Version: tags.PauseTag, Entrypoint: []string{"/pause"}, Files: map[string]string{"/pause": filepath.Join(tools, "pause")}},
		{Ref: r + "etcd:" + tags.EtcdTag, Version: tags.EtcdTag, Files: map[string]string{"/usr/local/bin/etcd": current.Path("etcd"), "/usr/local/bin/etcdctl": filepath.Join(tools, "etcdctl")}},
		{Ref: r + "coredns/coredns:" + tags.CoreDNSTag, Version: tags.CoreDNSTag, Entrypoint: []string{"/coredns"}, Files: map[string]string{"/coredns": current.Path("coredns")}},
		{Ref: PodnetRef, Entrypoint: []string{"/podnet"}, Files: map[string]string{"/podnet": filepath.Join(tools, "podnet")}},
		{Ref: EchoRef, Entrypoint: []string{"/echo"}, Files: map[string]string{"/echo": filepath.Join(tools, "echo")}},
	}
	for _, p := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"} {
		images = append(images, Image{Ref: r + p + ":" + tags.Version, Version: tags.Version, Files: map[string]string{"/usr/local/bin/" + p: b.Path(p)}})
	}
	known := map[string]string{} // 700 MB need not be hashed again for the cache's key
	for _, build := range []kube.Build{b, current} {
		for p, sum := range build.Sums {
			known[build.Path(p)] = sum
		}
	}
	for i := range images {
		images[i].Sums = known
	}
	// kube-proxy's nftables mode runs nft: Debian's, with the libraries it is linked to.
	proxy := images[len(images)-1].Files
	const nft = "/usr/sbin/nft"
	libs, err := sharedLibraries(nft)
	if err != nil {
		return nil, err
	}
	// nft lists the protocols of rules by the names in /etc/protocols. By number, a kube-proxy that has started again would
	// remove its own rules as foreign ones.
	for _, f := range append(libs, nft, "/etc/protocols") {
		proxy[f] = f
	}
	return images, nil
}

var lddLine = regexp.MustCompile(`(?m)(?:=> )?(/\S+) \(0x`)

func sharedLibraries(program string) ([]string, error) {
	out, err := exec.Command("ldd", program).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w: %s", program, err, out)
	}
	var libs []string
	for _, m := range lddLine.FindAllStringSubmatch(string(out), -1) {
		libs = append(libs, m[1])
	}
	return libs, nil
}

// Layout returns an OCI image layout with these images, from the cache if one of the
// same content is there, and the content's name.
func Layout(ctx context.Context, images []Image, cache string) (dir, id string, err error) {
	id, err = identify(images)
	if err != nil {
		return "", "", err
	}
	dir = filepath.Join(cache, "images", id)
	if _, err := os.Stat(filepath.Join(dir, "index.json")); err == nil {
		return dir, id, kube.Used(dir)
	}
	unlock, err := kube.Lock(filepath.Join(cache, "images"))
	if err != nil {
		return "", "", err
	}
	defer unlock()
	if _, err := os.Stat(filepath.Join(dir, "index.json")); err == nil {
		return dir, id, nil
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "building-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(tmp)
	l, err := layout.Write(tmp, empty.Index)
	if err != nil {
		return "", "", err
	}
	for _, im := range images {
		if err := ctx.Err(); err != nil {
			return "", "", err
		}
		img, err := im.build()
		if err != nil {
			return "", "", fmt.Errorf("image %s: %w", im.Ref, err)
		}
		if err := l.AppendImage(img, layout.WithAnnotations(map[string]string{RefAnnotation: im.Ref})); err != nil {
			return "", "", fmt.Errorf("image %s: %w", im.Ref, err)
		}
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", "", err
	}
	return dir, id, errors.Join(os.Rename(tmp, dir), kube.Prune(filepath.Dir(dir)))
}

func identify(images []Image) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "names in %s\n", RefAnnotation) // a layout that is written in another way has another name
	for _, im := range images {
		fmt.Fprintf(h, "image %q %q %q\n", im.Ref, im.Version, im.Entrypoint)
		for _, dst := range sorted(im.Files) {
			sum := im.Sums[im.Files[dst]]
			if sum == "" {
				var err error
				if sum, err = kube.Sum(im.Files[dst]); err != nil {
					return "", err
				}
			}
			fmt.Fprintf(h, "%q %s\n", dst, sum)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16]), nil
}

func (im Image) build() (v1.Image, error) {
	layer, err := im.layer()
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1),
		static.NewLayer(layer, types.OCIUncompressedLayer))
	if err != nil {
		return nil, err
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", "amd64"
	cf.Config.Entrypoint = im.Entrypoint
	if im.Version != "" {
		cf.Config.Labels = map[string]string{"org.opencontainers.image.version": im.Version}
	}
	cf.Config.Env = []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/"}
	return mutate.ConfigFile(img, cf)
}

func (im Image) layer() ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	made := map[string]bool{"/": true}
	var mkdir func(string, int64) error
	mkdir = func(d string, mode int64) error {
		if made[d] {
			return nil
		}
		made[d] = true
		if err := mkdir(path.Dir(d), 0o755); err != nil {
			return err
		}
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d[1:] + "/", Mode: mode, ModTime: time.Unix(0, 0)})
	}
	if err := mkdir("/tmp", 0o1777); err != nil {
		return nil, err
	}
	if err := mkdir("/etc", 0o755); err != nil {
		return nil, err
	}
	for _, dst := range sorted(im.Files) {
		if err := mkdir(path.Dir(dst), 0o755); err != nil {
			return nil, err
		}
		b, err := os.ReadFile(im.Files[dst])
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: dst[1:], Mode: 0o755, Size: int64(len(b)), ModTime: time.Unix(0, 0)}); err != nil {
			return nil, err
		}
		if _, err := w.Write(b); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// Refs lists the references of the images in a layout.
func Refs(dir string) ([]string, error) {
	descs, _, err := open(dir)
	if err != nil {
		return nil, err
	}
	var refs []string
	for _, d := range descs {
		refs = append(refs, refOf(d))
	}
	return refs, nil
}

// Digests returns those images of a layout whose paths end in one of names, as NAME:TAG@DIGEST.
func Digests(dir string, names []string) ([]string, error) {
	descs, _, err := open(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, d := range descs {
		repository, _, _ := strings.Cut(refOf(d), ":") // the lab's registries have no port
		if slices.Contains(names, path.Base(repository)) {
			out = append(out, refOf(d)+"@"+d.Digest.String())
		}
	}
	return out, nil
}

// Push puts each image of a layout into the registry at host, under its repository path
// without its own registry's name, and its tag or digest.
func Push(ctx context.Context, dir, host string) error {
	descs, l, err := open(dir)
	if err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone() // its own: no connection stays open behind it
	defer transport.CloseIdleConnections()
	options := []remote.Option{remote.WithContext(ctx), remote.WithTransport(transport)}
	for _, d := range descs {
		to, err := target(refOf(d), host)
		if err != nil {
			return fmt.Errorf("image layout %s: %w", dir, err)
		}
		var push func() error
		if d.MediaType.IsIndex() {
			ix, err := l.ImageIndex(d.Digest)
			if err != nil {
				return fmt.Errorf("image layout %s: %w", dir, err)
			}
			push = func() error { return remote.WriteIndex(to, ix, options...) }
		} else {
			img, err := l.Image(d.Digest)
			if err != nil {
				return fmt.Errorf("image layout %s: %w", dir, err)
			}
			push = func() error { return remote.Write(to, img, options...) }
		}
		if err := push(); err != nil {
			return fmt.Errorf("push %s: %w", refOf(d), err)
		}
	}
	return nil
}

// target names an image in the registry at host.
func target(ref, host string) (name.Reference, error) {
	from, err := name.ParseReference(ref)
	if err != nil {
		return nil, err
	}
	// Docker's default name space is not part of the path in a reference.
	repo := host + "/" + strings.TrimPrefix(from.Context().RepositoryStr(), "library/")
	if _, ok := from.(name.Digest); ok {
		return name.NewDigest(repo+"@"+from.Identifier(), name.Insecure)
	}
	return name.NewTag(repo+":"+from.Identifier(), name.Insecure)
}

func open(dir string) ([]v1.Descriptor, v1.ImageIndex, error) {
	l, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("image layout: %w", err)
	}
	m, err := l.IndexManifest()
	if err != nil {
		return nil, nil, fmt.Errorf("image layout %s: %w", dir, err)
	}
	for _, d := range m.Manifests {
		if refOf(d) == "" {
			return nil, nil, fmt.Errorf("image layout %s: image %s has no annotation %s: name each image in it", dir, d.Digest, RefAnnotation)
		}
	}
	return m.Manifests, l, nil
}

// refOf returns an image's full name: containerd's annotation, which others may shorten to the
// tag in RefAnnotation.
func refOf(d v1.Descriptor) string {
	if full := d.Annotations["io.containerd.image.name"]; full != "" {
		return full
	}
	return d.Annotations[RefAnnotation]
}

func sorted(m map[string]string) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
