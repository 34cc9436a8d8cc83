package bootstrapper

import (
	"context"

	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
)

func (b *Bootstrapper) epoch() epoch.Keeper {
	return epoch.Keeper{Dir: b.on(epoch.Folder), TPM: b.cfg.TPM}
}

// beginEpoch starts a new record for a machine that becomes a control plane, and ignores the counter value left by an earlier disk. From here on an older copy
// of this disk is found, whichever step of the join it is of.
func (b *Bootstrapper) beginEpoch(ctx context.Context) error {
	meta, err := b.cfg.Metadata()
	if err != nil {
		return err
	}
	if meta.Role != metadata.RoleControlPlane {
		return nil
	}
	return b.begin(ctx)
}

func (b *Bootstrapper) begin(ctx context.Context) error {
	b.newest.Store(false)
	if err := b.epoch().Begin(ctx, epoch.Record{Written: b.cfg.Now()}); err != nil {
		return err
	}
	b.newest.Store(true)
	return nil
}

// notRolledBack lets a control plane go on whose state disk is the newest. One whose disk was put back to an earlier copy waits for its owner: nothing
// of the cluster is served before that (B7). It does so once: a disk is put back while the machine is off, and a join that is cut off, and waits for a
// ticket, comes here with each try, which would wear out the counter's memory.
func (b *Bootstrapper) notRolledBack(ctx context.Context) error {
	meta, err := b.cfg.Metadata()
	if err != nil {
		return err
	}
	// Who was root once can have moved the authority away.
	if b.newest.Load() || meta.Role != metadata.RoleControlPlane && !renewal.IsControlPlane(b.cfg.Root) {
		return nil
	}
	s, err := b.epoch().Check(ctx)
	if err != nil {
		return err
	}
	if s.Err == nil {
		if s.Record == nil { // of a version that kept no record
			return b.begin(ctx)
		}
		if err := b.epoch().Renew(ctx); err != nil {
			return err
		}
		b.newest.Store(true)
		return nil
	}
	rec := b.lock.record()
	b.metrics.joins.WithLabelValues(attest.ReasonName(attest.ReasonOf(s.Err))).Inc() // R1
	b.tries.Refused(s.Err)
	b.older.Store(true)
	defer b.older.Store(false)
	b.log.ErrorContext(ctx, "this control plane does not start: its state disk is not the newest", "reason", attest.ReasonName(attest.ReasonOf(s.Err)), "err", s.Err, "remedy", rpc.RemedyFrom(s.Err))
	b.cfg.Console.Say("this control plane does not start: " + attest.ReasonName(attest.ReasonOf(s.Err)) + ". Its state disk is an older copy, or its TPM has lost its counter: docs/recovery.md says what its owner does")
	// An image whose systemd starts the kubelet by itself has done so.
	if err := b.cfg.Machine.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return err
	}
	l, err := listen(ctx, "listen.recover", b.cfg.Image.Listen.Recover)
	if err != nil {
		return err
	}
	// The owner's key is that of the image alone: the journal is on the disk.
	owner := b.cfg.Image.OwnerKey
	w := &epoch.Waiting{Keeper: b.epoch(), Standing: s, Cluster: [32]byte(rec.ClusterID), Machine: b.machineID, Owner: owner, Attester: b.cfg.Attester, Calls: b.cfg.Calls, Log: b.log}
	if err := w.Wait(ctx, l); err != nil {
		return err
	}
	b.newest.Store(true)
	b.cfg.Console.Say("the owner has accepted this control plane's state disk")
	return nil
}
