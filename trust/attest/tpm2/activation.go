package tpm2

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// nameSize is the size of an attestation key's name: its name algorithm is SHA-256.
const nameSize = 2 + sha256.Size

// Activation is a challenge that is made before the evidence, for a verifier that can send only one
// message. It takes the machine's keys from another source, which need not be trusted: the answer
// proves that one TPM has both keys, and [Verifier.Verify] still asks for a challenge if the
// evidence has other ones.
type Activation struct {
	machine   attest.MachineID
	pair      pair
	challenge *attestv1.Challenge
	secret    []byte // nil: there is none, or it was answered
}

// NewActivation makes a challenge for the endorsement key with this SubjectPublicKeyInfo in DER
// (RFC 5280, section 4.1.2.7) and the attestation key with this name (TPM 2.0 Library, Part 1,
// section 16). The refusal of a key that no endorsement key can be is EK_UNTRUSTED, that of a name
// that no attestation key can have AK_TEMPLATE.
func NewActivation(ekPublic, akName []byte) (*Activation, error) {
	public, err := x509.ParsePKIXPublicKey(ekPublic)
	if err != nil {
		return nil, refuse(badEK, "endorsement key: %w", err)
	}
	key, err := tpm.EncapsulationKey(public)
	if err != nil {
		return nil, refuse(badEK, "%w", err)
	}
	if len(akName) != nameSize {
		return nil, refuse(badAK, "the attestation key's name has %d bytes, want %d", len(akName), nameSize)
	}
	a := &Activation{machine: attest.MachineIDOf(ekPublic), pair: pairOf(sha256.Sum256(ekPublic), akName)}
	a.challenge, a.secret, err = newChallenge(key, akName)
	return a, err
}

// Machine returns the ID of the machine with the endorsement key. [Verifier.Verify] also accepts
// evidence of other machines, such as those that a platform key endorses: compare its claims' machine.
func (a *Activation) Machine() attest.MachineID { return a.machine }

// Challenge returns the challenge.
func (a *Activation) Challenge() *attestv1.Challenge { return a.challenge }

// Activated takes the answer to a challenge, which must be for binding b. After that, [Verifier.Verify]
// asks for no challenge if the evidence has the two keys. The refusal is ACTIVATION_FAILED; after a
// refusal every further call is refused too.
func (v *Verifier) Activated(a *Activation, r *attestv1.Response, b attest.Binding) error {
	secret := a.secret
	a.secret = nil
	if secret == nil {
		return refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "the challenge was answered before")
	}
	if !hmac.Equal(ActivationMAC(secret, b), r.GetMac()) {
		return refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "the answer to the challenge is wrong: the two keys are not in one TPM, or the answer is to another challenge")
	}
	v.known.add(a.pair, v.now())
	v.open.add(a.pair, v.now()) // the evidence says whether the endorsement key has a certificate
	return nil
}
