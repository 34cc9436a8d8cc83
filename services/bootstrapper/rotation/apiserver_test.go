package rotation

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
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

// apiServer is a real API server with the files of one control plane, which restarts after each change.
type apiServer struct {
	*plane
	etcd   string
	port   int
	run    *program
	client kubernetes.Interface
}

func (a *apiServer) Change(ctx context.Context, resume bool, do func() error, components ...string) error {
	if err := a.plane.Change(ctx, resume, do, components...); err != nil {
		return err
	}
	a.connect(a.t) // the authority may be another one
	a.restart(a.t)
	return nil
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
		"--advertise-address=192.0.2.250", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC",
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
		p.ControlPlane = a
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

func TestTokensAreAcceptedEverywhereUntilTheOldKeyIsDropped(t *testing.T) {
	t.Parallel()
	servers := newServers(t, 2)
	old := servers[0].token(t)
	all := func(token string, want bool, when string) {
		t.Helper()
		for i, a := range servers {
			if a.takes(t, token) != want {
				t.Errorf("%s: API server %d takes the token: %v", when, i, !want)
			}
		}
	}
	all(old, true, "before")
	made := servers[0].must(clusterinfo.ServiceAccountKey, clusterinfo.RotationAccept, "")
	all(old, true, "one accepts the new key")
	servers[1].must(clusterinfo.ServiceAccountKey, clusterinfo.RotationAccept, made.ID)
	// A half-done switch: one signs with the new key, the other with the old one.
	servers[1].must(clusterinfo.ServiceAccountKey, clusterinfo.RotationUse, made.ID)
	next, still := servers[1].token(t), servers[0].token(t)
	all(next, true, "half done, the new one's")
	all(still, true, "half done, the old one's")
	servers[0].must(clusterinfo.ServiceAccountKey, clusterinfo.RotationUse, made.ID)
	last := servers[0].token(t)
	for _, token := range []string{old, still, next, last} {
		all(token, true, "settled")
	}
	for _, a := range servers {
		a.must(clusterinfo.ServiceAccountKey, clusterinfo.RotationFinish, made.ID)
		if !a.takes(t, next) || !a.takes(t, last) {
			t.Error("a new token is refused while the old key is dropped")
		}
	}
	all(next, true, "finished")
	all(last, true, "finished")
	all(old, false, "finished")
	all(still, false, "finished")
}

func TestSecretsAreReadEverywhereAndTheOldKeyStaysUntilAllAreWrittenAgain(t *testing.T) {
	t.Parallel()
	servers := newServers(t, 2)
	made := Result{}
	var names []string
	write := func(a *apiServer, name string) {
		t.Helper()
		if _, err := a.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"a": []byte(name)}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	all := func(when string) {
		t.Helper()
		for i, a := range servers {
			for _, name := range names {
				if s, err := a.client.CoreV1().Secrets("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil || string(s.Data["a"]) != name {
					t.Errorf("%s: API server %d reads %s: %v", when, i, name, err)
				}
			}
		}
	}
	write(servers[0], "before")
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse} {
		for i, a := range servers {
			if out := a.must(clusterinfo.EncryptionKey, phase, made.ID); made.ID == "" {
				made = out
			}
			for j, other := range servers {
				write(other, fmt.Sprintf("%s-%d-%d", phase, i, j))
			}
			all(string(phase))
		}
	}
	_, err := servers[0].do(clusterinfo.EncryptionKey, clusterinfo.RotationFinish, made.ID)
	if err == nil || !strings.Contains(err.Error(), "encrypted with another key") {
		t.Fatalf("finished with Secrets of the old key: %v", err)
	}
	all("refused")
	for _, name := range names { // as the owner's program writes them
		if _, err := servers[1].client.CoreV1().Secrets("default").Patch(t.Context(), name, types.MergePatchType, []byte("{}"), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range servers {
		a.must(clusterinfo.EncryptionKey, clusterinfo.RotationFinish, made.ID)
		all("finish")
	}
}

// An aggregated API server reads what API servers accept from a ConfigMap, to which they only add.
func TestTheFrontProxysAuthoritiesArePublishedBeforeOneIsUsed(t *testing.T) {
	t.Parallel()
	servers := newServers(t, 2)
	published := func() (ids []string) {
		t.Helper()
		m, err := servers[0].client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
		if err != nil {
			return nil
		}
		list, err := certutil.ParseCertsPEM([]byte(m.Data["requestheader-client-ca-file"]))
		if err != nil {
			return nil
		}
		for _, ca := range list {
			ids = append(ids, sum(ca.Raw))
		}
		return ids
	}
	old := servers[0].disk()[clusterinfo.FrontProxyCA].Uses
	made := servers[0].must(clusterinfo.FrontProxyCA, clusterinfo.RotationAccept, "")
	eventually(t, func(context.Context) error {
		if ids := published(); !slices.Contains(ids, made.ID) || !slices.Contains(ids, old) {
			return fmt.Errorf("published: %v", ids)
		}
		return nil
	})
	servers[1].must(clusterinfo.FrontProxyCA, clusterinfo.RotationAccept, made.ID)
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationUse, clusterinfo.RotationFinish} {
		for _, a := range servers {
			a.must(clusterinfo.FrontProxyCA, phase, made.ID) // the API server starts with the files
		}
	}
	if ids := published(); !slices.Contains(ids, made.ID) {
		t.Errorf("published: %v", ids)
	}
}
