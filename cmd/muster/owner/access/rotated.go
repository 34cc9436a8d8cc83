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

// Endorsed returns an error unless an API server proves by its cross certificate that one of trusted has signed for the key of ca.
func Endorsed(ctx context.Context, server string, trusted []*x509.Certificate, ca *x509.Certificate) error {
	at, err := url.Parse(server)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	for _, c := range trusted {
		roots.AddCert(c)
	}
	ctx, cancel := context.WithTimeout(ctx, AnswersWithin)
	defer cancel()
	conn, err := (&tls.Dialer{Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}).DialContext(ctx, "tcp", at.Host)
	if err != nil {
		return Unanswered(server, err)
	}
	defer func() { _ = conn.Close() }()
	c, ok := conn.(*tls.Conn)
	if !ok {
		return errors.New("the connection to the API server is not TLS")
	}
	if c.ConnectionState().PeerCertificates[0].CheckSignatureFrom(ca) != nil {
		return problem.WithRemedy(fmt.Errorf("the API server at %s has no certificate of the new authority", server), "If "+at.Host+" leads to something else than the control planes, have it lead there. If it leads there, somebody has written another authority into the cluster's description: find out who (docs/threat-model.md), and do not go on.")
	}
	return nil
}
