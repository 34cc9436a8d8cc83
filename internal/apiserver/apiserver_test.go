package apiserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAKubeletIsNotTakenForTheAPIServer(t *testing.T) {
	for name, tt := range map[string]struct {
		subject pkix.Name
		node    bool
	}{
		"API server": {pkix.Name{CommonName: "kube-apiserver"}, false},
		"kubelet":    {pkix.Name{CommonName: "system:node:cp1", Organization: []string{"system:nodes"}}, true},
	} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: tt.subject, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour),
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		}
		der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AddCert(cert)
		server := httptest.NewUnstartedServer(http.NotFoundHandler())
		server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
		server.StartTLS()
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
		resp, err := (&http.Client{Transport: Only(transport)}).Get(server.URL)
		if err == nil {
			_ = resp.Body.Close()
		}
		if e, node := errors.AsType[*NodeError](err); node != tt.node || node && e.Node != tt.subject.CommonName || !node && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		transport.CloseIdleConnections()
		server.Close()
	}
}
