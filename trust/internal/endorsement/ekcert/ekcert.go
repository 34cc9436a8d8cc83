// Package ekcert is the endorsement by the certificate of the TPM's endorsement key (EK). A root of
// the policy certifies the EK, and the EK's TPM opens a credential for the attestation key
// (activation). The machine ID is the hash of the EK.
package ekcert

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"slices"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// Name is the endorsement's name.
const Name = "ek-certificate"

// OIDEKCertificate is tcg-kp-EKCertificate, the extended key usage of endorsement keys (TCG EK
// Credential Profile for TPM 2.0, version 2.5, section 3.2.16).
var OIDEKCertificate = asn1.ObjectIdentifier{2, 23, 133, 8, 1}

var chain = endorsement.Chain{What: "EK certificate", Purpose: "endorsement key certificates", Usages: []asn1.ObjectIdentifier{OIDEKCertificate}}

// Endorsement implements [endorsement.Endorsement].
type Endorsement struct{}

// Name implements [endorsement.Endorsement].
func (Endorsement) Name() string { return Name }

// In implements [endorsement.Endorsement].
func (Endorsement) In(e *attestv1.Tpm2Evidence) bool { return len(e.GetEkCertificates()) > 0 }

// CheckSizes implements [endorsement.Endorsement].
func (Endorsement) CheckSizes(e *attestv1.Tpm2Evidence) error {
	return chain.CheckSizes(e.GetEkCertificates())
}

// Verify implements [endorsement.Endorsement]: it checks the chain from the endorsement key's
// certificate to one of the roots. EVIDENCE_MALFORMED: no certificates; EK_UNTRUSTED: everything
// else.
func (Endorsement) Verify(in endorsement.Input) (endorsement.Result, error) {
	path, err := Verify(in.Evidence.GetEkCertificates(), in.Roots, in.Now, nil)
	if err != nil {
		return endorsement.Result{}, err
	}
	leaf := path[0]
	return endorsement.Result{
		Endorsement: checked.Endorsement{
			EndorsedBy: Name,
			Machine:    sha256.Sum256(leaf.RawSubjectPublicKeyInfo),
			EKPublic:   leaf.RawSubjectPublicKeyInfo,
			KeyKind:    string(endorsement.KindOf(leaf.PublicKey)),
			Root:       path[len(path)-1],
			Chain:      endorsement.Shown(path),
		},
		Activate: leaf.PublicKey,
	}, nil
}

// Verify returns the checked certificates, from the endorsement key's to the root's. signed is that
// of [endorsement.Chain].
func Verify(ders [][]byte, roots []*x509.Certificate, now time.Time, signed func(c, issuer *x509.Certificate) error) ([]*x509.Certificate, error) {
	h := chain
	h.Signed = signed
	certs, err := h.Parse(ders)
	if err != nil {
		return nil, err
	}
	leaf := certs[0]
	if !endorsement.Canonical(leaf) {
		return nil, endorsement.Refuse(endorsement.Untrusted, "the EK certificate's key has an unusual type or encoding")
	}
	if leaf.IsCA {
		return nil, endorsement.Refuse(endorsement.Untrusted, "the EK certificate is that of an authority")
	}
	if !slices.ContainsFunc(leaf.UnknownExtKeyUsage, OIDEKCertificate.Equal) {
		return nil, endorsement.Refuse(endorsement.Untrusted, "the certificate lacks the extended key usage of endorsement keys, %s", OIDEKCertificate)
	}
	if leaf.KeyUsage == x509.KeyUsageDigitalSignature { // attestation keys of an older authority of Google also have the usage above
		return nil, endorsement.Refuse(endorsement.Untrusted, "the certificate is for a key that only signs: that of an attestation key, not of an endorsement key")
	}
	if err := endorsement.HandleSAN(leaf); err != nil {
		return nil, endorsement.Refuse(endorsement.Untrusted, "the EK certificate's subject alternative name: %w", err)
	}
	return h.Path(certs, roots, now)
}
