package discovery

import (
	"context"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// EndorsementKeyer reads the endorsement key of a TPM.
type EndorsementKeyer interface {
	EndorsementKey(ctx context.Context) (tpm.EK, error)
}

// MachineID reads the machine's own ID. It is no proof for a peer. Its errors are MACHINE_CONFIG.
func MachineID(ctx context.Context, t EndorsementKeyer) (attest.MachineID, error) {
	ek, err := t.EndorsementKey(ctx)
	if err != nil {
		return attest.MachineID{}, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "this machine's TPM has no usable endorsement key: %w", err)
	}
	spki, err := ek.SPKI()
	if err != nil {
		return attest.MachineID{}, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "this machine's TPM has no usable endorsement key: %w", err)
	}
	return attest.MachineIDOf(spki), nil
}
