// Package kubetest runs a real Kubernetes control plane for tests: etcd, kube-apiserver and kube-controller-manager as plain
// processes on loopback. Tests use the signers, RBAC, admission policies and token reviews of Kubernetes itself.
//
// The programs come from the folder in the environment variable MUSTER_KUBE_BIN, or from the cache that `lab kube-binaries`
// fills. Without them tests fail with an error that names both.
package kubetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/objects/podsecurity"
	"github.com/muster-k8s/muster/internal/service/clusterview"
)

const (
	startTimeout = 10 * time.Minute // on a machine that builds at the same time
	stopTimeout  = 5 * time.Minute
	// garbagePercent is GOGC of the programs and of the tests' process, see [Verify]: 100 without it.
	garbagePercent = 400
)

// Cluster is a running control plane without nodes.
type Cluster struct {
	// Admin has all rights.
	Admin *rest.Config
	// Client has the rights of Admin.
	Client client.Client
	// Kubeconfig is the path of Admin's kubeconfig.
	Kubeconfig string
	// Bin is the folder of the programs, including kubectl.
	Bin string
	// Dir holds the cluster's files; the programs' logs are *.log.
	Dir string

	pki   *pki
	procs []*process
	// release gives the programs' ports back.
	release func() error
}

// Start starts a cluster. It is for TestMain, so that the tests of a package share one; after a failure it stops what it
// has started. kube-controller-manager runs the signers, and the named controllers.
func Start(ctx context.Context, controllers ...string) (*Cluster, error) {
	return StartWith(ctx, nil, controllers...)
}

// StartWith starts a cluster whose API server has extra arguments.
func StartWith(ctx context.Context, args []string, controllers ...string) (_ *Cluster, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, errors.New("the control plane did not become ready in time"))
	defer cancel()
	bin, err := Binaries()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "muster-envtest-")
	if err != nil {
		return nil, err
	}
	c := &Cluster{Bin: bin, Dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	if c.pki, err = newPKI(dir); err != nil {
		return nil, err
	}
	ports, release, err := ReservePorts(ctx, 3)
	if err != nil {
		return nil, err
	}
	c.release = release
	server := fmt.Sprintf("https://127.0.0.1:%d", ports[2])
	if c.Kubeconfig, err = c.pki.kubeconfig(dir, "admin", server, "system:masters"); err != nil {
		return nil, err
	}
	manager, err := c.pki.kubeconfig(dir, "system:kube-controller-manager", server)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "audit-policy.yaml"), []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "admission.yaml"), []byte(podsecurity.Config), 0o600); err != nil {
		return nil, err
	}
	etcd := fmt.Sprintf("http://127.0.0.1:%d", ports[0])
	if err := c.run(bin, "etcd", "--data-dir="+filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+etcd, "--advertise-client-urls="+etcd, fmt.Sprintf("--listen-peer-urls=http://127.0.0.1:%d", ports[1])); err != nil {
		return nil, err
	}
	if err := c.run(bin, "kube-apiserver", append([]string{"--etcd-servers=" + etcd, "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", ports[2]),
		"--advertise-address=192.0.2.250", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged",
		"--tls-cert-file=" + c.pki.file("apiserver.crt"), "--tls-private-key-file=" + c.pki.file("apiserver.key"), "--client-ca-file=" + c.pki.file("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + c.pki.file("sa.key"), "--service-account-signing-key-file=" + c.pki.file("sa.key"),
		"--audit-policy-file=" + filepath.Join(dir, "audit-policy.yaml"), "--audit-log-path=" + filepath.Join(dir, auditLog), "--audit-log-mode=blocking",
		"--enable-bootstrap-token-auth", "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction," + podsecurity.EventRateLimit, "--admission-control-config-file=" + filepath.Join(dir, "admission.yaml"), "--disable-admission-plugins=ServiceAccount"}, args...)...); err != nil {
		return nil, err
	}
	if err := c.connect(ctx, server); err != nil {
		return nil, err
	}
	// Most tests need only the signers: the approver does not run, as in a cluster of Muster's.
	if err := c.run(bin, "kube-controller-manager", "--kubeconfig="+manager, "--controllers="+strings.Join(append(controllers, "certificatesigningrequest-signing-controller"), ","), "--leader-elect=false", "--use-service-account-credentials",
		"--secure-port=0", "--cluster-signing-cert-file="+c.pki.file("ca.crt"), "--cluster-signing-key-file="+c.pki.file("ca.key"), "--cluster-signing-duration=24h"); err != nil {
		return nil, err
	}
	return c, nil
}

// CA returns the cluster's certificate authority in PEM.
func (c *Cluster) CA() []byte { return bytes.Clone(c.Admin.CAData) }

// Stop ends the programs and removes the cluster's files.
func (c *Cluster) Stop() error {
	var errs []error
	// etcd is stopped last: an API server that lost it does not end.
	for i := len(c.procs) - 1; i >= 0; i-- {
		errs = append(errs, c.procs[i].stop())
	}
	if c.release != nil {
		errs = append(errs, c.release())
	}
	return errors.Join(append(errs, os.RemoveAll(c.Dir))...)
}

// connect waits until the API server serves.
func (c *Cluster) connect(ctx context.Context, server string) error {
	c.Admin = c.pki.config("admin", server)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := c.ready(ctx)
		if err == nil {
			return nil
		}
		for _, p := range c.procs {
			select {
			case <-p.done:
				return fmt.Errorf("%s ended: %w\n%s", p.name, p.err, p.tail())
			default:
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w\n%s", context.Cause(ctx), err, c.procs[len(c.procs)-1].tail())
		}
	}
}

func (c *Cluster) ready(ctx context.Context) error {
	var err error
	if c.Client == nil {
		scheme := clusterview.Scheme()
		if err := rbacv1.AddToScheme(scheme); err != nil {
			return err
		}
		if c.Client, err = client.New(c.Admin, client.Options{Scheme: scheme}); err != nil {
			c.Client = nil
			return err
		}
	}
	return readyz(ctx, c.Admin)
}

// run starts a program whose log goes to a file.
func (c *Cluster) run(bin, name string, args ...string) error {
	p := &process{name: name, log: filepath.Join(c.Dir, name+".log"), done: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return err
	}
	p.cmd = exec.Command(filepath.Join(bin, name), args...) // not CommandContext: Stop ends them in order
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Dir = c.Dir
	// A sixth of the API server's processor time would be garbage collection. Its heap is small, so it may grow more between two.
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("GOGC=%d", garbagePercent))
	// They end when the test binary is killed.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// The signal is sent when the thread that started the program ends, so the thread must stay.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		defer func() { _ = log.Close() }()
		if err := p.cmd.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		p.err = p.cmd.Wait()
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	c.procs = append(c.procs, p)
	return nil
}

type process struct {
	name, log string
	cmd       *exec.Cmd
	done      chan struct{}
	err       error // valid when done
}

func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("%s had to be killed", p.name)
	}
}

// tail returns the end of the log.
func (p *process) tail() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}

// Binaries finds the folder of the Kubernetes programs, including kubectl.
func Binaries() (string, error) {
	const program = "etcd"
	if dir := os.Getenv("MUSTER_KUBE_BIN"); dir != "" {
		if _, err := os.Stat(filepath.Join(dir, program)); err != nil {
			return "", fmt.Errorf("MUSTER_KUBE_BIN: %w", err)
		}
		return dir, nil
	}
	// The cache keeps several releases, and a folder of a release that a test upgrades from has no etcd.
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	found, err := filepath.Glob(filepath.Join(cache, "muster", "kube", "*", program))
	if err != nil {
		return "", err
	}
	newest, at := "", time.Time{}
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.ModTime().After(at) {
			newest, at = filepath.Dir(path), info.ModTime()
		}
	}
	if newest == "" {
		return "", fmt.Errorf("no Kubernetes programs below %s: run `go run ./lab kube-binaries`, or set MUSTER_KUBE_BIN to a folder that has etcd, kube-apiserver and kube-controller-manager", filepath.Join(cache, "muster", "kube"))
	}
	return newest, nil
}
