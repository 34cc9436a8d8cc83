package provision

import (
	"context"
	"fmt"
	"path"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
)

// pullAttempts is how often a pull is attempted.
const pullAttempts = 6

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
		if err := n.pull(ctx, images[name].String()); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) pull(ctx context.Context, image string) error {
	pause := retry.Backoff{Min: n.Components.Pause, Max: 30 * time.Second}
	for try := 1; ; try++ {
		err := n.Machine.Pull(ctx, n.Image.Kubeadm.CRISocket, image)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || try >= pullAttempts {
			return attest.Refuse(attestv1.Reason_REASON_COMPONENT_UNAVAILABLE, "image %s can't be pulled after %d attempts: %w", image, try, err)
		}
		n.Log.WarnContext(ctx, "image not pulled, trying again", "image", image, "try", try, "err", err)
		if err := retry.Wait(ctx, pause.Next(0)); err != nil {
			return err
		}
	}
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
