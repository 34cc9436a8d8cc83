package bootstrapper_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
)

// controlPlane returns a machine that kubeadm has made a control plane without Muster.
func controlPlane(t *testing.T) *fixture {
	t.Helper()
	w := first(t)
	w.adopted = true
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(c, parent *x509.Certificate) *x509.Certificate {
		c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(1), time.Now().Add(-time.Hour), time.Now().AddDate(1, 0, 0)
		der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		out, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "kubernetes"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	ca := sign(template, template)
	kubelet := sign(&x509.Certificate{Subject: pkix.Name{CommonName: "system:node:node1", Organization: []string{"system:nodes"}}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca)
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	w.place(t, "/etc/kubernetes/manifests/kube-apiserver.yaml", "a pod")
	private := string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	w.place(t, "/etc/kubernetes/pki/ca.crt", string(certPEM(ca)))
	w.place(t, "/etc/kubernetes/pki/ca.key", private)
	for _, name := range []string{"admin", "kubelet"} {
		w.place(t, "/etc/kubernetes/"+name+".conf", kubeconfigOf(ca, "https://192.168.77.1:6443"))
	}
	w.place(t, "/var/lib/kubelet/pki/kubelet-client-current.pem", string(certPEM(kubelet))+private)
	if err := w.machine.Runs(machine.UnitKubelet); err != nil {
		t.Fatal(err)
	}
	return w
}

func kubeconfigOf(ca *x509.Certificate, server string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {}}]
`, server, base64.StdEncoding.EncodeToString(certPEM(ca)))
}

func (w *fixture) place(t *testing.T, path, content string) {
	t.Helper()
	if err := machine.WriteFile(filepath.Join(w.root, path), []byte(content), 0o600, 0o755); err != nil {
		t.Fatal(err)
	}
}

func (w *fixture) adoption() *initv1.InitRequest {
	q := w.request()
	q.PodCidrs, q.ServiceCidrs = nil, nil
	w.sign(q, true)
	return q
}

// kubeadms returns the recorded kubeadm calls that would change a control plane.
func (w *fixture) kubeadms() []string {
	return slices.DeleteFunc(w.machine.Calls(), func(c string) bool { return !strings.HasPrefix(c, "kubeadm") })
}

func TestAControlPlaneThatIsThereIsAdopted(t *testing.T) {
	w := controlPlane(t)
	r := w.boot()
	out := w.adopt(t.Context(), r, w.adoption())
	if out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	rec := w.record()
	bank, _ := w.tpm.Bank().Hash()
	if rec.Step != journal.StepDone || rec.Kind != journal.KindAdopt || !bytes.Equal(w.tpm.PCRs()[15], attest.LockValue(bank, [32]byte(rec.ClusterID))) {
		t.Errorf("journal %+v", rec)
	}
	admin, err := os.ReadFile(filepath.Join(w.root, "/etc/kubernetes/admin.conf"))
	if err != nil || !bytes.Equal(admin, out.result.GetKubeconfig()) || out.result.GetNodeName() != "node1" {
		t.Errorf("result %s, %v", text(out.result), err)
	}
	if !w.machine.Running(machine.UnitAttester) || w.machine.API.Object(secretPath) == nil || w.machine.API.Object(configPath) == nil {
		t.Error("no attester, or the cluster's own objects are not there")
	}
	if c := w.kubeadms(); len(c) != 0 || w.exists("/usr/local/bin/kubeadm") || w.exists("/etc/kubernetes/pki/encryption.yaml") {
		t.Errorf("the machine was changed: %q", c)
	}
}

// B3 for an adoption: killed after each of its effects, the machine is adopted when the request is repeated, and the existing cluster is unchanged.
func TestAnAdoptionSurvivesBeingKilledAnywhere(t *testing.T) {
	for n := 0; ; n++ {
		w := controlPlane(t)
		b, err := os.ReadFile(filepath.Join(w.root, "/etc/kubernetes/pki/ca.key"))
		if err != nil {
			t.Fatal(err)
		}
		key := string(b)
		w.dieAfter(n)
		r := w.boot()
		out := w.adopt(t.Context(), r, w.adoption())
		if out.err == nil {
			r.kill(t)
			if n < 8 {
				t.Fatalf("only %d effects: %q", n, w.steps)
			}
			return
		}
		r.kill(t)
		if n%2 == 1 {
			w.reboot()
		}
		w.dieAfter(-1)
		r = w.boot()
		if out = w.adopt(t.Context(), r, w.adoption()); out.err != nil {
			t.Fatalf("after %d effects: %v", n, out.err)
		}
		if err := r.end(t); err != nil {
			t.Fatal(err)
		}
		if rec := w.record(); rec.Step != journal.StepDone || rec.Kind != journal.KindAdopt || len(w.kubeadms()) != 0 {
			t.Fatalf("after %d effects: %+v, %q", n, rec, w.kubeadms())
		}
		if b, err := os.ReadFile(filepath.Join(w.root, "/etc/kubernetes/pki/ca.key")); err != nil || string(b) != key {
			t.Fatalf("after %d effects: ca.key was changed: %v", n, err)
		}
	}
}

// A machine that is no control plane is refused before it is locked or changed.
func TestAMachineThatIsNoControlPlaneIsNotAdopted(t *testing.T) {
	for name, tt := range map[string]struct {
		change  func(t *testing.T, w *fixture)
		request func(*initv1.InitRequest)
		want    string
	}{
		"a fresh machine":            {change: func(t *testing.T, w *fixture) { w.remove(t, "/etc/kubernetes/manifests/kube-apiserver.yaml") }},
		"no administrator":           {change: func(t *testing.T, w *fixture) { w.remove(t, "/etc/kubernetes/admin.conf") }},
		"a node without certificate": {change: func(t *testing.T, w *fixture) { w.remove(t, "/var/lib/kubelet/pki/kubelet-client-current.pem") }},
		"another name":               {change: func(_ *testing.T, w *fixture) { w.meta.Name = "node2" }},
		"another cluster's kubelet": {change: func(t *testing.T, w *fixture) {
			w.place(t, "/etc/kubernetes/kubelet.conf", kubeconfigOf(otherCA(t), "https://192.168.77.1:6443"))
		}},
		"a kubelet of another authority": {change: func(t *testing.T, w *fixture) {
			for _, name := range []string{"admin", "kubelet"} {
				w.place(t, "/etc/kubernetes/"+name+".conf", kubeconfigOf(otherCA(t), "https://192.168.77.1:6443"))
			}
		}},
		"another endpoint":    {request: func(q *initv1.InitRequest) { q.ControlPlaneEndpoint = "192.168.77.2:6443" }},
		"no init in metadata": {change: func(_ *testing.T, w *fixture) { w.meta.InitSecretHash = nil }},
		"a wrong secret":      {request: func(q *initv1.InitRequest) { q.InitSecret = bytes.Repeat([]byte{1}, 32) }, want: "INIT_SECRET_INVALID"},
		"networks of its own": {request: func(q *initv1.InitRequest) { q.PodCidrs = []string{"10.1.0.0/16"} }, want: "REQUEST_INVALID"},
		"no order":            {request: func(q *initv1.InitRequest) { proto.Reset(q) }, want: "REQUEST_INVALID"},
	} {
		t.Run(name, func(t *testing.T) {
			w := controlPlane(t)
			q := w.adoption()
			if tt.change != nil {
				tt.change(t, w)
			}
			if tt.request != nil {
				tt.request(q)
			}
			if tt.want == "" {
				tt.want = "INIT_NOT_ALLOWED"
			}
			r := w.boot()
			defer r.kill(t)
			if out := w.adopt(t.Context(), r, q); reason(out.err) != tt.want {
				t.Errorf("%v", out.err)
			}
			if w.record().Locked() || w.machine.API.Object(secretPath) != nil || len(w.machine.Calls()) != 0 {
				t.Error("the machine was changed")
			}
		})
	}
}

// B1, B2: an adopted machine never accepts an init, which would destroy its cluster, and an initialized machine never accepts an adoption.
func TestInitAndAdoptionExcludeEachOther(t *testing.T) {
	w := controlPlane(t)
	w.linger = time.Minute
	r := w.boot()
	if out := w.adopt(t.Context(), r, w.adoption()); out.err != nil {
		t.Fatal(out.err)
	}
	if out := w.init(t.Context(), r, w.request()); reason(out.err) != "NODE_LOCKED" {
		t.Errorf("init after an adoption: %v", out.err)
	}
	r.kill(t)
	if c := w.kubeadms(); len(c) != 0 {
		t.Errorf("%q", c)
	}
	// The same holds if only the bootstrapper's journal records the adoption.
	w = controlPlane(t)
	r = w.boot()
	w.dieAfter(5)
	if out := w.adopt(t.Context(), r, w.adoption()); out.err == nil {
		t.Fatal("it did not die")
	}
	r.kill(t)
	w.dieAfter(-1)
	r = w.boot()
	if out := w.init(t.Context(), r, w.request()); reason(out.err) != "NODE_LOCKED" || w.record().Kind != journal.KindAdopt {
		t.Errorf("init after half an adoption: %v, %+v", out.err, w.record())
	}
	r.kill(t)
	if c := w.kubeadms(); len(c) != 0 {
		t.Errorf("%q", c)
	}
	w = first(t)
	w.linger = time.Minute
	r = w.boot()
	defer r.kill(t)
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err)
	}
	if out := w.adopt(t.Context(), r, w.adoption()); reason(out.err) != "NODE_LOCKED" {
		t.Errorf("adoption after an init: %v", out.err)
	}
}

func (w *fixture) remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(filepath.Join(w.root, path)); err != nil {
		t.Fatal(err)
	}
}

func otherCA(t *testing.T) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kubernetes"}, IsCA: true, BasicConstraintsValid: true, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
