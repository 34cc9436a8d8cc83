package provision

import (
	"context"
	"fmt"
	"path"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// prepareImages makes containerd start pods with the listed pause image, and pulls the node's images by digest (B9): kubeadm is configured not to pull,
// and waits only minutes for pods whose images are missing.
func (n *Node) prepareImages(ctx context.Context, images versions.Images, controlPlane bool, report Progress) error {
	if err := component.PinSandbox(ctx, n.Root, n.Machine, images[versions.Pause]); err != nil {
		return err
	}
	names := []string{versions.Pause, versions.Proxy}
	if controlPlane {
		names = append(names, kubeadm.StaticPods()...)
	}
	ctx, cancel := context.WithTimeout(ctx, n.Timing.Kubeadm)
	defer cancel()
	for i, name := range names {
		report(initv1.Phase_PHASE_DISK, fmt.Sprintf("pulling %s (%d of %d)", name, i+1, len(names)))
		if err := component.Pull(ctx, n.Machine, n.Image.Kubeadm.CRISocket, images[name].String(), n.Components.Pause, n.Log); err != nil {
			return err
		}
	}
	return nil
}

// writePatches writes the patches that kubeadm applies to static pods.
func (n *Node) writePatches(images versions.Images) error {
	for name, content := range kubeadm.Patches(images) {
		if err := machine.WriteFile(n.On(path.Join(kubeadm.PatchesFolder, name)), content, 0o600, 0o755); err != nil {
			return err
		}
	}
	return nil
}
