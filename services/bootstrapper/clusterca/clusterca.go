// Package clusterca signs with the cluster's own certificate authority, whose key is on the disk of every control plane.
//
// A control plane needs it while no API server runs: with an expired certificate its kubelet starts no API server, and without an API server there is no
// other signer. The caller makes and keeps the keys; this package takes requests, and its certificates are valid as long as those of the cluster's
// signer.
package clusterca

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// backdate is how long before now certificates begin, for clocks that differ: as in kube-controller-manager.
const backdate = 5 * time.Minute

// Authority is a certificate authority with its key.
type Authority struct {
	cert *x509.Certificate
	pem  []byte
	key  crypto.Signer
}

// SignerFile is beside ca.crt, and has only the certificate of ca.key. kube-controller-manager starts no signer if its --cluster-signing-cert-file has more
// than one certificate, and ca.crt has two while the authority is rotated.
const SignerFile = "muster-signing.crt"

// WriteSigner writes [SignerFile] of a folder, unless it is right.
func WriteSigner(dir string) error {
	a, err := Load(dir)
	if err != nil {
		return err
	}
	file, text := filepath.Join(dir, SignerFile), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
	if is, err := os.ReadFile(file); err == nil && bytes.Equal(is, text) {
		return nil
	}
	return machine.WriteFile(file, text, 0o644, 0o755)
}

// Load reads ca.crt and ca.key of a folder, as /etc/kubernetes/pki. While the authority is rotated, ca.crt has two certificates: the authority is the one
// of the key. Its error wraps [os.ErrNotExist] if a file is missing.
func Load(dir string) (*Authority, error) {
	cert, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(dir, "ca.key"))
	if err != nil {
		return nil, err
	}
	defer clear(key) // K3
	pair, err := ofKey(cert, key)
	if err != nil {
		return nil, fmt.Errorf("the certificate authority in %s: %w", dir, err)
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return nil, fmt.Errorf("the certificate authority in %s: it is none, or its key can't sign", dir)
	}
	return &Authority{cert: pair.Leaf, pem: bytes.TrimSpace(cert), key: signer}, nil
}

// ofKey returns the key with its certificate, which is one of several; the error is that of the first one.
func ofKey(certs, key []byte) (pair tls.Certificate, err error) {
	err = errors.New("ca.crt has no certificate in PEM")
	for n := 0; ; n++ {
		block, rest := pem.Decode(certs)
		if block == nil {
			return pair, err
		}
		p, failed := tls.X509KeyPair(pem.EncodeToMemory(block), key)
		if failed == nil {
			return p, nil
		}
		if certs = rest; n == 0 {
			err = failed
		}
	}
}

// PEM returns the certificates of all trusted authorities: ca.crt.
func (a *Authority) PEM() []byte { return a.pem }

// Signer returns the authority's key.
func (a *Authority) Signer() crypto.Signer { return a.key }

// Certificate returns the authority's certificate.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// Sign returns a certificate in PEM for a PKCS#10 request in DER, with one extended key usage. It expires life after now, or with the authority. The
// request is the caller's own: only its signature is checked.
func (a *Authority) Sign(request []byte, use x509.ExtKeyUsage, life time.Duration, now time.Time) ([]byte, error) {
	r, err := x509.ParseCertificateRequest(request)
	if err != nil {
		return nil, err
	}
	if err := r.CheckSignature(); err != nil {
		return nil, err
	}
	if life <= 0 {
		return nil, errors.New("a certificate without a life")
	}
	end := now.Add(life)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	if !now.Before(end) {
		return nil, fmt.Errorf("the certificate authority ended at %s", a.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{ // without SerialNumber: a random one of 20 bytes (RFC 5280, section 4.1.2.2)
		Subject: r.Subject, DNSNames: r.DNSNames, IPAddresses: r.IPAddresses,
		NotBefore: now.Add(-backdate), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{use}, BasicConstraintsValid: true,
	}, a.cert, r.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
