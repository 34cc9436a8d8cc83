package bootstrapper

import (
	"context"
	"net"

	"github.com/muster-k8s/muster/services/bootstrapper/seek"
	"github.com/muster-k8s/muster/trust/attest"
)

// PCRReader reads this machine's own PCRs.
type PCRReader = seek.PCRReader

// open gives a session with the joinservice at the other end of first, which is judged with the next call.
func (b *Bootstrapper) open(ctx context.Context, endpoint string, first net.Conn) (*seek.Session, error) {
	// The machine's cluster, once it has one; before, any: it can't know.
	lock := attest.AnyLock()
	if rec := b.lock.record(); rec.Locked() {
		lock = attest.LockedTo([32]byte(rec.ClusterID))
	}
	return seek.Open(ctx, seek.SessionConfig{
		Attester: b.cfg.Attester, Lock: lock, Dial: b.cfg.Timing.Dial, Log: b.log,
		Judges: seek.Judges{OwnerKey: b.ownerKey, NoOwnerKey: b.cfg.Image.NoOwnerKey, Lowest: b.cfg.Image.LowestPolicySerial, EKRoots: b.cfg.Image.EKRoots, Bank: b.bank, PCRs: b.cfg.TPM, NewVerifier: b.cfg.NewVerifier, Newest: b.lock.newest},
	}, endpoint, first)
}
