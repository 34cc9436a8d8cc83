package snp

import (
	"crypto/x509"
	_ "embed" // AMD's certificates
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Authority has the certificates of one product that keys of chips are issued by.
type Authority struct {
	// Root is AMD's root key, ARK.
	Root *x509.Certificate
	// VCEK and VLEK are the issuers of both kinds of keys, ASK and ASVK. A kind without issuer is
	// refused.
	VCEK, VLEK *x509.Certificate
	// RevocationLists are the Root's lists of revoked issuers, in DER: an issuer must be in none of
	// them. Without one everything is refused, except with InsecureNoRevocationLists.
	RevocationLists [][]byte
	// InsecureNoRevocationLists accepts keys below an issuer that AMD may have revoked.
	InsecureNoRevocationLists bool
}

// Authorities has those of each product. A product without one is refused (A3).
type Authorities map[Product]Authority

// AMD's certificates: ARK, ASK, ASVK of each product, from kdsintf.amd.com (google/go-sev-guest,
// af1c107a648f47253da23a9de7a7c82ec073cfdb, verify/trust).
var (
	//go:embed amd/milan.pem
	milanPEM []byte
	//go:embed amd/genoa.pem
	genoaPEM []byte
	//go:embed amd/turin.pem
	turinPEM []byte
)

// AMD returns AMD's authorities, without revocation lists: the caller adds them.
func AMD() Authorities {
	out := Authorities{}
	for p, b := range map[Product][]byte{Milan: milanPEM, Genoa: genoaPEM, Turin: turinPEM} {
		c, err := hardware.ParsePEM(b, 3)
		if err != nil {
			panic(err) // of the constants above
		}
		out[p] = Authority{Root: c[0], VCEK: c[1], VLEK: c[2]}
	}
	return out
}

// check checks the chain of a key's certificate: key, issuer, root.
func (a Authority) check(c *x509.Certificate, k Key, now time.Time) error {
	issuer := a.VCEK
	if k == VLEK {
		issuer = a.VLEK
	}
	for _, step := range [][2]*x509.Certificate{{a.Root, a.Root}, {issuer, a.Root}, {c, issuer}} {
		if err := hardware.CheckIssued(step[0], step[1], now); err != nil {
			return hardware.Refuse(hardware.Untrusted, "the certificate of the %s: %w", k, err)
		}
	}
	if c.IsCA {
		return hardware.Refuse(hardware.Untrusted, "the certificate of the %s is that of an authority", k)
	}
	if a.InsecureNoRevocationLists {
		return nil
	}
	return hardware.CheckRevoked(a.RevocationLists, a.Root, now, issuer)
}
