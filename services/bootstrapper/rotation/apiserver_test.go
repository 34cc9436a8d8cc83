package rotation

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/internal/kubetest"
)

// program is a process that ends with the test.
type program struct {
	cmd *exec.Cmd
	log bytes.Buffer
}

func start(t *testing.T, name string, args ...string) *program {
	t.Helper()
	bin, err := kubetest.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	p := &program{cmd: exec.Command(filepath.Join(bin, name), args...)}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			lines := strings.Split(p.log.String(), "\n")
			t.Logf("%s: %s", name, strings.Join(lines[max(0, len(lines)-8):], "\n"))
		}
	})
	return p
}

func (p *program) stop() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Signal(syscall.SIGKILL)
		_ = p.cmd.Wait()
	}
}

func reservePort(t *testing.T) int {
	t.Helper()
	ports, release, err := kubetest.ReservePorts(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := release(); err != nil {
			t.Error(err)
		}
	})
	return ports[0]
}

// apiServer is a real API server with the files of one control plane.
type apiServer struct {
	*plane
	etcd   string
	port   int
	run    *program
	client kubernetes.Interface
}

func (a *apiServer) connect(t *testing.T) {
	t.Helper()
	client, err := kubernetes.NewForConfig(a.config(t))
	if err != nil {
		t.Fatal(err)
	}
	a.client = client
}

func (a *apiServer) restart(t *testing.T) {
	t.Helper()
	if a.run != nil {
		a.run.stop()
	}
	at := func(name string) string { return filepath.Join(a.pki(), name) }
	a.run = start(t, "kube-apiserver", "--etcd-servers="+a.etcd, "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", a.port),
		"--advertise-address=192.0.2.250", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16",
		// What is not used here takes most of the time of a start. Whoever is authenticated may do everything.
		"--authorization-mode=AlwaysAllow", "--anonymous-auth=false",
		// From here on, as kubeadm and Muster have it.
		"--tls-cert-file="+at("apiserver.crt"), "--tls-private-key-file="+at("apiserver.key"), "--client-ca-file="+at("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+at("sa.pub"), "--service-account-signing-key-file="+at("sa.key"),
		"--encryption-provider-config="+at("encryption.yaml"), "--encryption-provider-config-automatic-reload",
		"--requestheader-client-ca-file="+at("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client", "--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+at("front-proxy-client.crt"), "--proxy-client-key-file="+at("front-proxy-client.key"))
	eventually(t, func(ctx context.Context) error {
		return a.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// config returns the connection of an administrator.
func (a *apiServer) config(t *testing.T) *rest.Config {
	t.Helper()
	ca, key, err := pkiutil.TryLoadCertAndKeyFromDisk(a.pki(), "ca")
	if err != nil {
		t.Fatal(err)
	}
	cert, private, err := pkiutil.NewCertAndKey(ca, key, &pkiutil.CertConfig{
		NotAfter: time.Now().Add(time.Hour), EncryptionAlgorithm: ecdsa.EncryptionAlgorithm,
		Config: certutil.Config{CommonName: "admin", Organization: []string{"system:masters"}, Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
	})
	if err != nil {
		t.Fatal(err)
	}
	text, err := keyutil.MarshalPrivateKeyToPEM(private)
	if err != nil {
		t.Fatal(err)
	}
	return &rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", a.port), QPS: -1, TLSClientConfig: rest.TLSClientConfig{
		ServerName: "kubernetes.default.svc", CAData: pkiutil.EncodeCertPEM(ca), CertData: pkiutil.EncodeCertPEM(cert), KeyData: text,
	}}
}

// token has the API server sign one.
func (a *apiServer) token(t *testing.T) string {
	t.Helper()
	r, err := a.client.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "robot", &authv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.Token
}

// takes reports whether the API server accepts a token.
func (a *apiServer) takes(t *testing.T, token string) bool {
	t.Helper()
	r, err := a.client.AuthenticationV1().TokenReviews().Create(t.Context(), &authv1.TokenReview{Spec: authv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.Authenticated
}

// newServers starts API servers on one etcd.
func newServers(t *testing.T, n int) []*apiServer {
	t.Helper()
	etcd := fmt.Sprintf("http://127.0.0.1:%d", reservePort(t))
	start(t, "etcd", "--data-dir="+t.TempDir(), "--unsafe-no-fsync", "--log-level=error", "--listen-client-urls="+etcd, "--advertise-client-urls="+etcd, fmt.Sprintf("--listen-peer-urls=http://127.0.0.1:%d", reservePort(t)))
	var out []*apiServer
	for _, p := range newPlanes(t, n) {
		a := &apiServer{plane: p, etcd: etcd, port: reservePort(t)}
		p.OldSecrets = a.oldSecrets
		a.connect(t)
		a.restart(t)
		out = append(out, a)
	}
	first := out[0].client.CoreV1()
	if _, err := first.ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "robot"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return out
}

// oldSecrets asks etcd, without TLS here.
func (a *apiServer) oldSecrets(ctx context.Context, prefix string) (old int, err error) {
	c, err := clientv3.New(clientv3.Config{Context: ctx, Endpoints: []string{a.etcd}, Logger: zap.NewNop()})
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	r, err := c.Get(ctx, "/registry/secrets/", clientv3.WithPrefix())
	if err != nil {
		return 0, err
	}
	for _, kv := range r.Kvs {
		if !bytes.HasPrefix(kv.Value, []byte(prefix)) {
			old++
		}
	}
	return old, nil
}
