package discovery

import (
	"context"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// Endorser is the part of a TPM that decides by which endorsement the machine is known.
type Endorser = tpm2.Endorser

// MachineID reads the machine's own ID. It is no proof for a peer. Its errors are MACHINE_CONFIG.
func MachineID(ctx context.Context, t Endorser) (attest.MachineID, error) {
	id, _, err := tpm2.Identity(ctx, t)
	if err != nil {
		return attest.MachineID{}, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "this machine's TPM has no usable endorsement: %w", err)
	}
	return id, nil
}
