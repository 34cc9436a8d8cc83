// Package nitrotpm is the endorsement by the attestation document of an AWS NitroTPM: AWS's hypervisor
// signs the instance's module ID, the PCRs of its TPM at that moment, and what the instance's software
// has passed to it. Muster passes the attestation key (AK) and this session's value.
//
// So a document proves which software has named the AK, but not that the AK is in the TPM: nothing is
// left to activate, because NitroTPM has no certified endorsement key. It follows that the PCRs of the
// quote count only because they equal those of the document, and that a machine has its ID by the
// instance alone.
package nitrotpm

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Name is the endorsement's name.
const Name = "nitro-tpm"

// Provider is the cloud's name, as in [checked.Instance].
const Provider = "aws"

// maxDocument is the limit of attest.proto, in bytes. Those of AWS have about 5,000.
const maxDocument = 8 << 10

// maxAge bounds how far a document's time may be from the verifier's clock. Documents are made for a
// session, and their certificates begin 3 s before; so this is for clocks that differ.
const maxAge = 5 * time.Minute

const sha384 = "SHA384" // AWS's name of the bank

var chain = endorsement.Chain{What: "NitroTPM document certificate", Purpose: "certificates of NitroTPM documents"}

// Endorsement implements [endorsement.Endorsement].
type Endorsement struct{}

// Name implements [endorsement.Endorsement].
func (Endorsement) Name() string { return Name }

// In implements [endorsement.Endorsement].
func (Endorsement) In(e *attestv1.Tpm2Evidence) bool { return len(e.GetNitroDocument()) > 0 }

// CheckSizes implements [endorsement.Endorsement].
func (Endorsement) CheckSizes(e *attestv1.Tpm2Evidence) error {
	if n := len(e.GetNitroDocument()); n > maxDocument {
		return endorsement.Refuse(endorsement.Malformed, "nitro_document has %d bytes, more than %d", n, maxDocument)
	}
	return nil
}

// Verify implements [endorsement.Endorsement]. Beside EK_UNTRUSTED, for documents of other modules and
// for certificates, it refuses with EVIDENCE_MALFORMED, BINDING_MISMATCH, AK_TEMPLATE and
// SIGNATURE_INVALID. The signatures, which cost most, come last: those of the certificates from the
// root downwards, then the document's.
func (Endorsement) Verify(in endorsement.Input) (endorsement.Result, error) {
	s, d, err := parse(in.Evidence.GetNitroDocument())
	if err != nil {
		return endorsement.Result{}, endorsement.Refuse(endorsement.Malformed, "nitro_document: %w", err)
	}
	instance, err := d.check(in)
	if err != nil {
		return endorsement.Result{}, err
	}
	path, err := authenticate(s, d, in.Roots, in.Now)
	if err != nil {
		return endorsement.Result{}, err
	}
	return endorsement.Result{Endorsement: checked.Endorsement{
		EndorsedBy: Name,
		Machine:    MachineID(d.Module),
		KeyKind:    string(endorsement.KindOf(in.AK)),
		Root:       path[len(path)-1],
		Chain:      endorsement.Shown(path),
		Instance:   checked.Instance{Provider: Provider, Name: instance},
	}}, nil
}

// authenticate checks that AWS has signed the document, and returns the certificates from its own to the
// root. They must be valid at the time that the document states, which must be about now: so their ends
// are enforced, and a clock that is a little slow refuses no certificate that began 3 s ago.
func authenticate(s *signed, d *document, roots []*x509.Certificate, now time.Time) ([]*x509.Certificate, error) {
	ders := d.certificates()
	if err := chain.CheckSizes(ders); err != nil {
		return nil, err
	}
	certs, err := chain.Parse(ders)
	if err != nil {
		return nil, err
	}
	key, err := d.signer(certs[0])
	if err != nil {
		return nil, err
	}
	if age := now.Sub(d.at()); age > maxAge || age < -maxAge {
		return nil, endorsement.Refuse(endorsement.Untrusted, "the document was made at %s, now it is %s: they may differ by %s", d.at().UTC(), now.UTC(), maxAge)
	}
	path, err := chain.Path(certs, roots, d.at())
	if err != nil {
		return nil, err
	}
	if !s.verifySignature(key) {
		return nil, endorsement.Refuse(attestv1.Reason_REASON_SIGNATURE_INVALID, "the document's signature is not by its certificate's key")
	}
	return path, nil
}

// check compares the document's fields with the session and the quote, and returns the instance's ID.
func (d *document) check(in endorsement.Input) (string, error) {
	if len(d.EnclavePCRs) > 0 {
		return "", endorsement.Refuse(endorsement.Untrusted, "the document of module %q has the field pcrs: it is that of a Nitro Enclave, not of a TPM", d.Module)
	}
	instance, err := instanceOf(d.Module)
	if err != nil {
		return "", endorsement.Refuse(endorsement.Untrusted, "the document: %w", err)
	}
	if string(d.Nonce) != string(in.Signed[:]) { // A1
		return "", endorsement.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the document was made for %x, want %x", string(d.Nonce), in.Signed)
	}
	if string(d.UserData) != tpm.NitroUserData { // A5
		return "", endorsement.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the document's user_data are %x, want %q: another program has asked for it", string(d.UserData), tpm.NitroUserData)
	}
	spki, err := x509.MarshalPKIXPublicKey(in.AK)
	if err != nil || string(d.PublicKey) != string(spki) {
		return "", endorsement.Refuse(attestv1.Reason_REASON_AK_TEMPLATE, "the document names the key %x, the quote is by %x", string(d.PublicKey), spki)
	}
	// Nothing proves that the AK is in the TPM, so for a bank that the document lacks, there would be
	// only the peer's own signature.
	if bank := in.Evidence.GetBank(); bank != uint32(tpm.SHA384) || d.Digest != sha384 {
		return "", endorsement.Refuse(endorsement.Malformed, "the quote has PCRs of %s, the document of %q: both must be of SHA-384", tpm.Bank(bank), d.Digest)
	}
	if err := d.samePCRs(in.Evidence.GetPcrs()); err != nil { // A2
		return "", endorsement.Refuse(attestv1.Reason_REASON_SIGNATURE_INVALID, "the PCR values sent are not those that AWS has signed: %w", err)
	}
	return instance, nil
}

// signer returns the key of the document's certificate, which AWS issues for one module alone. Those of
// an instance's enclaves have the same issuer.
func (d *document) signer(leaf *x509.Certificate) (*ecdsa.PublicKey, error) {
	key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	switch {
	case !ok || key.Curve != elliptic.P384():
		return nil, endorsement.Refuse(endorsement.Untrusted, "the document's certificate has no key on P-384, as ES384 needs")
	case leaf.IsCA:
		return nil, endorsement.Refuse(endorsement.Untrusted, "the document's certificate is that of an authority")
	case leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return nil, endorsement.Refuse(endorsement.Untrusted, "the document's certificate is not for signatures")
	case !strings.HasPrefix(leaf.Subject.CommonName, d.Module+"."):
		return nil, endorsement.Refuse(endorsement.Untrusted, "the document's certificate is for %q, not for its module %q", leaf.Subject.CommonName, d.Module)
	}
	return key, nil
}
