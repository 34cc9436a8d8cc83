package tpm2

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/internal/endorsement/bareek"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/endorsement/nitrotpm"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
	"github.com/muster-k8s/muster/trust/tpm"
)

// endorsed is the endorsement that goes into evidence. One field is set.
type endorsed struct {
	certificates [][]byte // of the endorsement key
	bare         []byte   // SubjectPublicKeyInfo of an endorsement key without a certificate
	platform     *attestv1.PlatformKey
	nitro        []byte // attestation document
}

// Endorser is the part of a [tpm.Device] that decides by which endorsement a machine is known.
type Endorser interface {
	PlatformCertificates(ctx context.Context) ([][]byte, error)
	NitroDocument(ctx context.Context, nonce [32]byte) ([]byte, error)
	EndorsementKey(ctx context.Context) (tpm.EK, error)
}

// endorse makes the machine's endorsement: by the platform key if the TPM has one, else by NitroTPM's
// document, else by the endorsement key's certificate, else by the endorsement key alone. The order is
// fixed, because one TPM must not be two machines (A8). top is what the quote signs. The caller holds the token.
func (a *Attester) endorse(ctx context.Context, top digest) (endorsed, error) {
	found, err := keys(ctx, a.cfg.TPM, top)
	if found.requested {
		a.next = time.Now().Add(reportInterval)
	}
	switch {
	case err != nil:
		return endorsed{}, err
	case found.platform != nil:
		c, err := a.cfg.TPM.Certify(ctx, top)
		return endorsed{platform: &attestv1.PlatformKey{Certificates: found.platform, Attest: c.Attest, Signature: c.Signature}}, err
	case found.nitro != nil:
		if a.cfg.Bank != tpm.SHA384 {
			return endorsed{}, fmt.Errorf("tpm2: a NitroTPM document has the PCRs of bank sha384 alone, this machine quotes %s: set tpm.bank of its image.yaml to sha384", a.cfg.Bank)
		}
		return endorsed{nitro: found.nitro}, nil
	case len(found.ek.Certificates) > 0:
		return endorsed{certificates: found.ek.Certificates}, nil
	}
	spki, err := found.ek.SPKI()
	return endorsed{bare: spki}, err
}

// known is by what a machine is known: the platform key's certificates, NitroTPM's document, or the
// endorsement key.
type known struct {
	platform [][]byte
	nitro    []byte
	ek       tpm.EK
	// requested is whether the host was asked for a document, with success or not.
	requested bool
}

// keys returns the first of them that the TPM has. A document is made for nonce.
func keys(ctx context.Context, t Endorser, nonce digest) (known, error) {
	platform, err := t.PlatformCertificates(ctx)
	if !errors.Is(err, tpm.ErrNoPlatformKey) {
		return known{platform: platform}, err
	}
	document, err := t.NitroDocument(ctx, nonce)
	if !errors.Is(err, tpm.ErrNoNitroTPM) {
		return known{nitro: document, requested: true}, err
	}
	ek, err := t.EndorsementKey(ctx)
	return known{ek: ek}, err
}

// Identity returns the machine's own ID and the name of its endorsement. It is no proof for a peer.
func Identity(ctx context.Context, t Endorser) (attest.MachineID, string, error) {
	found, err := keys(ctx, t, digest{})
	switch {
	case err != nil:
		return attest.MachineID{}, "", err
	case found.platform != nil:
		leaf, err := x509.ParseCertificate(found.platform[0])
		if err != nil {
			return attest.MachineID{}, "", fmt.Errorf("platform key certificate: %w", err)
		}
		instance, err := platformak.Identify(leaf)
		if err != nil {
			return attest.MachineID{}, "", fmt.Errorf("platform key certificate: %w", err)
		}
		return platformak.MachineID(leaf, instance), platformak.Name, nil
	case found.nitro != nil:
		module, err := nitrotpm.Module(found.nitro)
		if err != nil {
			return attest.MachineID{}, "", fmt.Errorf("NitroTPM document: %w", err)
		}
		return nitrotpm.MachineID(module), nitrotpm.Name, nil
	}
	spki, err := found.ek.SPKI()
	if err != nil {
		return attest.MachineID{}, "", err
	}
	if len(found.ek.Certificates) > 0 {
		return attest.MachineIDOf(spki), ekcert.Name, nil
	}
	return attest.MachineIDOf(spki), bareek.Name, nil
}
