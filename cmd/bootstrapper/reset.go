package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/trust/keys"
)

// runReset erases the header of this machine's state disk, if its owner has ordered that (B11). The machine must be restarted then.
func runReset(ctx context.Context, image, record string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	load := journal.Open(record).Load
	if _, _, err := orders.Begun("/", img, load, ownerorder.ActionReset, time.Now()); err != nil {
		return err
	}
	rec, err := load()
	if err != nil {
		return err
	}
	id, err := keys.ParseDiskID(rec.DiskID)
	if err != nil {
		return err
	}
	d, err := disk.Open(img.StateDisk.Mode, img.StateDisk.Path, disk.WithIntegrity(img.StateDisk.Integrity))
	if err != nil {
		return err
	}
	l, encrypted := d.(*disk.LUKS)
	if !encrypted {
		return fmt.Errorf("the state disk of this machine has the mode %q: only an encrypted one can be erased", img.StateDisk.Mode)
	}
	if err := l.Erase(id); err != nil {
		return err
	}
	log.WarnContext(ctx, "the state disk's header is erased by the owner's order", "disk", id.String())
	return nil
}
