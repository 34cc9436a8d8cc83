package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/services/bootstrapper/catrust"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/keys"
)

// runRenewal renews this node's certificates until ctx ends, on a control plane also those of kubeadm.
func runRenewal(ctx context.Context, image, record, lock string, log *slog.Logger) error {
	const root = "/"
	rec, err := journal.Open(record).Load()
	if err != nil {
		return err
	}
	if rec.NodeName == "" {
		return errors.New("this machine is not a node, so it has no certificates to renew")
	}
	parts := []serve.Part{{Name: "kubelet", Run: func(ctx context.Context) error {
		return kubelet.Watch(ctx, kubelet.WatchConfig{Root: root, Machine: machine.Real{}, Interval: kubelet.WatchInterval, Now: time.Now, Log: log})
	}}}
	controlPlane, err := renewal.IsControlPlane(root)
	if err != nil {
		return err
	}
	parts = append(parts, serve.Part{Name: "authorities", Run: func(ctx context.Context) error {
		return catrust.Watch(ctx, catrust.Config{Root: root, ControlPlane: controlPlane, Machine: machine.Real{}, Interval: kubelet.WatchInterval, Log: log})
	}})
	if !controlPlane {
		return serve.All(ctx, parts...)
	}
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	k := img.Kubeadm
	conf, err := kubeadm.ParseImage(k.CRISocket, k.IgnorePreflightErrors, k.ClusterConfiguration, k.KubeletConfiguration, k.KubeProxyConfiguration)
	if err != nil {
		return fmt.Errorf("image configuration: %w", err)
	}
	var id keys.ClusterID
	if copy(id[:], rec.ClusterID) != len(id) {
		return errors.New("the journal names no cluster, so this control plane renews nothing: run bootstrapper doctor")
	}
	device, err := openTPM(img, lock)
	if err != nil {
		return err
	}
	r, err := renewal.New(renewal.Config{
		Root: root, Kubeadm: conf.Certificates(), Cluster: id, Owner: img.OwnerKeys, Timing: renewal.DefaultTiming, Now: time.Now, Log: log,
		Epoch:   epoch.Keeper{Dir: epoch.Folder, TPM: device},
		Connect: func() (renewal.Cluster, error) { return renewal.Connect(root, rec.NodeName, img.OwnerKeys, log) },
	})
	if err != nil {
		return err
	}
	log.InfoContext(ctx, "this control plane's certificates are renewed at two thirds of their life", "node", rec.NodeName)
	if img.Backup.Every > 0 {
		m, err := backupMaker(img, record, log)
		if err != nil {
			return err
		}
		parts = append(parts, serve.Part{Name: "backups", Run: func(ctx context.Context) error { return m.Run(ctx, img.Backup.Every) }})
	}
	return serve.All(ctx, append(parts, serve.Part{Name: "renewal", Run: r.Run}, serve.Part{Name: "administrators", Run: r.RunAdministrators},
		serve.Part{Name: "streams", Run: r.RunStreams}, serve.Part{Name: "epoch", Run: r.RunEpoch})...)
}
