// Package signedpolicy reads the owner's signed policy from the cluster's AttestationPolicy.
package signedpolicy

import (
	"encoding/base64"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Decode returns the policy with its signature, which is not verified yet: [attest.OpenPolicy]. It refuses with
// POLICY_SIGNATURE.
func Decode(p *v1alpha1.AttestationPolicy) (*attestv1.SignedPolicy, error) {
	signature, err := base64.StdEncoding.DecodeString(p.Spec.Signature)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "AttestationPolicy %s: spec.signature is no base64: %w", p.Name, err)
	}
	return &attestv1.SignedPolicy{Policy: []byte(p.Spec.Policy), Signature: signature}, nil
}

// Open returns the policy if a key of the owner has signed it. It refuses with POLICY_SIGNATURE or POLICY_INVALID.
func Open(p *v1alpha1.AttestationPolicy, owner attest.OwnerKeys) (*attest.Policy, error) {
	signed, err := Decode(p)
	if err != nil {
		return nil, err
	}
	return attest.OpenPolicy(owner, signed)
}

// Serial returns the serial of a policy that a key of the owner has signed, also if this version refuses its content: see [attest.OpenSerial].
func Serial(p *v1alpha1.AttestationPolicy, owner attest.OwnerKeys) (uint64, error) {
	signed, err := Decode(p)
	if err != nil {
		return 0, err
	}
	return attest.OpenSerial(owner, signed)
}
