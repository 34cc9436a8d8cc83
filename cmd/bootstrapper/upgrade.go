package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/services/bootstrapper/upgrade"
)

// runUpgrade upgrades this node to another release of Kubernetes, if its owner has ordered that (B11). The process that
// executes orders reports its end.
func runUpgrade(ctx context.Context, image, record string, log *slog.Logger) error {
	const root = "/"
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	load := journal.Open(record).Load
	order, _, err := orders.Begun(root, img, load, ownerorder.ActionUpgradeKubernetes, time.Now())
	if err != nil {
		return err
	}
	if err := orders.BeginResult(root, order.Action); err != nil {
		return err
	}
	output, err := upgradeNode(ctx, root, img, order, log)
	if ctx.Err() != nil { // stopped: it continues after the machine's next start
		return err
	}
	return errors.Join(err, orders.WriteResult(root, order.Action, output, err))
}

func upgradeNode(ctx context.Context, root string, img *metadata.Image, order ownerorder.MachineOrder, log *slog.Logger) (string, error) {
	k := img.Kubeadm
	conf, err := kubeadm.ParseImage(k.CRISocket, k.IgnorePreflightErrors, k.ClusterConfiguration, k.KubeletConfiguration, k.KubeProxyConfiguration)
	if err != nil {
		return "", err
	}
	u, err := upgrade.New(upgrade.Config{
		Root: root, Kubeadm: conf, CRISocket: k.CRISocket, Machine: machine.Real{}, Version: machine.Version, Healthy: upgrade.KubeletHealthy,
		Connect: func() (upgrade.Cluster, error) { return upgrade.Connect(root, order.Node, log) },
		Etcd: func(ctx context.Context) error {
			caCert, caKey, err := etcdAuthority()
			if err != nil {
				return err
			}
			return etcd.Healthy(ctx, loopback, caCert, caKey)
		},
		Components: component.DefaultLimits, Timing: upgrade.DefaultTiming, Log: log,
	})
	if err != nil {
		return "", err
	}
	log.InfoContext(ctx, "this node is upgraded by its owner's order", "version", order.Args[ownerorder.ArgVersion], "part", order.Args[ownerorder.ArgPart])
	return u.Run(ctx, order.Args)
}
