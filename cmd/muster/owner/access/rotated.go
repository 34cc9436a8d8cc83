package access

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
)

// VerifyCrossCertificate returns an error unless an API server presents a chain in which a CA of trusted has cross-signed the key of ca.
func VerifyCrossCertificate(ctx context.Context, server string, trusted []*x509.Certificate, ca *x509.Certificate) error {
	at, err := url.Parse(server)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	for _, c := range trusted {
		roots.AddCert(c)
	}
	ctx, cancel := context.WithTimeout(ctx, ProbeTimeout)
	defer cancel()
	conn, err := (&tls.Dialer{Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}).DialContext(ctx, "tcp", at.Host)
	if err != nil {
		return UnreachableError(server, err)
	}
	defer func() { _ = conn.Close() }()
	c, ok := conn.(*tls.Conn)
	if !ok {
		return errors.New("the connection to the API server is not TLS")
	}
	if c.ConnectionState().PeerCertificates[0].CheckSignatureFrom(ca) != nil {
		return problem.WithRemedy(fmt.Errorf("the API server at %s has no certificate of the new authority", server), "Make sure that "+at.Host+" is a control plane, or a load balancer of control planes. If it is, stop: the CA in the cluster's description may be an attacker's (docs/threat-model.md).")
	}
	return nil
}
