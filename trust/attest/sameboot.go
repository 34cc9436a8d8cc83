package attest

import (
	"bytes"
	"crypto"
	"crypto/x509"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/endorsement/registry"
)

// SameBoot accepts machines that booted the same image as this machine. A machine that does not
// know its owner's key yet uses it to appraise its first joinservice: it trusts another machine
// with the same image as it trusts itself.
type SameBoot struct {
	policy *Policy
}

// NewSameBoot takes this machine's own PCR values (index to value, read from its TPM) and the EK
// roots of its image. All boot PCRs must be there.
func NewSameBoot(bank crypto.Hash, own map[int][]byte, roots []*x509.Certificate) (*SameBoot, error) {
	if len(roots) == 0 {
		return nil, Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "the image has no EK roots, so no machine could be accepted: set ekRoots in its configuration")
	}
	p := &Policy{message: &attestv1.Policy{}, bank: bank, acceptsTPM: true, anyFirmware: true}
	p.rules = registry.Rules{ekcert.Name: ekcert.AnyKey(roots)} // the machine's identity does not matter here
	image := boot{name: "own", pcrs: map[int][]byte{}}
	for _, i := range imagePCRs {
		if len(own[i]) != bank.Size() {
			return nil, Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "own PCR %d has %d bytes, want %d", i, len(own[i]), bank.Size())
		}
		image.pcrs[i] = bytes.Clone(own[i])
	}
	p.images = []boot{image}
	return &SameBoot{policy: p}, nil
}

// For returns an Appraiser that expects one of the lock states.
func (s *SameBoot) For(locks ...Lock) Appraiser { return s.policy.For(locks...) }
