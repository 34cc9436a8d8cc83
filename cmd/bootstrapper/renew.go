package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/keys"
)

// runRenewal keeps the certificates of this control plane alive until ctx ends.
func runRenewal(ctx context.Context, image, record string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	k := img.Kubeadm
	conf, err := kubeadm.ParseImage(k.CRISocket, k.IgnorePreflightErrors, k.ClusterConfiguration, k.KubeletConfiguration, k.KubeProxyConfiguration)
	if err != nil {
		return fmt.Errorf("image configuration: %w", err)
	}
	rec, err := journal.Open(record).Load()
	if err != nil {
		return err
	}
	const root = "/"
	var id keys.ClusterID
	if rec.NodeName == "" || copy(id[:], rec.ClusterID) != len(id) || !renewal.IsControlPlane(root) {
		return errors.New("this machine is no control plane: it has no certificates to renew")
	}
	r, err := renewal.New(renewal.Config{
		Root: root, Kubeadm: conf.Certificates(), Cluster: id, Owner: img.OwnerKey, Timing: renewal.DefaultTiming, Now: time.Now, Log: log,
		Connect: func() (renewal.Cluster, error) { return renewal.Connect(root, rec.NodeName, log) },
	})
	if err != nil {
		return err
	}
	log.InfoContext(ctx, "this control plane's certificates are renewed at two thirds of their life", "node", rec.NodeName)
	return serve.All(ctx, serve.Part{Name: "renewal", Run: r.Run}, serve.Part{Name: "administrators", Run: r.RunAdministrators})
}
