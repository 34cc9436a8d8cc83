// Package bareek is the endorsement by nothing but the policy: the TPM stores no certificate of its
// endorsement key (EK), and the owner has listed the EK's hash. Activation proves that the
// attestation key is with the private part of that EK. Nothing proves that a TPM holds either of
// them: that is what the owner states by listing the machine.
package bareek

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// Name is the endorsement's name.
const Name = "bare-ek"

// maxPublic is the limit of attest.proto for the key, in bytes. One on P-256 has 91.
const maxPublic = 256

// Endorsement implements [endorsement.Endorsement].
type Endorsement struct{}

// Name implements [endorsement.Endorsement].
func (Endorsement) Name() string { return Name }

// In implements [endorsement.Endorsement].
func (Endorsement) In(e *attestv1.Tpm2Evidence) bool { return len(e.GetEkPublic()) > 0 }

// CheckSizes implements [endorsement.Endorsement].
func (Endorsement) CheckSizes(e *attestv1.Tpm2Evidence) error {
	if n := len(e.GetEkPublic()); n > maxPublic {
		return endorsement.Refuse(endorsement.Malformed, "ek_public has %d bytes, more than %d", n, maxPublic)
	}
	return nil
}

// Verify implements [endorsement.Endorsement]. EVIDENCE_MALFORMED: it is no key; EK_UNTRUSTED: it is
// one of another kind than P-256, or in another encoding. All TPMs of the PC Client Profile have
// P-256, and a TPM without certificates would be another machine by each other kind (A8).
func (Endorsement) Verify(in endorsement.Input) (endorsement.Result, error) {
	der := in.Evidence.GetEkPublic()
	key, err := x509.ParsePKIXPublicKey(der)
	if err != nil {
		return endorsement.Result{}, endorsement.Refuse(endorsement.Malformed, "ek_public: %w", err)
	}
	if kind := endorsement.KindOf(key); kind != endorsement.P256 { // A8
		return endorsement.Result{}, endorsement.Refuse(endorsement.Untrusted, "an endorsement key of kind %q without a certificate: only %s is accepted", kind, endorsement.P256)
	}
	// The machine ID is a hash of these bytes, so one key must have one encoding.
	if spki, err := x509.MarshalPKIXPublicKey(key); err != nil || !bytes.Equal(spki, der) { // A8
		return endorsement.Result{}, endorsement.Refuse(endorsement.Untrusted, "ek_public has an unusual encoding")
	}
	id := sha256.Sum256(der)
	return endorsement.Result{
		Endorsement: checked.Endorsement{
			EndorsedBy: Name, Machine: id, EKPublic: bytes.Clone(der), KeyKind: string(endorsement.P256),
			Chain: []checked.Certificate{{Subject: "endorsement key without a certificate", Key: id}},
		},
		Activate: key,
		Open:     true,
	}, nil
}

// rules implement [endorsement.Rules].
type rules struct{ machines map[[32]byte]bool }

// None are the rules of a policy that lists no machine: it accepts none.
var None endorsement.Rules = &rules{}

// Parse implements [endorsement.Endorsement].
func (Endorsement) Parse(p *attestv1.Policy) (endorsement.Rules, error) {
	machines, err := endorsement.ParseMachineIDs("tpm2.bareMachineIds", p.GetTpm2().GetBareMachineIds())
	if err != nil || len(machines) == 0 {
		return nil, err
	}
	for _, s := range p.GetTpm2().GetMachineIds() {
		if id, err := endorsement.ParseHex(s, 32); err == nil && machines[[32]byte(id)] {
			return nil, endorsement.Invalid("tpm2.bareMachineIds and tpm2.machineIds both list machine %s: list it in the former if its TPM has no EK certificate, otherwise in the latter", s)
		}
	}
	return &rules{machines}, nil
}

// Authorities implements [endorsement.Rules]: there are none.
func (r *rules) Authorities() []endorsement.Authority { return nil }

// CheckAuthority implements [endorsement.Rules]: the list takes an authority's place.
func (r *rules) CheckAuthority(f *checked.Facts) error {
	if !r.machines[f.Machine] { // A3, A6
		return endorsement.Refuse(endorsement.Untrusted, "the TPM of machine %x has no EK certificate, and the policy does not list the machine in tpm2.bareMachineIds: if you know that this is your machine's ID, list it there", f.Machine)
	}
	return nil
}

// CheckMachine implements [endorsement.Rules]: the list has decided.
func (r *rules) CheckMachine(*checked.Facts) error { return nil }

// MayAccept implements [endorsement.Rules].
func (r *rules) MayAccept(machine [32]byte) bool { return r.machines[machine] }

// Listed implements [endorsement.Rules].
func (r *rules) Listed(machine [32]byte) string {
	if r.machines[machine] {
		return "tpm2.bareMachineIds"
	}
	return ""
}

// Unlisted implements [endorsement.Rules].
func (r *rules) Unlisted(f *checked.Facts) string {
	if r.machines[f.Machine] {
		return ""
	}
	return "tpm2.bareMachineIds"
}

// OnlyECC implements [endorsement.Rules]: with an RSA attestation key and another endorsement key, a
// TPM without certificates could be a second machine (A8).
func (r *rules) OnlyECC() bool { return true }
