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

// KubeRelease is a release of Kubernetes that the lab builds.
type KubeRelease = kube.Release

// CurrentRelease is the release of the lab's clusters.
func CurrentRelease() KubeRelease { return kube.Current }

// PreviousRelease is the release that clusters are upgraded from, in a lab that was brought up with [Up.Previous].
func PreviousRelease() KubeRelease { return kube.Previous }

// KubeBinaries builds the current Kubernetes programs of the checkout source (empty: the one that the working directory
// is in) unless the cache has them, and returns their folder.
func KubeBinaries(ctx context.Context, source string, log io.Writer) (string, error) {
	return ReleaseBinaries(ctx, kube.Current, source, false, log)
}

// ReleaseBinaries is [KubeBinaries] for a release. With pinned it returns an error unless the programs are those that
// the sha256sums.json of the release names.
func ReleaseBinaries(ctx context.Context, r KubeRelease, source string, pinned bool, log io.Writer) (string, error) {
	b, _, err := kubeBinaries(ctx, source, log, r.Binaries)
	if err == nil && pinned && !b.Pinned() {
		return "", fmt.Errorf("tools/%s/sha256sums.json names no programs of %s: write it with `go run ./lab kube-binaries --pin`", r.Module, runtime.Version())
	}
	return b.Dir, err
}

// PinReleaseBinaries rebuilds the programs of a release from the checkout source, and writes their hashes into its sha256sums.json there.
func PinReleaseBinaries(ctx context.Context, r KubeRelease, source string, log io.Writer) error {
	b, source, err := kubeBinaries(ctx, source, log, r.Rebuild)
	if err != nil {
		return err
	}
	j, err := json.MarshalIndent(b.Pin(), "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(source, "tools", r.Module, "sha256sums.json"), append(j, '\n'), 0o644)
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
func EnsurePackages(ctx context.Context, log io.Writer, more ...string) error {
	return host.EnsurePackages(ctx, log, more...)
}
