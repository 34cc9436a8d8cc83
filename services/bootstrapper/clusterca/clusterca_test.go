package clusterca_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
)

// newAuthority returns an authority as kubeadm makes it, in PEM.
func newAuthority(t *testing.T) (cert, key []byte) { return authorityOf(t, "ECDSA-P256") }

func authorityOf(t *testing.T, algorithm string) (cert, key []byte) {
	t.Helper()
	c, k, err := pkiutil.NewCertificateAuthority(&pkiutil.CertConfig{Config: certutil.Config{CommonName: "kubernetes"}, NotAfter: time.Now().Add(time.Hour), EncryptionAlgorithm: kubeadmapi.EncryptionAlgorithmType(algorithm)})
	if err != nil {
		t.Fatal(err)
	}
	if key, err = keyutil.MarshalPrivateKeyToPEM(k); err != nil {
		t.Fatal(err)
	}
	return pkiutil.EncodeCertPEM(c), key
}

// serving returns a certificate of an API server.
func serving(t *testing.T, a *clusterca.Authority) []byte {
	t.Helper()
	key, err := pkiutil.NewPrivateKey(kubeadmapi.EncryptionAlgorithmECDSAP256)
	if err != nil {
		t.Fatal(err)
	}
	c, err := pkiutil.NewSignedCert(&pkiutil.CertConfig{
		Config:   certutil.Config{CommonName: "kube-apiserver", Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, AltNames: certutil.AltNames{DNSNames: []string{"kubernetes"}}},
		NotAfter: time.Now().Add(time.Minute),
	}, key, a.Certificate(), a.Signer(), false)
	if err != nil {
		t.Fatal(err)
	}
	return pkiutil.EncodeCertPEM(c)
}

func folder(t *testing.T, certs, key []byte) string {
	t.Helper()
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "ca.crt"), certs, 0o600), os.WriteFile(filepath.Join(dir, "ca.key"), key, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// While the authority is rotated, ca.crt has two certificates of one name, in either order.
func TestTheSignerIsTheCertificateOfTheKey(t *testing.T) {
	a, keyA := newAuthority(t)
	b, keyB := newAuthority(t)
	for name, tt := range map[string]struct{ certs, key, want []byte }{
		"one":                {a, keyA, a},
		"the first of two":   {append(append([]byte{}, a...), b...), keyA, a},
		"the second of two":  {append(append([]byte{}, a...), b...), keyB, b},
		"another's key":      {a, keyB, nil},
		"no certificate":     {[]byte("none"), keyB, nil},
		"what is no key":     {a, a, nil},
		"a key beside it":    {append(append([]byte{}, a...), keyA...), keyB, nil},
		"something above it": {append([]byte("# the authority\n"), a...), keyA, a},
	} {
		t.Run(name, func(t *testing.T) {
			dir := folder(t, tt.certs, tt.key)
			err := clusterca.WriteSigner(dir)
			if (err == nil) != (tt.want != nil) {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(dir, clusterca.SignerFile))
			if string(got) != string(tt.want) {
				t.Errorf("%s, %v; want %s", got, err, tt.want)
			}
			if tt.want == nil {
				return
			}
			// As kube-controller-manager loads it.
			if _, err := tls.LoadX509KeyPair(filepath.Join(dir, clusterca.SignerFile), filepath.Join(dir, "ca.key")); err != nil {
				t.Error(err)
			}
		})
	}
}

// kube-controller-manager starts no signer with two certificates.
func TestAChangedSignerIsWrittenAnew(t *testing.T) {
	a, key := newAuthority(t)
	b, _ := newAuthority(t)
	dir := folder(t, append(append([]byte{}, a...), b...), key)
	file := filepath.Join(dir, clusterca.SignerFile)
	for _, is := range [][]byte{nil, b, append(append([]byte{}, a...), b...), a} {
		if err := os.WriteFile(file, is, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := clusterca.WriteSigner(dir); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != string(a) {
			t.Errorf("%s, %v", got, err)
		}
	}
}
