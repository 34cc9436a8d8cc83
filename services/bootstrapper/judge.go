package bootstrapper

import (
	"context"

	"github.com/muster-k8s/muster/services/bootstrapper/seek"
	"github.com/muster-k8s/muster/trust/attest"
)

// PCRReader reads this machine's own PCRs.
type PCRReader = seek.PCRReader

// judge gives what a joiner judges with.
func (b *Bootstrapper) judge(ctx context.Context) (attest.Verifier, attest.Appraiser, error) {
	// The machine's cluster, once it has one; before, any: it can't know.
	lock := attest.AnyLock()
	if rec := b.lock.record(); rec.Locked() {
		lock = attest.LockedTo([32]byte(rec.ClusterID))
	}
	if b.ownerKey != nil {
		b.metrics.insecure.DeleteLabelValues(ownerKeyUnknown)
	} else {
		b.metrics.insecure.WithLabelValues(ownerKeyUnknown).Set(1)
	}
	return seek.Judges{OwnerKey: b.ownerKey, EKRoots: b.cfg.Image.EKRoots, Bank: b.bank, PCRs: b.cfg.TPM, NewVerifier: b.cfg.NewVerifier, Newest: b.lock.newest}.Of(ctx, lock)
}

// ownerKeyUnknown is a label of muster_insecure_config.
const ownerKeyUnknown = "owner_key_unknown"
