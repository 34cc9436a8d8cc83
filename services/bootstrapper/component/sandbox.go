package component

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// sandboxFile is imported by containerd's configuration. It is in memory, so each boot writes it again before a pod starts.
const sandboxFile = "/run/muster/containerd/sandbox.toml"

// PinSandbox makes containerd use the image for each pod's sandbox (B9).
func PinSandbox(ctx context.Context, root string, m machine.Machine, image versions.Image) error {
	changed, err := NameSandbox(root, image)
	if err != nil || !changed {
		return err
	}
	if err := m.Unit(ctx, "restart", machine.UnitContainerd); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitContainerd, err)
	}
	return nil
}

// NameSandbox writes the image's name for containerd, which reads it when it starts, and returns whether it has changed.
func NameSandbox(root string, image versions.Image) (changed bool, err error) {
	want := fmt.Appendf(nil, "version = 3\n\n[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = %q\n", image)
	file := filepath.Join(root, sandboxFile)
	if have, err := os.ReadFile(file); err == nil && bytes.Equal(have, want) {
		return false, nil
	}
	return true, machine.WriteFile(file, want, 0o644, 0o755)
}
