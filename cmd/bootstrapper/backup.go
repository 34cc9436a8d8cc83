package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/services/bootstrapper/backups"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/keys"
)

// backupMaker returns the function that makes backups on this control plane.
func backupMaker(img *metadata.Image, record string, log *slog.Logger) (*backups.Maker, error) {
	rec, err := journal.Open(record).Load()
	if err != nil {
		return nil, err
	}
	var id keys.ClusterID
	if copy(id[:], rec.ClusterID) != len(id) || rec.NodeName == "" {
		return nil, errors.New("this machine is not a node of a cluster")
	}
	if is, err := renewal.IsControlPlane("/"); err != nil {
		return nil, err
	} else if !is {
		return nil, errors.New("this machine is not a control plane")
	}
	if len(img.OwnerKeys) == 0 {
		return nil, errors.New("backups are encrypted to the owner's key, but the image has none: write ownerKeys into image.yaml")
	}
	return backups.New(backups.Config{
		Root: "/", Cluster: id, Node: rec.NodeName, Keep: img.Backup.Keep, Now: time.Now, Log: log,
		State: func(ctx context.Context) (backup.State, ed25519.PublicKey, error) {
			return renewal.State(ctx, "/", rec.NodeName, img.OwnerKeys, log)
		},
		Snapshot: func(ctx context.Context, caCert, caKey []byte, room func(int64) error, w io.Writer) error {
			return etcd.Snapshot(ctx, loopback, caCert, caKey, room, w)
		},
	})
}
