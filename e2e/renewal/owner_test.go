//go:build renewal

package renewal

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/lab/driver"
)

// ownerReturns gives the owner's folder a kubeconfig that has ended, and has it renewed by the owner's key.
func (w *fixture) ownerReturns(t *testing.T, name string) {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(w.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")), []byte(w.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.key")))
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{ownerorder.Group}},
		NotBefore: time.Now().Add(-25 * time.Hour), NotAfter: time.Now().Add(-time.Hour), KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, pair.Leaf, key.Public(), pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(w.OwnerDir(), "muster-"+name, "admin.conf")
	conf, err := clientcmd.LoadFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range conf.AuthInfos {
		u.ClientCertificateData, u.ClientKeyData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	}
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		t.Fatal(err)
	}
	nodes := []string{"kubectl", "--kubeconfig", path, "get", "nodes"}
	if out, err := w.At(t.Context(), driver.Owner, "", nodes...); err == nil {
		t.Fatalf("a kubeconfig that has ended shows %s", out)
	}
	w.Muster(t, "kubeconfig", "renew")
	t.Log(w.Must(t, driver.Owner, "", nodes...))
}
