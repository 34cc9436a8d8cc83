package rollout

import (
	"fmt"
	"path"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/muster-k8s/muster/internal/versions"
)

// releaseIn matches a release of Kubernetes in a URL.
var releaseIn = regexp.MustCompile(`(?:^|[^0-9.])(1\.[0-9]{2}\.[0-9]+)(?:[^0-9]|$)`)

// checkList compares the list with the version of the upgrade: an upgrade with another release's list can't be undone.
func (k *kubeUpgrade) checkList(refuse func(string, ...any)) {
	from, to := k.was.KubernetesVersion, k.release.KubernetesVersion
	if from == to {
		return // refused already
	}
	wrong := func(format string, args ...any) {
		refuse("%s: use the list of Kubernetes %s, with images from muster components pin.", fmt.Sprintf(format, args...), to)
	}
	old, err := versions.ParseImages(k.was.Images)
	if err != nil {
		old = nil // a cluster without a list is refused already
	}
	for _, name := range []string{versions.APIServer, versions.ControllerManager, versions.Scheduler, versions.Proxy} {
		image := k.images[name]
		tagged, err := version.ParseGeneric(image.Tag)
		switch {
		case err != nil || fmt.Sprintf("%d.%d.%d", tagged.Major(), tagged.Minor(), tagged.Patch()) != to:
			wrong("the list has %s with the tag %s", name, image.Tag)
		case old[name].Digest == image.Digest:
			wrong("the list has %s with the digest of Kubernetes %s", name, from)
		}
	}
	for _, c := range k.release.Components {
		name := path.Base(c.Path)
		if name != "kubeadm" && name != "kubelet" || c.Extract {
			continue
		}
		var named []string
		for _, m := range releaseIn.FindAllStringSubmatch(c.URL, -1) {
			named = append(named, m[1])
		}
		switch {
		case len(named) > 0 && !slices.Contains(named, to):
			wrong("the list has %s from %s", name, c.URL)
		case slices.ContainsFunc(k.was.Components, func(o versions.Component) bool { return o.Path == c.Path && o.SHA256 == c.SHA256 }):
			wrong("the list has the same file %s as that of Kubernetes %s", name, from)
		}
	}
}
