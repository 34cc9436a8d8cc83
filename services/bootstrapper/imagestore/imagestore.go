// Package imagestore renews containerd's store at a boot: of what lies on the state disk, only content with the SHA-256 that it is named by is kept (B8).
package imagestore

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

const (
	// Folder is containerd's store.
	Folder = "/var/lib/containerd"
	// blobs is where containerd has content inside of its store: a file for each SHA-256.
	blobs = "io.containerd.content.v1.content/blobs"
	// kept is an OCI image layout inside of the store while it is renewed: a boot that is interrupted leaves it to the next one.
	kept = "muster-kept"
	// done is what kept is renamed to once containerd has its images.
	done = "muster-done"
	// networks has the addresses of pods that ran before the reboot, and settings by which a network plugin would remove them. The new store knows of
	// none of these pods.
	networks = "/var/lib/cni"
	// nameAnnotation is the name under which containerd imports an image.
	nameAnnotation = "io.containerd.image.name"
	// maxManifest is the largest manifest or index of an image that is kept, in bytes. Registries and containerd take more, but a user of the cluster could
	// have one pulled that takes all of this program's memory at each boot.
	maxManifest = 1 << 20
	// maxParts is the largest number of manifests of an index that are read; there is one for each platform, and the same one may be named again and again.
	maxParts = 100
	// maxNames is the largest number of names that are kept, maxIndex the largest list of them in bytes.
	maxNames, maxIndex = 8192, 8 << 20
	// listTime is how long containerd gets to list its images: if its database is damaged, it never does.
	listTime = 2 * time.Minute
	// importTime is how long containerd gets to import an image.
	importTime = 15 * time.Minute
)

// Store is containerd's store on one machine.
type Store struct {
	Root    string // of the file system
	Machine machine.Machine
	Socket  string        // containerd's, as a unix:// URL
	Pause   time.Duration // before containerd is asked again for its images
	Log     *slog.Logger
	// Found is called once if content did not match its digest.
	Found func(what, done string)

	open func(name string) (io.ReadCloser, error) // nil: os.Open; tests replace it by a disk with errors
}

// Renew stops containerd, removes everything from its store except content that matches its digest, and starts it with the complete images.
// containerd's database and the unpacked layers are not used again: an attacker with root could have changed both, and containerd verifies neither.
//
// Images keep the names that contain their digest. A name with a tag is not kept, because its digest is not proven: the kubelet asks the registry for
// the tag, and downloads missing layers. Layers are unpacked again when a container needs them.
//
// It reads the kept content twice and writes it once, and deletes the unpacked layers before. So the disk needs room for the kept images a second
// time. Images that containerd does not import are not kept, for instance because containerd is missing. An image whose manifest has more than 1 MiB,
// or one with more than 100 manifests, is not kept, nor more than 8,192 names. It may only be called before a container runs in this boot.
func (s Store) Renew(ctx context.Context) error {
	for _, folder := range []string{"io.containerd.content.v1.content", blobs, blobs + "/sha256", kept, kept + "/blobs", kept + "/blobs/sha256"} {
		if err := removeUnlessFolder(s.on(folder)); err != nil {
			return err
		}
	}
	if _, err := os.Lstat(s.on(kept + "/blobs")); errors.Is(err, fs.ErrNotExist) {
		if err := s.moveAway(ctx); err != nil {
			return err
		}
	} else if err != nil {
		return err
	} else if err := s.Machine.Unit(ctx, "stop", machine.UnitContainerd); err != nil {
		return err
	}
	err := errors.Join(
		removeOthers(s.on(""), kept),
		removeUnlessFolder(filepath.Join(s.Root, networks)),
		tree.Empty(filepath.Join(s.Root, networks)),
	)
	if err != nil {
		return err
	}
	images, err := s.verify(ctx)
	if err != nil {
		return err
	}
	if err := s.Machine.Unit(ctx, "start", machine.UnitContainerd); err != nil {
		return err
	}
	if err := s.load(ctx, images); err != nil { // the next boot continues
		return err
	}
	// A power cut while kept is removed must not leave a part of it, with which the next boot would replace the complete store.
	if err := errors.Join(os.Rename(s.on(kept), s.on(done)), machine.Sync(s.on(""))); err != nil {
		return err
	}
	return tree.RemoveAll(s.on(done))
}

// removeUnlessFolder removes what is in the place of a folder, such as a link.
func removeUnlessFolder(at string) error {
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.IsDir() {
		return nil
	}
	if err != nil {
		return err
	}
	return os.Remove(at)
}

// removeOthers removes everything in a folder but one entry.
func removeOthers(folder, keep string) error {
	return tree.Each(folder, func(at string, e fs.DirEntry) error {
		if e.Name() == keep {
			return nil
		}
		return tree.RemoveAll(at) // pods have written in there
	})
}

func (s Store) on(name string) string { return filepath.Join(s.Root, Folder, name) }

// moveAway stops containerd, and makes its content and the names of its images an OCI image layout.
func (s Store) moveAway(ctx context.Context) error {
	names, err := s.names(ctx)
	if ctx.Err() != nil {
		return err
	}
	if err != nil {
		s.Log.WarnContext(ctx, "containerd does not list its images: none is kept, and the kubelet pulls them again", "err", err)
	}
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{}}
	for _, name := range names[:min(len(names), maxNames)] {
		_, digest, _ := strings.Cut(name, "@")
		if h, err := v1.NewHash(digest); err == nil && h.Algorithm == "sha256" {
			index.Manifests = append(index.Manifests, v1.Descriptor{Digest: h, Annotations: map[string]string{nameAnnotation: name}})
		}
	}
	if err := tree.RemoveAll(s.on(kept)); err != nil {
		return err
	}
	if err := s.writeIndex(index); err != nil {
		return err
	}
	if err := s.Machine.Unit(ctx, "stop", machine.UnitContainerd); err != nil {
		return err
	}
	err = os.Rename(s.on(blobs), s.on(kept+"/blobs"))
	if errors.Is(err, fs.ErrNotExist) { // containerd has never had an image
		return os.MkdirAll(s.on(kept+"/blobs/sha256"), 0o700)
	}
	if err != nil {
		return err
	}
	return machine.Sync(s.on(kept))
}

// names returns the names of containerd's images that contain a digest. They are not to be trusted.
func (s Store) names(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	backoff := retry.Backoff{Min: s.Pause, Max: 5 * time.Second}
	for {
		names, err := s.Machine.ImageNames(ctx, s.Socket)
		if err == nil {
			return names, nil
		}
		if werr := retry.Wait(ctx, backoff.Next(0)); werr != nil { // containerd answers with an error until it has read its database
			return nil, err
		}
	}
}

func (s Store) writeIndex(index v1.IndexManifest) error {
	text, err := json.Marshal(index)
	if err != nil {
		return err
	}
	return machine.WriteFile(s.on(kept+"/index.json"), text, 0o600, 0o700)
}

// verify removes all blobs from the layout that differ from their names, and incomplete images from its index. It returns the images that are left.
func (s Store) verify(ctx context.Context) ([]content, error) {
	folder := s.on(kept + "/blobs/sha256")
	if _, err := os.Lstat(folder); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	have, wrong := map[string]bool{}, 0
	err := tree.Each(folder, func(at string, f fs.DirEntry) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		sum := ""
		if whole, err := isWhole(at); err != nil {
			return err
		} else if whole {
			if sum, err = s.sumOf(at); err != nil { // of a sector that can't be read, each boot would fail again
				s.Log.WarnContext(ctx, "content of a container image can't be read, and is removed", "file", at, "err", err)
			}
		}
		if sum == f.Name() {
			have[f.Name()] = true
			return nil
		}
		wrong++
		return tree.RemoveAll(at)
	})
	if err != nil {
		return nil, err
	}
	if wrong > 0 {
		s.Found(Folder+"/"+blobs, fmt.Sprintf("%d of %d files removed, since each is named by its SHA-256, and theirs differ", wrong, wrong+len(have)))
	}
	var index struct {
		Manifests []struct {
			Digest      string            `json:"digest"`
			Annotations map[string]string `json:"annotations"`
		} `json:"manifests"`
	}
	text, err := machine.ReadUpTo(s.on(kept+"/index.json"), maxIndex)
	if err == nil {
		err = json.Unmarshal(text, &index)
	}
	if err != nil { // another program wrote or removed it
		s.Log.WarnContext(ctx, "the list of container images can't be read: none is kept", "err", err)
		index.Manifests = nil
	}
	var images []content
	left := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{}}
	l, known := verified{folder, have}, map[string]int{}
	for _, d := range index.Manifests[:min(len(index.Manifests), maxNames)] {
		name := d.Annotations[nameAnnotation]
		at, again := known[d.Digest]
		if !again {
			at = -1
			if is, whole := l.image(d.Digest); whole {
				at, images = len(images), append(images, is)
			}
			known[d.Digest] = at
		}
		if _, digest, _ := strings.Cut(name, "@"); at < 0 || digest != d.Digest {
			s.Log.InfoContext(ctx, "a container image is not complete: the kubelet pulls it again", "image", name)
			continue
		}
		named := images[at].descriptor
		named.Annotations = map[string]string{nameAnnotation: name}
		images[at].names = append(images[at].names, named)
		left.Manifests = append(left.Manifests, named)
	}
	return slices.DeleteFunc(images, func(c content) bool { return len(c.names) == 0 }), s.writeIndex(left)
}

// isWhole reports whether this is a file as containerd writes content: with one name and without holes. Of others, each could be as large as any disk.
func isWhole(at string) (bool, error) {
	var st unix.Stat_t
	if err := unix.Lstat(at, &st); err != nil {
		return false, fmt.Errorf("%s: %w", at, err)
	}
	return st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1 && st.Blocks*512 >= st.Size, nil
}

// verified is the verified content of an OCI image layout.
type verified struct {
	folder string
	have   map[string]bool
}

// content is an image: its descriptor, with each of its names, and its blobs.
type content struct {
	descriptor v1.Descriptor
	names      []v1.Descriptor
	blobs      []string
}

func newContent(digest string, is types.MediaType, size int64, blobs []string) content {
	return content{descriptor: v1.Descriptor{MediaType: is, Size: size, Digest: v1.Hash{Algorithm: "sha256", Hex: hexOf(digest)}}, blobs: blobs}
}

// document has the parts of a manifest and of an index of manifests that are read here, as OCI (Image Format Specification 1.1) and Docker have them. The
// largest one takes 12 MiB of memory.
type document struct {
	MediaType types.MediaType `json:"mediaType"`
	Manifests []part          `json:"manifests"`
	Config    part            `json:"config"`
	Layers    []part          `json:"layers"`
}

type part struct {
	MediaType types.MediaType `json:"mediaType"`
	Digest    string          `json:"digest"`
}

// image returns what the image with this digest, a manifest or an index of manifests, consists of, and whether all of it is there. Of an index only the
// manifests for some platforms are there, after a pull.
func (l verified) image(digest string) (c content, whole bool) {
	d, size, ok := l.read(digest)
	if !ok {
		return content{}, false
	}
	if len(d.Manifests) > maxParts {
		return content{}, false
	}
	if len(d.Manifests) == 0 {
		blobs, ok := l.manifest(digest, d)
		return newContent(digest, cmp.Or(d.MediaType, types.OCIManifestSchema1), size, blobs), ok
	}
	c = newContent(digest, cmp.Or(d.MediaType, types.OCIImageIndex), size, []string{hexOf(digest)})
	for _, part := range d.Manifests {
		if !part.MediaType.IsImage() || !l.have[hexOf(part.Digest)] {
			continue
		}
		m, _, ok := l.read(part.Digest)
		if !ok {
			return content{}, false
		}
		blobs, ok := l.manifest(part.Digest, m)
		if !ok {
			return content{}, false
		}
		c.blobs = append(c.blobs, blobs...)
	}
	return c, len(c.blobs) > 1
}

// manifest returns the blobs of a manifest, and whether all are there.
func (l verified) manifest(digest string, m document) ([]string, bool) {
	blobs := []string{hexOf(digest)}
	for _, d := range append(m.Layers, m.Config) {
		if !l.have[hexOf(d.Digest)] {
			return nil, false
		}
		blobs = append(blobs, hexOf(d.Digest))
	}
	return blobs, true
}

// hexOf returns the name of a blob by its digest; empty if it is not by SHA-256.
func hexOf(digest string) string {
	name, ok := strings.CutPrefix(digest, "sha256:")
	if !ok {
		return ""
	}
	return name
}

// read returns a verified manifest or index, and its size in bytes.
func (l verified) read(digest string) (d document, size int64, ok bool) {
	if !l.have[hexOf(digest)] {
		return document{}, 0, false
	}
	text, err := machine.ReadUpTo(filepath.Join(l.folder, hexOf(digest)), maxManifest)
	if err != nil || json.Unmarshal(text, &d) != nil {
		return document{}, 0, false
	}
	return d, int64(len(text)), true
}

func (s Store) sumOf(file string) (string, error) {
	open := s.open
	if open == nil {
		open = func(name string) (io.ReadCloser, error) { return os.Open(name) }
	}
	f, err := open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// load gives the images to containerd, which compares the content again: one after another, so that one that it refuses does not cost the others. containerd
// refuses an index that names more than one manifest for this platform, of which only one was pulled.
func (s Store) load(ctx context.Context, images []content) error {
	if len(images) == 0 {
		return nil
	}
	_, err := s.names(ctx) // it has just been started
	for _, c := range images {
		failed := err // it does not answer: it imports none
		if failed == nil {
			failed = s.importImage(ctx, c)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if failed != nil {
			s.Log.WarnContext(ctx, "a container image of this disk is not kept: the kubelet pulls it again", "image", c.names[0].Annotations[nameAnnotation], "err", failed)
		}
	}
	return nil
}

func (s Store) importImage(ctx context.Context, c content) error {
	ctx, cancel := context.WithTimeout(ctx, importTime)
	defer cancel()
	r, w := io.Pipe()
	defer r.Close() //nolint:errcheck // it ends the archive if nobody has read all of it
	go func() { w.CloseWithError(s.archive(w, c)) }()
	if err := s.Machine.ImportImages(ctx, s.Socket, r); err != nil {
		return fmt.Errorf("import into containerd: %w", err)
	}
	return nil
}
