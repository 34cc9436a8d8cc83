package renewal

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	certsphase "k8s.io/kubernetes/cmd/kubeadm/app/phases/certs"
	kubeconfigphase "k8s.io/kubernetes/cmd/kubeadm/app/phases/kubeconfig"
	kubeadmconfig "k8s.io/kubernetes/cmd/kubeadm/app/util/config"

	"github.com/muster-k8s/muster/internal/disktest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) {
	// klog starts its flusher at init.
	goleak.VerifyTestMain(disktest.InMemory(m), goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

const life = 90 * 24 * time.Hour

var image = kubeadmapi.ClusterConfiguration{EncryptionAlgorithm: kubeadmapi.EncryptionAlgorithmECDSAP256, CertificateValidityPeriod: &metav1.Duration{Duration: life}}

// original returns a control plane's folder as kubeadm makes it, made once.
var original = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "control-plane")
	if err != nil {
		return "", err
	}
	cfg, err := kubeadmconfig.DefaultedStaticInitConfiguration()
	if err != nil {
		return "", err
	}
	cfg.CertificatesDir = filepath.Join(dir, pki)
	cfg.EncryptionAlgorithm, cfg.CertificateValidityPeriod = image.EncryptionAlgorithm, image.CertificateValidityPeriod
	if err := certsphase.CreatePKIAssets(cfg); err != nil {
		return "", err
	}
	for _, name := range []string{"admin.conf", "super-admin.conf", "controller-manager.conf", "scheduler.conf"} {
		if err := kubeconfigphase.CreateKubeConfigFile(name, filepath.Join(dir, folder), cfg); err != nil {
			return "", err
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, manifests), 0o700); err != nil {
		return "", err
	}
	for _, c := range components {
		text := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata:\n  annotations:\n    kubeadm.kubernetes.io/x: \"1\"\n  labels:\n    tier: control-plane\n  name: %s\n  namespace: kube-system\nspec:\n  containers:\n  - command:\n    - %s\n    - --cluster-signing-cert-file=/etc/kubernetes/pki/ca.crt\n    name: %s\n  priority: 2000001000\n", c, c, c)
		if err := os.WriteFile(filepath.Join(dir, manifests, c+".yaml"), []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	return dir, nil
})

func newControlPlane(t *testing.T) string {
	t.Helper()
	from, err := original()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := os.CopyFS(root, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return root
}

// soundAt fails unless every certificate has its key, is of its authority, and is valid at the time.
func soundAt(t *testing.T, root string, now time.Time) {
	t.Helper()
	for _, f := range files {
		c, err := f.verified(filepath.Join(root, folder), filepath.Join(root, folder))
		if err != nil {
			t.Errorf("%s: %v", f.name, err)
			continue
		}
		if now.Before(c.NotBefore) || now.After(c.NotAfter) {
			t.Errorf("%s is valid from %s to %s, and it is %s", f.name, c.NotBefore, c.NotAfter, now)
		}
	}
}

func leaves(t *testing.T, root string) map[string]*x509.Certificate {
	t.Helper()
	out := map[string]*x509.Certificate{}
	for _, f := range files {
		c, err := load(filepath.Join(root, folder, f.certificate))
		if err != nil {
			t.Fatal(err)
		}
		out[f.name] = c
	}
	return out
}

// memoryCluster is a cluster in memory: one lease, and pods that are Ready when their manifest has their annotation.
type memoryCluster struct {
	root  string
	lease *sync.Mutex
	mu    sync.Mutex
	down  []string // pods of other control planes
	dead  string   // a component of this control plane that never becomes Ready
	taken bool     // another holder never returns the lease
	out   bool     // this control plane is banned
	// banned are other nodes' enrollments, of which stays is not evicted.
	banned map[string]string
	stays  string
	order  []string // what happened, in order
	list   []Certificate
	// epoch is the cluster's epoch, published what this machine has published.
	epoch     epoch.Record
	history   clusterinfo.History
	published uint64
	keys      clusterinfo.KeyStates
}

func (c *memoryCluster) note(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.order) == 0 || c.order[len(c.order)-1] != what {
		c.order = append(c.order, what)
	}
}

// await returns once the step was done.
func (c *memoryCluster) await(t *testing.T, what string) {
	t.Helper()
	deadline := time.After(5 * time.Minute)
	for {
		c.mu.Lock()
		ok := slices.Contains(c.order, what)
		c.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-deadline:
			t.Fatalf("%q was not done", what)
		}
	}
}

func (c *memoryCluster) Exclusively(ctx context.Context, do func(context.Context) error) error {
	if c.taken {
		c.note("waits")
		<-ctx.Done()
		return ctx.Err()
	}
	c.lease.Lock()
	defer c.lease.Unlock()
	c.note("lease")
	defer c.note("released")
	return do(ctx)
}

func (c *memoryCluster) Unhealthy(context.Context) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.down), nil
}

func (c *memoryCluster) Runs(_ context.Context, component, annotation string) (bool, error) {
	text, err := os.ReadFile(filepath.Join(c.root, manifests, component+".yaml"))
	if err != nil {
		return false, err
	}
	for i, later := range components {
		if later != component || i+1 == len(components) {
			continue
		}
		next, err := os.ReadFile(filepath.Join(c.root, manifests, components[i+1]+".yaml"))
		if err != nil {
			return false, err
		}
		if strings.Contains(string(text), annotation) && strings.Contains(string(next), Annotation) {
			c.note("too early: " + components[i+1])
		}
	}
	c.note(component)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead != component && strings.Contains(string(text), annotation), nil
}

func (c *memoryCluster) ShutOut(context.Context) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out, nil
}

func (c *memoryCluster) Banned(context.Context) (map[string]string, error) {
	return maps.Clone(c.banned), nil
}

func (c *memoryCluster) Evicted(_ context.Context, node string) (bool, error) {
	return node != c.stays, nil
}

func (c *memoryCluster) Publish(_ context.Context, list []Certificate) error {
	c.list = list
	return nil
}

func (c *memoryCluster) Epoch(context.Context) (epoch.Record, clusterinfo.History, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.epoch, c.history, nil
}

func (c *memoryCluster) PublishEpoch(_ context.Context, e clusterinfo.HistoryEpoch) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.published = e.Number
	return nil
}

func (c *memoryCluster) PublishKeys(_ context.Context, s clusterinfo.KeyStates) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keys = s
	return nil
}

func (*memoryCluster) Name() string { return "node1" }

func (*memoryCluster) OtherControlPlanes(context.Context) ([]netip.Addr, error) { return nil, nil }

func (*memoryCluster) SignAdministrators(context.Context, Config) error { return nil }

func (*memoryCluster) Close() {}

var quick = Timing{Interval: time.Hour, RetryMin: time.Millisecond, RetryMax: time.Millisecond, Poll: time.Millisecond, Sign: time.Millisecond}

func newRenewer(t *testing.T, c *memoryCluster, now time.Time) *Renewer {
	t.Helper()
	r, err := New(Config{
		Root: c.root, Kubeadm: image, Cluster: keys.ClusterID{1}, Epoch: epoch.Keeper{Dir: t.TempDir(), TPM: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})}, Timing: quick, Now: func() time.Time { return now }, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Connect: func() (Cluster, error) { return c, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	r.plane.sync = func(...string) error { return nil } // on a busy disk, hundreds of these take minutes
	return r
}

// at returns the time after this share of the life of the original's certificates.
func at(t *testing.T, root string, share float64) time.Time {
	t.Helper()
	c := leaves(t, root)["apiserver"]
	return c.NotBefore.Add(time.Duration(float64(c.NotAfter.Sub(c.NotBefore)) * share))
}
