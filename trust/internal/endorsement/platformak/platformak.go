// Package platformak is the endorsement by the attestation key that a cloud has put into a virtual
// machine's TPM and certified (the platform key). That key certifies Muster's attestation key (AK) by
// TPM2_Certify (TPM 2.0 Library, Part 3, section 18.2): the TPM signs that an object with the AK's name
// is loaded in it, private part included. So nothing is left to activate.
//
// The certificate's authority states that the platform key is a restricted one, which signs only what
// the TPM itself has made. Nothing in the evidence could prove that, so no public area of it is sent.
package platformak

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/wire"
)

// Name is the endorsement's name.
const Name = "platform-ak"

// maxStructure is the limit of attest.proto for TPMS_ATTEST and TPMT_SIGNATURE, in bytes.
const maxStructure = 1 << 10

const (
	stAttestCertify = 0x8017 // TPM_ST_ATTEST_CERTIFY, Part 2, 6.9
	rhEndorsement   = "\x40\x00\x00\x0B"
)

// Extended key usages of the TCG (EK Credential Profile, 3.2.16): clouds use the one of endorsement
// keys for issuers of attestation keys, too.
var (
	oidEKCertificate  = asn1.ObjectIdentifier{2, 23, 133, 8, 1}
	oidAIKCertificate = asn1.ObjectIdentifier{2, 23, 133, 8, 3}
)

var chain = endorsement.Chain{What: "platform key certificate", Purpose: "attestation key certificates", Usages: []asn1.ObjectIdentifier{oidEKCertificate, oidAIKCertificate}}

// Endorsement implements [endorsement.Endorsement].
type Endorsement struct{}

// Name implements [endorsement.Endorsement].
func (Endorsement) Name() string { return Name }

// In implements [endorsement.Endorsement].
func (Endorsement) In(e *attestv1.Tpm2Evidence) bool { return e.GetPlatformKey() != nil }

// CheckSizes implements [endorsement.Endorsement].
func (Endorsement) CheckSizes(e *attestv1.Tpm2Evidence) error {
	k := e.GetPlatformKey()
	for name, b := range map[string][]byte{"attest": k.GetAttest(), "signature": k.GetSignature()} {
		if len(b) > maxStructure {
			return endorsement.Refuse(endorsement.Malformed, "platform_key.%s has %d bytes, more than %d", name, len(b), maxStructure)
		}
	}
	return chain.CheckSizes(k.GetCertificates())
}

// Verify implements [endorsement.Endorsement]. Beside EK_UNTRUSTED for certificates it refuses with
// EVIDENCE_MALFORMED, SIGNATURE_INVALID, BINDING_MISMATCH and AK_TEMPLATE.
func (Endorsement) Verify(in endorsement.Input) (endorsement.Result, error) {
	k := in.Evidence.GetPlatformKey()
	certs, err := chain.Parse(k.GetCertificates())
	if err != nil {
		return endorsement.Result{}, err
	}
	leaf := certs[0]
	instance, err := Identify(leaf)
	if err != nil {
		return endorsement.Result{}, endorsement.Refuse(endorsement.Untrusted, "the platform key's certificate: %w", err)
	}
	if err := endorsement.HandleSAN(leaf); err != nil {
		return endorsement.Result{}, endorsement.Refuse(endorsement.Untrusted, "the platform key certificate's subject alternative name: %w", err)
	}
	if err := verifyCertify(leaf, k.GetAttest(), k.GetSignature(), in); err != nil {
		return endorsement.Result{}, err
	}
	path, err := chain.Path(certs, in.Roots, in.Now)
	if err != nil {
		return endorsement.Result{}, err
	}
	return endorsement.Result{Endorsement: checked.Endorsement{
		EndorsedBy: Name,
		Machine:    MachineID(leaf, instance),
		KeyKind:    string(endorsement.KindOf(leaf.PublicKey)),
		Root:       path[len(path)-1],
		Chain:      endorsement.Shown(path),
		Instance:   instance,
	}}, nil
}

// verifyCertify checks that the platform key has signed, for this session, that the AK is in its TPM.
func verifyCertify(leaf *x509.Certificate, attest, signature []byte, in endorsement.Input) error {
	if err := wire.VerifySignature(leaf.PublicKey, attest, signature); err != nil {
		return err
	}
	r := wire.NewReader(attest)
	if magic, typ := r.U32(), r.U16(); magic != wire.Generated || typ != stAttestCertify {
		return endorsement.Refuse(endorsement.Malformed, "platform_key.attest: magic 0x%08x, type 0x%04x: not made by TPM2_Certify", magic, typ)
	}
	_, extra := r.Sized(), r.Sized() // the signer's qualified name: its certificate identifies it
	r.Take(8 + 4 + 4 + 1 + 8)        // TPMS_CLOCK_INFO and the firmware version: the quote has them
	name, qualified := r.Sized(), r.Sized()
	if !r.Done() {
		return endorsement.Refuse(endorsement.Malformed, "platform_key.attest is malformed")
	}
	if !bytes.Equal(extra, in.Signed[:]) { // A1
		return endorsement.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the platform key has signed for %x, want %x", extra, in.Signed)
	}
	if !bytes.Equal(name, in.AKName) {
		return endorsement.Refuse(attestv1.Reason_REASON_AK_TEMPLATE, "the platform key has certified the key %x, the quote is by %x", name, in.AKName)
	}
	want := sha256.Sum256(append([]byte(rhEndorsement), in.AKName...))
	if !bytes.Equal(qualified, append([]byte{0x00, 0x0B}, want[:]...)) {
		return endorsement.Refuse(attestv1.Reason_REASON_AK_TEMPLATE, "the certified key is no primary key of the endorsement hierarchy")
	}
	return nil
}
