package tpm2

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/internal/endorsement/bareek"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
	"github.com/muster-k8s/muster/trust/tpm"
)

// endorsed is the endorsement that goes into evidence. One field is set.
type endorsed struct {
	certificates [][]byte // of the endorsement key
	bare         []byte   // SubjectPublicKeyInfo of an endorsement key without a certificate
	platform     *attestv1.PlatformKey
}

// Endorser is the part of a [tpm.Device] that decides by which endorsement a machine is known.
type Endorser interface {
	PlatformCertificates(ctx context.Context) ([][]byte, error)
	EndorsementKey(ctx context.Context) (tpm.EK, error)
}

// endorse makes the machine's endorsement: by the platform key if the TPM has one, else by the
// endorsement key's certificate, else by the endorsement key alone. The order is fixed, because one
// TPM must not be two machines (A8). top is what the quote signs.
func (a *Attester) endorse(ctx context.Context, top digest) (endorsed, error) {
	platform, ek, err := keys(ctx, a.cfg.TPM)
	if err != nil {
		return endorsed{}, err
	}
	if platform != nil {
		c, err := a.cfg.TPM.Certify(ctx, top)
		return endorsed{platform: &attestv1.PlatformKey{Certificates: platform, Attest: c.Attest, Signature: c.Signature}}, err
	}
	if len(ek.Certificates) > 0 {
		return endorsed{certificates: ek.Certificates}, nil
	}
	spki, err := ek.SPKI()
	return endorsed{bare: spki}, err
}

// keys returns the platform key's certificates, or, if there is no such key, the endorsement key.
func keys(ctx context.Context, t Endorser) ([][]byte, tpm.EK, error) {
	platform, err := t.PlatformCertificates(ctx)
	if err == nil {
		return platform, tpm.EK{}, nil
	}
	if !errors.Is(err, tpm.ErrNoPlatformKey) {
		return nil, tpm.EK{}, err
	}
	ek, err := t.EndorsementKey(ctx)
	return nil, ek, err
}

// Identity returns the machine's own ID and the name of the endorsement that it is known by. It is no
// proof for a peer.
func Identity(ctx context.Context, t Endorser) (attest.MachineID, string, error) {
	platform, ek, err := keys(ctx, t)
	if err != nil {
		return attest.MachineID{}, "", err
	}
	if platform != nil {
		leaf, err := x509.ParseCertificate(platform[0])
		if err != nil {
			return attest.MachineID{}, "", fmt.Errorf("platform key certificate: %w", err)
		}
		instance, err := platformak.Identify(leaf)
		if err != nil {
			return attest.MachineID{}, "", fmt.Errorf("platform key certificate: %w", err)
		}
		return platformak.MachineID(leaf, instance), platformak.Name, nil
	}
	spki, err := ek.SPKI()
	if err != nil {
		return attest.MachineID{}, "", err
	}
	if len(ek.Certificates) > 0 {
		return attest.MachineIDOf(spki), ekcert.Name, nil
	}
	return attest.MachineIDOf(spki), bareek.Name, nil
}
