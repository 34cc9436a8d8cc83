package orders

import (
	"context"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"time"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// NoteRecorded notes that a joinservice has recorded that an order runs, and still has the order: it is nil or another one if its owner has withdrawn it.
func NoteRecorded(root string, r *joinv1.OrderReport, has *joinv1.OwnerOrder) error {
	digest := order{has.GetText(), has.GetSignature()}.signed().Digest()
	if r.GetState() != wireStates[Running] || hex.EncodeToString(r.GetDigest()) != digest {
		return nil
	}
	return machine.WriteFile(filepath.Join(root, Recorded), fmt.Appendf(nil, "%q", digest), 0o600, 0o700)
}

// AwaitRecorded waits until a joinservice has recorded that the latest order runs: the owner's program learns of an order that ends this machine's life in
// the cluster only by that.
func AwaitRecorded(ctx context.Context, root string, every time.Duration) error {
	var rec record
	if err := read(filepath.Join(root, Journal), &rec); err != nil {
		return err
	}
	for {
		var digest string
		if err := read(filepath.Join(root, Recorded), &digest); err == nil && digest == rec.Last.Order.signed().Digest() {
			return nil
		}
		if err := retry.Wait(ctx, every); err != nil {
			return fmt.Errorf("no joinservice has recorded that the order runs: %w", err)
		}
	}
}
