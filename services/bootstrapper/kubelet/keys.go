package kubelet

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// Keys are a node's two keys, ECDSA P-256. They are made on the machine and never leave it: a stolen certificate is useless without its key (J5).
type Keys struct {
	Client, Serving *ecdsa.PrivateKey
}

// NewKeys returns two new keys.
func NewKeys() (k Keys, err error) {
	if k.Client, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return k, err
	}
	k.Serving, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	return k, err
}

// Requests returns the two certificate requests (PKCS#10, DER): the client's without a SAN,
// the serving one with the node's name and addresses.
func (k Keys) Requests(name string, addrs []netip.Addr) (client, serving []byte, err error) {
	subject := pkix.Name{Organization: []string{clusterinfo.NodeGroup}, CommonName: clusterinfo.NodeUserPrefix + name}
	client, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, k.Client)
	if err != nil {
		return nil, nil, err
	}
	ips := make([]net.IP, 0, len(addrs))
	for _, a := range addrs {
		ips = append(ips, net.IP(a.AsSlice()))
	}
	serving, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject, DNSNames: []string{name}, IPAddresses: ips}, k.Serving)
	return client, serving, err
}

// CheckCertificate returns an error unless a ticket's certificate is for this key, this node and this use, from the cluster's authority, and valid now.
// The kubelet would find an error later, with a worse message.
func CheckCertificate(chain []byte, key *ecdsa.PrivateKey, roots *x509.CertPool, name string, addrs []netip.Addr, use x509.ExtKeyUsage, now time.Time) error {
	certs, err := ParsePEM(chain)
	if err != nil {
		return err
	}
	leaf := certs[0]
	if pub, ok := leaf.PublicKey.(*ecdsa.PublicKey); !ok || !pub.Equal(&key.PublicKey) {
		return errors.New("it is for another key")
	}
	if leaf.Subject.CommonName != clusterinfo.NodeUserPrefix+name || !slices.Equal(leaf.Subject.Organization, []string{clusterinfo.NodeGroup}) {
		return fmt.Errorf("it is for %s", leaf.Subject)
	}
	if err := checkClock(leaf, now); err != nil {
		return err
	}
	opts := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{use}, CurrentTime: now}
	for _, c := range certs[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := leaf.Verify(opts); err != nil {
		return err
	}
	if use == x509.ExtKeyUsageServerAuth {
		for _, host := range append([]string{name}, hosts(addrs)...) {
			if err := leaf.VerifyHostname(host); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkClock returns an error if a new certificate is not valid by this machine's clock. Without this check, kubeadm and the kubelet would only report a
// bad certificate of the API server.
func checkClock(fresh *x509.Certificate, now time.Time) error {
	if !now.Before(fresh.NotBefore) && !now.After(fresh.NotAfter) {
		return nil
	}
	return attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "this machine's clock is at %s, but the certificate that the cluster has just issued is valid from %s to %s",
		now.UTC().Format(time.RFC3339), fresh.NotBefore.UTC().Format(time.RFC3339), fresh.NotAfter.UTC().Format(time.RFC3339))
}

func hosts(addrs []netip.Addr) []string {
	out := make([]string, len(addrs))
	for i, a := range addrs {
		out[i] = a.String()
	}
	return out
}

// ParsePEM parses one or more certificates and refuses everything else.
func ParsePEM(b []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for rest := bytes.TrimSpace(b); len(rest) > 0; {
		block, more := pem.Decode(rest)
		if block == nil || block.Type != "CERTIFICATE" {
			return nil, errors.New("want PEM certificates and nothing else")
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out, rest = append(out, c), bytes.TrimSpace(more)
	}
	if len(out) == 0 {
		return nil, errors.New("no certificate")
	}
	return out, nil
}

// Bundle returns a certificate chain and its key in one PEM file, as the kubelet stores them.
func Bundle(chain []byte, key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	out := append(bytes.TrimSpace(chain), '\n')
	return append(out, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})...), nil
}

// BadCertificate returns the refusal of a bad certificate in a ticket, but keeps the reason of a wrong clock: then the ticket is good.
func BadCertificate(field string, err error) error {
	if attest.ReasonOf(err) == attestv1.Reason_REASON_CLOCK_SKEW {
		return err
	}
	return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the ticket is unusable: %s: %w", field, err)
}
