package bootstrapper

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// sandboxFile is what containerd's configuration imports. It is in memory, so each boot writes it anew, before a pod starts.
	sandboxFile = "/run/muster/containerd/sandbox.toml"
	// pullTries is how often an image is asked for.
	pullTries = 6
)

// software is a checked list of components and images.
type software struct {
	list       versions.List
	components []component.Component
	images     versions.Images
}

// parseSoftware checks what an owner or a joinservice lists.
func parseSoftware(components []*initv1.Component, images []string) (*software, error) {
	out := &software{list: versions.FromWire(components, images)}
	var err error
	if out.components, err = component.Parse(components); err != nil {
		return nil, err
	}
	if out.images, err = versions.ParseImages(images); err != nil { // B9
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the cluster's list: %w", err)
	}
	return out, nil
}

// prepareImages has containerd start pods with the listed pause image, and pulls what a node runs, by digest (B9): kubeadm is told to pull nothing, and
// waits only minutes for pods whose images are not there.
func (b *Bootstrapper) prepareImages(ctx context.Context, images versions.Images, controlPlane bool, tell say) error {
	if err := b.pinSandbox(ctx, images[versions.Pause]); err != nil {
		return err
	}
	names := []string{versions.Pause, versions.Proxy}
	if controlPlane {
		names = append(names, kubeadm.StaticPods()...)
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.Timing.Kubeadm)
	defer cancel()
	for i, name := range names {
		tell(initv1.Phase_PHASE_DISK, fmt.Sprintf("pulling %s (%d of %d)", name, i+1, len(names)))
		if err := b.pull(ctx, images[name].String()); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bootstrapper) pull(ctx context.Context, image string) error {
	pause := retry.Backoff{Min: b.cfg.Components.Pause, Max: 30 * time.Second}
	for try := 1; ; try++ {
		err := b.cfg.Machine.Pull(ctx, b.cfg.Image.Kubeadm.CRISocket, image)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || try >= pullTries {
			return attest.Refuse(attestv1.Reason_REASON_COMPONENT_UNAVAILABLE, "image %s can't be pulled after %d tries: %w", image, try, err)
		}
		b.log.WarnContext(ctx, "image not pulled, trying again", "image", image, "try", try, "err", err)
		if err := retry.Wait(ctx, pause.Next(0)); err != nil {
			return err
		}
	}
}

// pinSandbox has containerd use the image for each pod's sandbox (B9).
func (b *Bootstrapper) pinSandbox(ctx context.Context, image versions.Image) error {
	want := fmt.Appendf(nil, "version = 3\n\n[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = %q\n", image)
	if have, err := os.ReadFile(b.on(sandboxFile)); err == nil && bytes.Equal(have, want) {
		return nil
	}
	if err := machine.WriteFile(b.on(sandboxFile), want, 0o644, 0o755); err != nil {
		return err
	}
	if err := b.cfg.Machine.Unit(ctx, "restart", machine.UnitContainerd); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitContainerd, err)
	}
	return nil
}

// writePatches places what kubeadm changes static pods by.
func (b *Bootstrapper) writePatches(images versions.Images) error {
	for name, content := range kubeadm.Patches(images) {
		if err := machine.WriteFile(b.on(path.Join(kubeadm.PatchesFolder, name)), content, 0o600, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// proxy asks kubeadm for the objects of kube-proxy.
func (b *Bootstrapper) proxy(ctx context.Context, o *initOrder) ([]runtime.Object, error) {
	if !b.image.WantsProxy() {
		return nil, nil
	}
	config, err := b.initConfig(o)
	if err != nil {
		return nil, err
	}
	if err := machine.WriteFile(b.on(configFile), config, 0o600, 0o755); err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(b.on(configFile)) }() // no secret is in it
	ctx, cancel := context.WithTimeout(ctx, b.cfg.Timing.Kubeadm)
	defer cancel()
	var lines []string
	if err := b.cfg.Machine.Kubeadm(ctx, func(l string) { lines = append(lines, l) }, kubeadm.ProxyManifest(b.on(configFile))...); err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm's manifest of kube-proxy: %w", err)
	}
	return kubeadm.Proxy(lines, o.software.images[versions.Proxy])
}
