package kubelet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"testing"
	"time"
)

// signer is an authority as kubeadm makes it: all have one name.
type signer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newSigner(t *testing.T) signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	s := signer{template, key}
	s.cert = s.sign(t, template, key.Public())
	return s
}

func (s signer) sign(t *testing.T, c *x509.Certificate, public any) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, s.cert, public, s.key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// While the cluster's authority is rotated, its certificate is not the first one of ca.crt, or not the only one.
func TestACertificateIsOfOneOfTheAuthorities(t *testing.T) {
	a, b, third := newSigner(t), newSigner(t), newSigner(t)
	k, err := NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	check := func(by signer, trusted ...signer) error {
		leaf := by.sign(t, &x509.Certificate{
			SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "system:node:w1", Organization: []string{"system:nodes"}}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Minute),
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		}, k.Client.Public())
		roots := x509.NewCertPool()
		for _, s := range trusted {
			roots.AddCert(s.cert)
		}
		return CheckCertificate(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw}), k.Client, roots, "w1", nil, x509.ExtKeyUsageClientAuth, time.Now())
	}
	for _, trusted := range [][]signer{{a, b}, {b, a}} {
		for _, by := range trusted {
			if err := check(by, trusted...); err != nil {
				t.Error(err)
			}
		}
		if err := check(third, trusted...); err == nil {
			t.Error("a third authority's certificate is accepted")
		}
	}
}
