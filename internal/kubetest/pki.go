package kubetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// pki is the certificate authority of a cluster and its certificates.
type pki struct {
	dir    string
	ca     *x509.Certificate
	caPEM  []byte
	caKey  *ecdsa.PrivateKey
	issued map[string]pair
}

type pair struct{ cert, key []byte }

func newPKI(dir string) (*pki, error) {
	p := &pki{dir: dir, issued: map[string]pair{}}
	var err error
	if p.caKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(10 * 365 * 24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, p.caKey.Public(), p.caKey)
	if err != nil {
		return nil, err
	}
	if p.ca, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	p.caPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	key, err := keyPEM(p.caKey)
	if err != nil {
		return nil, err
	}
	if err := p.write(map[string][]byte{"ca.crt": p.caPEM, "ca.key": key}); err != nil {
		return nil, err
	}
	server, err := p.issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	if err != nil {
		return nil, err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if key, err = keyPEM(accounts); err != nil {
		return nil, err
	}
	return p, p.write(map[string][]byte{"apiserver.crt": server.cert, "apiserver.key": server.key, "sa.key": key})
}

func (p *pki) file(name string) string { return filepath.Join(p.dir, name) }

func (p *pki) write(files map[string][]byte) error {
	for name, content := range files {
		if err := os.WriteFile(p.file(name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func keyPEM(k *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(k)
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), err
}

func (p *pki) issue(template *x509.Certificate) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	template.SerialNumber = big.NewInt(int64(len(p.issued) + 2))
	template.NotBefore, template.NotAfter = p.ca.NotBefore, p.ca.NotAfter
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, p.ca, key.Public(), p.caKey)
	if err != nil {
		return pair{}, err
	}
	private, err := keyPEM(key)
	return pair{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), private}, err
}

// user returns a client certificate.
func (p *pki) user(name string, groups ...string) (pair, error) {
	if u, ok := p.issued[name]; ok {
		return u, nil
	}
	u, err := p.issue(&x509.Certificate{Subject: pkix.Name{CommonName: name, Organization: groups}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	p.issued[name] = u
	return u, err
}

// kubeconfig writes a kubeconfig for a user and returns its path.
func (p *pki) kubeconfig(dir, name, server string, groups ...string) (string, error) {
	u, err := p.user(name, groups...)
	if err != nil {
		return "", err
	}
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: p.caPEM}
	c.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: u.cert, ClientKeyData: u.key}
	c.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	c.CurrentContext = "x"
	path := filepath.Join(dir, fmt.Sprintf("%d.kubeconfig", len(p.issued)))
	return path, clientcmd.WriteToFile(*c, path)
}

// config returns the configuration of an existing user.
func (p *pki) config(name, server string) *rest.Config {
	u := p.issued[name]
	return &rest.Config{Host: server, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: p.caPEM, CertData: u.cert, KeyData: u.key}}
}

// readyz checks the API server's readiness and the namespace that it creates last.
func readyz(ctx context.Context, c *rest.Config) error {
	k, err := kubernetes.NewForConfig(c)
	if err != nil {
		return err
	}
	if err := k.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
		return err
	}
	return k.RESTClient().Get().AbsPath("/api/v1/namespaces/default").Do(ctx).Error()
}
