package tpm2

import (
	"crypto/x509"
	"time"

	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/wire"
)

// Waiting returns how many statements wait for the next quote.
func Waiting(a *Attester) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting == nil {
		return 0
	}
	return len(a.waiting.leaves)
}

// ParseSignature is for fuzzing.
var ParseSignature = wire.VerifySignature

// ParseTPMName is for fuzzing.
var ParseTPMName = endorsement.ParseTPMName

// CountSignatureChecks verifies an EK certificate's chain and returns how many signatures were checked.
func CountSignatureChecks(ders [][]byte, roots []*x509.Certificate, now time.Time) (int, error) {
	checks := 0
	_, err := ekcert.Verify(ders, roots, now, func(c, issuer *x509.Certificate) error {
		checks++
		return c.CheckSignatureFrom(issuer)
	})
	return checks, err
}
