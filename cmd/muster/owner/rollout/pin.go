package rollout

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/muster-k8s/muster/internal/versions"
)

// Pin asks registries which digests the tags of Kubernetes' images stand for, and returns a list that [versions.ParseImages] reads. What has a digest stays
// as it is. The digest is that of the manifest as it came: a registry that says another one is an error.
func Pin(ctx context.Context, images []string) ([]string, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // documented type
	defer transport.CloseIdleConnections()
	out := make([]string, 0, len(images))
	for _, image := range images {
		if !strings.Contains(image, "@") {
			tag, err := name.NewTag(image, name.StrictValidation)
			if err != nil {
				return nil, fmt.Errorf("image: %w: give registry, path and tag", err)
			}
			// Not only its head: the digest of a header would be the registry's word.
			got, err := remote.Get(tag, remote.WithContext(ctx), remote.WithTransport(transport))
			if err != nil {
				return nil, fmt.Errorf("image %s: %w", image, err)
			}
			image += "@" + got.Digest.String()
		}
		out = append(out, image)
	}
	parsed, err := versions.ParseImages(out)
	if err != nil {
		return nil, err
	}
	return parsed.References(), nil
}
