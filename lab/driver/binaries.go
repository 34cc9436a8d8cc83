package driver

import (
	"context"
	"io"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/kube"
)

// KubeBinaries builds the Kubernetes programs of the checkout source (empty: the one that
// the working directory is in) unless the cache has them, and returns their folder.
func KubeBinaries(ctx context.Context, source string, log io.Writer) (string, error) {
	var err error
	if source == "" {
		if source, err = findSource(); err != nil {
			return "", err
		}
	}
	cache, err := kube.CacheDir()
	if err != nil {
		return "", err
	}
	b, err := kube.Binaries(ctx, source, cache, log)
	return b.Dir, err
}

// EnsurePackages installs the Debian packages that the lab and the project's tests use, if
// any is missing.
func EnsurePackages(ctx context.Context, log io.Writer) error { return host.EnsurePackages(ctx, log) }
