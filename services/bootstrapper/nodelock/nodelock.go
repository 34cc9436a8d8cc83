// Package nodelock is the irrevocable half of a machine's node lock: PCR 15, which identifies the machine's cluster until the next boot. The durable
// half is the journal.
package nodelock

import (
	"bytes"
	"context"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// PCRs is the part of the TPM that the node lock uses.
type PCRs interface {
	ReadPCR(ctx context.Context, bank tpm.Bank, pcr int) ([]byte, error)
	Measure(ctx context.Context, pcr int, data []byte) error
}

// Settle extends PCR 15 with the machine's cluster (B1). It does nothing if PCR 15 already has that value, and refuses with LOCK_FOREIGN if it has any
// other but zero.
func Settle(ctx context.Context, pcrs PCRs, bank tpm.Bank, clusterID [32]byte) error {
	hash, ok := bank.Hash()
	if !ok {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "unknown PCR %s", bank)
	}
	now, err := pcrs.ReadPCR(ctx, bank, attest.LockPCR)
	if err != nil {
		return fmt.Errorf("read the node lock: %w", err)
	}
	want := attest.LockValue(hash, clusterID)
	if bytes.Equal(now, want) {
		return nil // extended before a crash: extending again would give another value
	}
	if !bytes.Equal(now, make([]byte, len(want))) {
		return foreign(now)
	}
	if err := pcrs.Measure(ctx, attest.LockPCR, clusterID[:]); err != nil {
		return fmt.Errorf("take the node lock: %w", err)
	}
	if now, err = pcrs.ReadPCR(ctx, bank, attest.LockPCR); err != nil {
		return fmt.Errorf("read the node lock: %w", err)
	}
	if !bytes.Equal(now, want) {
		return foreign(now)
	}
	return nil
}

// Taken reports whether the machine was locked since it booted, to any cluster.
func Taken(ctx context.Context, pcrs PCRs, bank tpm.Bank) (bool, error) {
	now, err := pcrs.ReadPCR(ctx, bank, attest.LockPCR)
	if err != nil {
		return false, fmt.Errorf("read the node lock: %w", err)
	}
	return !bytes.Equal(now, make([]byte, len(now))), nil
}

func foreign(pcr []byte) error {
	return attest.Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "PCR %d is %x: the machine was locked to another cluster since it booted; reboot it", attest.LockPCR, pcr)
}
