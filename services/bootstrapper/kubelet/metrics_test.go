package kubelet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

func TestCertificatesAreReadAnewForEachScrape(t *testing.T) {
	root := t.TempDir()
	c := Collector{Root: root}
	if n := testutil.CollectAndCount(c); n != 0 {
		t.Fatalf("%d series of a machine without certificates", n)
	}
	write := func(path string, content []byte) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert := func(from, to int64) []byte {
		t.Helper()
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(from, 0), NotAfter: time.Unix(to, 0)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	secret := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	write(machine.KubeletPKI+"/kubelet-client-current.pem", append(secret, cert(1000, 2000)...)) // the key first
	write(machine.PKIFolder+"/etcd/peer.crt", []byte("no PEM"))
	write(machine.PKIFolder+"/etcd/healthcheck-client.crt", cert(1000, 4000))
	write(machine.PKIFolder+"/ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("no DER")}))
	want := func(end string) {
		t.Helper()
		if err := testutil.CollectAndCompare(c, strings.NewReader(`
# HELP muster_certificate_not_after_timestamp_seconds When a certificate of this machine ends, in seconds since 1970; 0: the file holds none.
# TYPE muster_certificate_not_after_timestamp_seconds gauge
muster_certificate_not_after_timestamp_seconds{certificate="ca"} 0
muster_certificate_not_after_timestamp_seconds{certificate="etcd-healthcheck-client"} 4000
muster_certificate_not_after_timestamp_seconds{certificate="etcd-peer"} 0
muster_certificate_not_after_timestamp_seconds{certificate="kubelet-client"} `+end+"\n"), "muster_certificate_not_after_timestamp_seconds"); err != nil {
			t.Error(err)
		}
	}
	want("2000")
	write(machine.KubeletPKI+"/kubelet-client-current.pem", append(cert(1500, 3000), secret...))
	want("3000")
}
