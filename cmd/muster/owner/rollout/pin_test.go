package rollout

import (
	"io"
	"log"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/muster-k8s/muster/internal/versions"
)

func TestTagsArePinnedOnce(t *testing.T) {
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer s.Close()
	transport := s.Client().Transport
	host := strings.TrimPrefix(s.URL, "http://")
	var refs []string
	digests := map[string]string{}
	push := func(ref string) string {
		t.Helper()
		tag, err := name.NewTag(ref)
		if err != nil {
			t.Fatal(err)
		}
		img, err := random.Image(64, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.Write(tag, img, remote.WithTransport(transport)); err != nil {
			t.Fatal(err)
		}
		d, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	for _, n := range versions.ImageNames() {
		ref := host + "/k8s/" + n + ":v1"
		refs = append(refs, ref)
		digests[n] = push(ref)
	}
	pinned, err := Pin(t.Context(), refs)
	if err != nil {
		t.Fatal(err)
	}
	images, err := versions.ParseImages(pinned)
	if err != nil {
		t.Fatal(err)
	}
	for n, d := range digests {
		if images[n].Digest != d {
			t.Errorf("%s is %s, want %s", n, images[n], d)
		}
	}
	push(refs[0]) // moved
	again, err := Pin(t.Context(), pinned)
	if err != nil || strings.Join(again, " ") != strings.Join(pinned, " ") {
		t.Errorf("what has a digest was asked for: %q, %v", again, err)
	}
	for problem, list := range map[string][]string{
		"not there":   append([]string{host + "/k8s/other:v1"}, refs[1:]...),
		"one less":    refs[1:],
		"no tag":      append([]string{host + "/k8s/etcd"}, refs[1:]...),
		"no registry": append([]string{"etcd:v1"}, refs[1:]...),
	} {
		if got, err := Pin(t.Context(), list); err == nil {
			t.Errorf("%s: %q", problem, got)
		}
	}
}
