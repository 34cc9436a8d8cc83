package main

import (
	"context"
	"log/slog"

	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/attest"
)

// runAccepted compares the policy under which the state disk was opened with the journal on it. The initramfs runs it
// after the disk is mounted and before any program on it starts; `bootstrapper run` checks again.
func runAccepted(image, record string) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	rec, err := journal.Open(record).Load()
	if err != nil {
		return err
	}
	return discovery.Accepted("/", rec.Policy, discovery.OwnerKeys(img, rec))
}

// runUnlock opens the state disk. It returns without an error when the disk is open. Until then, it retries without limit.
func runUnlock(ctx context.Context, image, meta, lock, screen string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	if img.StateDisk.Mode == metadata.DiskPlain {
		log.InfoContext(ctx, "the state is in a folder, so there is no disk to unlock")
		return nil
	}
	volume, err := disk.OpenLUKS(img.StateDisk.Path, disk.WithIntegrity(img.StateDisk.Integrity))
	if err != nil {
		return err
	}
	switch at, err := volume.Locate(ctx, disk.Settle); {
	case err != nil:
		return err
	case at != img.StateDisk.Path:
		log.WarnContext(ctx, "the state disk has another name in this boot", "configured", img.StateDisk.Path, "device", at)
	}
	device, err := openTPM(img, lock)
	if err != nil {
		return err
	}
	own, err := newAttester(img, device, attest.PurposeMachine)
	if err != nil {
		return err
	}
	terminal, done := openConsole(screen, log)
	defer done()
	return unlock.Serve(ctx, unlock.Config{
		Image: img, Metadata: newSources(img, meta, log).start(ctx), Root: "/", Disk: volume,
		TPM: device, Attester: own, NewVerifier: newVerifier, Policy: journal.Open(journal.UnlockPolicy), Desired: component.UnlockFile, Console: terminal, Timing: unlock.DefaultTiming, Log: log,
	})
}
