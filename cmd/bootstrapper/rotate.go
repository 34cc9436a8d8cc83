package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/services/bootstrapper/rotation"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// runRotate does a phase of the rotation of a key on this control plane, if its owner has ordered that (B11). The process that executes orders
// reports its end.
func runRotate(ctx context.Context, image, meta, record, lock string, log *slog.Logger) error {
	const root = "/"
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	load := journal.Open(record).Load
	order, digest, err := orders.Begun(root, img, load, ownerorder.ActionRotateKey, time.Now())
	if err != nil {
		return err
	}
	if err := orders.BeginResult(root, order.Action); err != nil {
		return err
	}
	output, err := rotateKey(ctx, root, img, meta, lock, load, order, digest, log)
	if ctx.Err() != nil { // stopped: it continues after the machine's next start
		return err
	}
	return errors.Join(err, orders.WriteResult(root, order.Action, output, err))
}

func rotateKey(ctx context.Context, root string, img *metadata.Image, meta, lock string, load func() (journal.Record, error), order ownerorder.MachineOrder, digest string, log *slog.Logger) (string, error) {
	if is, err := renewal.IsControlPlane(root); err != nil {
		return "", err
	} else if !is {
		return "", errors.New("this machine is not a control plane with the cluster's authority on its disk")
	}
	rec, err := load()
	if err != nil {
		return "", err
	}
	k := img.Kubeadm
	conf, err := kubeadm.ParseImage(k.CRISocket, k.IgnorePreflightErrors, k.ClusterConfiguration, k.KubeletConfiguration, k.KubeProxyConfiguration)
	if err != nil {
		return "", fmt.Errorf("image configuration: %w", err)
	}
	device, err := openTPM(img, lock)
	if err != nil {
		return "", err
	}
	own, err := newAttester(img, device, attest.PurposeMachine)
	if err != nil {
		return "", err
	}
	connect := func() (renewal.Cluster, error) { return renewal.ConnectRotation(root, rec.NodeName, log) }
	keeper := epoch.Keeper{Dir: epoch.Folder, TPM: device}
	plane, err := renewal.New(renewal.Config{
		Root: root, Kubeadm: conf.Certificates(), Cluster: keys.ClusterID(rec.ClusterID), Owner: img.OwnerKeys, Timing: renewal.DefaultTiming, Now: time.Now, Log: log,
		Epoch: keeper, Connect: connect,
	})
	if err != nil {
		return "", err
	}
	peers := rotation.Peers{
		Root: root, Image: img, Metadata: func() (*metadata.Machine, error) { return metadata.LoadMachine(meta, metadata.RunPath) }, Journal: load, TPM: device, Attester: own, NewVerifier: newVerifier, Log: log, Unit: machine.Real{}.Unit,
		Addresses: func(ctx context.Context) ([]netip.Addr, error) {
			c, err := connect()
			if err != nil {
				return nil, err
			}
			defer c.Close()
			return c.OtherControlPlanes(ctx)
		},
	}
	r, err := rotation.New(rotation.Config{
		Root: root, Kubeadm: conf.Certificates(), ControlPlane: plane, Fetch: peers.Fetch, OldSecrets: oldSecrets, Count: keeper.Count, Now: time.Now, Log: log,
	})
	if err != nil {
		return "", err
	}
	log.InfoContext(ctx, "a key of this control plane is rotated by its owner's order", "key", order.Args[ownerorder.ArgKey], "phase", order.Args[ownerorder.ArgPhase], "id", order.Args[ownerorder.ArgID])
	return r.Run(ctx, digest, order.Args)
}

// oldSecrets reads from this machine's etcd.
func oldSecrets(ctx context.Context, prefix string) (int, error) {
	cert, err := os.ReadFile(filepath.Join(machine.PKIFolder, "etcd", "ca.crt"))
	if err != nil {
		return 0, err
	}
	key, err := os.ReadFile(filepath.Join(machine.PKIFolder, "etcd", "ca.key"))
	if err != nil {
		return 0, err
	}
	defer clear(key)
	return etcd.OldSecrets(ctx, loopback, cert, key, []byte(prefix))
}
