package rotation

import (
	"bytes"
	ecdsakeys "crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	files "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
)

// kube-controller-manager loads these files at each start, and starts no signer with two certificates.
func TestTheControllerManagerHasOneSignerInEachPhase(t *testing.T) {
	p := newPlanes(t, 1)[0]
	signer := func(when string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(p.pki(), files.SignerFile))
		if err != nil || strings.Count(string(text), "BEGIN CERTIFICATE") != 1 {
			t.Fatalf("%s: %s, %v", when, text, err)
		}
		if _, err := tls.LoadX509KeyPair(filepath.Join(p.pki(), files.SignerFile), filepath.Join(p.pki(), "ca.key")); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		return string(text)
	}
	made := p.must(clusterinfo.ClusterCA, clusterinfo.RotationAccept, "")
	before := signer("accept")
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationUse, clusterinfo.RotationFinish} {
		p.must(clusterinfo.ClusterCA, phase, made.ID)
		if after := signer(string(phase)); after == before || after != made.Public {
			t.Errorf("%s: it signs as %s", phase, after)
		}
	}
	if _, err := os.Stat(filepath.Join(p.pki(), files.CrossFile)); !os.IsNotExist(err) {
		t.Errorf("the cross certificate is left: %v", err)
	}
}

// The first certificate of ca.crt is that of the key, except between two renames: there the machine issues nothing with the file's first one.
func TestAPowerCutWhileTheAuthorityIsReplacedLosesNothing(t *testing.T) {
	for _, lost := range []string{"nothing", "ca.key", "muster-signing.crt", "ca.crt and the rest"} {
		p := newPlanes(t, 1)[0]
		made := p.must(clusterinfo.ClusterCA, clusterinfo.RotationAccept, "")
		was := map[string][]byte{}
		for _, name := range []string{"ca.crt", "ca.key", files.SignerFile} {
			text, err := os.ReadFile(filepath.Join(p.pki(), name))
			if err != nil {
				t.Fatal(err)
			}
			was[name] = text
		}
		p.crash = "files"
		if _, err := p.do(clusterinfo.ClusterCA, clusterinfo.RotationUse, made.ID); err == nil {
			t.Fatal("it does not end")
		}
		p.crash = ""
		undo := map[string][]string{"nothing": nil, "ca.key": {"ca.key", files.SignerFile}, "muster-signing.crt": {files.SignerFile}, "ca.crt and the rest": {"ca.crt", "ca.key", files.SignerFile}}[lost]
		for _, name := range undo {
			if err := os.WriteFile(filepath.Join(p.pki(), name), was[name], 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := files.WriteSigner(p.pki()); err != nil { // the machine boots
			t.Errorf("%s: %v", lost, err)
		}
		if _, err := tls.LoadX509KeyPair(filepath.Join(p.pki(), files.SignerFile), filepath.Join(p.pki(), "ca.key")); err != nil {
			t.Errorf("%s: %v", lost, err)
		}
		if a, err := files.Load(p.pki()); err != nil || a.Certificate() == nil {
			t.Errorf("%s: %v", lost, err)
		}
		p.must(clusterinfo.ClusterCA, clusterinfo.RotationUse, made.ID)
		list, err := certutil.CertsFromFile(filepath.Join(p.pki(), "ca.crt"))
		if err != nil || len(list) != 2 || sum(list[0].Raw) != made.ID {
			t.Errorf("%s: %d certificates, %v", lost, len(list), err)
		}
		if cross, err := files.Cross(p.pki()); err != nil || cross == nil || cross.NotAfter.Before(time.Now()) {
			t.Errorf("%s: the cross certificate: %v, %v", lost, cross, err)
		}
	}
}

// No phase of the rotation could be undone.
func TestAnAuthorityThatMaySignForNoOtherIsRefusedBeforeAnythingIsChanged(t *testing.T) {
	p := newPlanes(t, 1)[0]
	key, err := ecdsakeys.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, MaxPathLenZero: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, content := range map[string][]byte{"ca.crt": text, "ca.key": private} {
		if err := os.WriteFile(filepath.Join(p.pki(), name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.do(clusterinfo.ClusterCA, clusterinfo.RotationAccept, ""); err == nil || !strings.Contains(err.Error(), "pathLenConstraint 0") {
		t.Errorf("%v", err)
	}
	if is, err := os.ReadFile(filepath.Join(p.pki(), "ca.crt")); err != nil || !bytes.Equal(is, text) {
		t.Errorf("it trusts %s, %v", is, err)
	}
	if _, err := os.Stat(filepath.Join(p.pki(), files.SignerFile)); !os.IsNotExist(err) {
		t.Errorf("the controller manager's file: %v", err)
	}
}
