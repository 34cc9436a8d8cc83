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

// Pin asks registries which digests the tags of Kubernetes' images stand for, and returns a list that [versions.ParseImages] reads. References with a
// digest are kept. The digest is computed from the downloaded manifest, and must equal the registry's.
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
			// GET, not HEAD: a digest from a header alone would be unverified.
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
