package driver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/kube"
)

// KubeBinaries builds the Kubernetes programs of the checkout source (empty: the one that
// the working directory is in) unless the cache has them, and returns their folder. With
// pinned it returns an error unless they are those that tools/kube/sha256sums.json names.
func KubeBinaries(ctx context.Context, source string, pinned bool, log io.Writer) (string, error) {
	b, _, err := kubeBinaries(ctx, source, log, kube.Binaries)
	if err == nil && pinned && !b.Pinned() {
		return "", fmt.Errorf("tools/kube/sha256sums.json names no programs of %s: write it with `go run ./lab kube-binaries --pin`", runtime.Version())
	}
	return b.Dir, err
}

// PinKubeBinaries builds the Kubernetes programs of the checkout source anew, and writes what they are into its tools/kube/sha256sums.json.
func PinKubeBinaries(ctx context.Context, source string, log io.Writer) error {
	b, source, err := kubeBinaries(ctx, source, log, kube.Rebuild)
	if err != nil {
		return err
	}
	j, err := json.MarshalIndent(b.Pin(), "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(source, "tools", "kube", "sha256sums.json"), append(j, '\n'), 0o644)
}

func kubeBinaries(ctx context.Context, source string, log io.Writer, get func(ctx context.Context, source, cache string, log io.Writer) (kube.Build, error)) (kube.Build, string, error) {
	var err error
	if source == "" {
		if source, err = findSource(); err != nil {
			return kube.Build{}, "", err
		}
	}
	cache, err := kube.CacheDir()
	if err != nil {
		return kube.Build{}, "", err
	}
	b, err := get(ctx, source, cache, log)
	return b, source, err
}

// EnsurePackages installs the Debian packages that the lab and the project's tests use, if
// any is missing.
func EnsurePackages(ctx context.Context, log io.Writer) error { return host.EnsurePackages(ctx, log) }
