package tdx

import (
	"crypto/x509"
	"time"
)

// Genuine is [Verify] without the binding: some captured quotes are bound to nothing.
var Genuine = genuine

// Signatures checks a quote's signatures, without collateral, and returns its content.
func Signatures(quote []byte) (*Quote, error) {
	p, err := parse(quote)
	if err != nil {
		return nil, err
	}
	return p.Quote, p.checkSignatures()
}

// Chain checks the certificates of a quote.
func Chain(quote []byte, c Collateral, roots []*x509.Certificate, now time.Time) error {
	p, err := parse(quote)
	if err != nil {
		return err
	}
	if err := p.checkIssued(roots, now); err != nil {
		return err
	}
	return p.checkRevoked(c, roots, now)
}

// SVN formats TEE_TCB_SVN.
var SVN = svn
