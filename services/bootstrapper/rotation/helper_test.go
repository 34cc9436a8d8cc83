package rotation

import (
	"crypto/x509"
	"testing"

	certutil "k8s.io/client-go/util/cert"
)

// certsphaseClient is the front proxy's client, as kubeadm has it.
var certsphaseClient = certutil.Config{CommonName: "front-proxy-client", Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}

// mustCA returns the first authority of the front proxy.
func mustCA(t *testing.T, p *plane) *x509.Certificate {
	t.Helper()
	list, err := frontProxy{}.list(p.pki())
	if err != nil {
		t.Fatal(err)
	}
	return list[0]
}
