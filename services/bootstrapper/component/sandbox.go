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

// unread is the first line of the file until containerd has started with it: a process that is killed before leaves it for the next one.
const unread = "# containerd has not read this yet\n"

// PinSandbox makes containerd use the image for each pod's sandbox (B9).
func PinSandbox(ctx context.Context, root string, m machine.Machine, image versions.Image) error {
	restart, err := NameSandbox(root, image)
	if err != nil || !restart {
		return err
	}
	if err := m.Unit(ctx, "restart", machine.UnitContainerd); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitContainerd, err)
	}
	return SandboxRead(root, image)
}

// NameSandbox writes the image's name for containerd, which reads it when it starts, and returns whether it must be started for that. Whoever starts it calls
// [SandboxRead].
func NameSandbox(root string, image versions.Image) (restart bool, err error) {
	want := sandbox(image)
	if have, err := os.ReadFile(filepath.Join(root, sandboxFile)); err == nil && bytes.Equal(have, want) {
		return false, nil
	}
	return true, write(root, append([]byte(unread), want...))
}

// SandboxRead records that containerd was started after [NameSandbox].
func SandboxRead(root string, image versions.Image) error { return write(root, sandbox(image)) }

func sandbox(image versions.Image) []byte {
	return fmt.Appendf(nil, "version = 3\n\n[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = %q\n", image)
}

func write(root string, content []byte) error {
	return machine.WriteFile(filepath.Join(root, sandboxFile), content, 0o644, 0o755)
}
