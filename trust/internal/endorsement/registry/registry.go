// Package registry lists the endorsements. For verifiers, a new one is a package beside the others and a
// line here; what else it takes is in docs/endorsements.md, and why in docs/decisions/0022.
package registry

import (
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/bareek"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/endorsement/nitrotpm"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
)

// All lists the endorsements.
var All = []endorsement.Endorsement{
	ekcert.Endorsement{},
	bareek.Endorsement{},
	platformak.Endorsement{},
	nitrotpm.Endorsement{},
}

// Of returns the one endorsement that the evidence carries. It refuses with EVIDENCE_MALFORMED if
// there is none, or more than one: then the machine could have several IDs (A8).
func Of(e *attestv1.Tpm2Evidence) (endorsement.Endorsement, error) {
	var found endorsement.Endorsement
	for _, one := range All {
		if !one.In(e) {
			continue
		}
		if found != nil {
			return nil, endorsement.Refuse(endorsement.Malformed, "the evidence carries two endorsements, %s and %s, want one", found.Name(), one.Name())
		}
		found = one
	}
	if found == nil {
		return nil, endorsement.Refuse(endorsement.Malformed, "the evidence carries no endorsement of its attestation key")
	}
	return found, found.CheckSizes(e)
}

// Rules are the rules of a policy, by the name of their endorsement. The zero value accepts nothing
// (A3).
type Rules map[string]endorsement.Rules

// Unlisted returns the rules for a machine that no list of the policy has yet; nil if no list could
// have it. A policy without a list of machines without EK certificates could get one.
func (r Rules) Unlisted(endorsedBy string) endorsement.Rules {
	if found := r[endorsedBy]; found != nil || endorsedBy != bareek.Name {
		return found
	}
	return bareek.None
}

// Parse reads the rules of a policy for all endorsements.
func Parse(p *attestv1.Policy) (Rules, error) {
	out := Rules{}
	for _, one := range All {
		r, err := one.Parse(p)
		if err != nil {
			return nil, err
		}
		if r != nil {
			out[one.Name()] = r
		}
	}
	if len(out) == 0 {
		return nil, endorsement.Invalid("tpm2.ekRoots is empty, so no machine could be accepted: list the authorities that certify endorsement keys, or in tpm2.bareMachineIds the machines without EK certificates")
	}
	return out, nil
}
