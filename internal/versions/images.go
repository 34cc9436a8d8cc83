package versions

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Names of Kubernetes' own images: the last part of each path.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	Proxy             = "kube-proxy"
	CoreDNS           = "coredns"
	Pause             = "pause"
)

// ImageNames returns the images that every list has.
func ImageNames() []string {
	return []string{Etcd, APIServer, ControllerManager, Scheduler, Proxy, CoreDNS, Pause}
}

// maxReference bounds an image's reference, in bytes.
const maxReference = 512

// reference matches a valid image reference: with its registry, since machines complete a name without one differently; and
// with a tag, which only shows people what the digest is.
var reference = regexp.MustCompile(`^([a-z0-9][a-z0-9.-]*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+):([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})@(sha256:[0-9a-f]{64})$`)

// Image is a reference by digest.
type Image struct {
	// Repository has registry and path, as in registry.example/etcd.
	Repository string
	// Tag is for people.
	Tag string
	// Digest is that of the manifest or of the index of manifests, as in sha256:HEX.
	Digest string
}

// String returns REPOSITORY:TAG@DIGEST.
func (i Image) String() string { return i.Repository + ":" + i.Tag + "@" + i.Digest }

// Images has one image for each of [ImageNames].
type Images map[string]Image

// ParseImages reads a list of references. One without a digest is an error, and so is a missing or unknown one (B9): the
// registry or the mirror decides what a tag means, and these run as root on control planes.
func ParseImages(refs []string) (Images, error) {
	out, unknown := Images{}, ImageNames()
	for _, ref := range refs {
		m := reference.FindStringSubmatch(ref)
		if m == nil || len(ref) > maxReference {
			return nil, fmt.Errorf("images: %.200q is not of the form REGISTRY/PATH/NAME:TAG@sha256:DIGEST: `muster components pin` writes digests into the list", ref)
		}
		name := path.Base(m[1])
		i := slices.Index(unknown, name)
		if i < 0 {
			return nil, fmt.Errorf("images: %q is listed twice, or is none of %s", name, strings.Join(ImageNames(), ", "))
		}
		unknown = slices.Delete(unknown, i, i+1)
		out[name] = Image{Repository: m[1], Tag: m[2], Digest: m[3]}
	}
	if len(unknown) > 0 {
		return nil, fmt.Errorf("images: %s not listed: name each of Kubernetes' images by digest; `muster components pin` writes them into the list", strings.Join(unknown, ", "))
	}
	return out, nil
}

// References returns the list that [ParseImages] reads, sorted.
func (i Images) References() []string {
	out := make([]string, 0, len(i))
	for _, name := range slices.Sorted(maps.Keys(i)) {
		out = append(out, i[name].String())
	}
	return out
}
