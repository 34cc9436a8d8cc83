package uninstall

import (
	"context"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// removal is a cluster that has Muster, with the controllers that end a namespace and approve certificates in plain kubeadm.
type removal struct {
	*ownertest.Owned
	api         *kubetest.Cluster
	kube        *clusterapi.Client
	info        clusterinfo.Info
	unencrypted []string
	letBackIn   bool
}

const planesDisk, workersDisk = "5f0c95b6-2a3d-4c7e-9f10-000000000001", "5f0c95b6-2a3d-4c7e-9f10-000000000002"

func newRemoval(t *testing.T) *removal {
	t.Helper()
	api, err := kubetest.Start(t.Context(), "namespace-controller", "garbage-collector-controller", "certificatesigningrequest-approving-controller")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	admin, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	ca := attesttest.NewCA(t)
	policy := attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})})
	r := &removal{Owned: ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, strings.TrimPrefix(api.Admin.Host, "https://"), policy), api: api}
	if err := r.Write(ownerdir.AdminConf, admin); err != nil {
		t.Fatal(err)
	}
	c := r.Cluster()
	c.Stage, c.ClusterID = ownerdir.StageInstalled, keys.ClusterID{3}.String()
	if err := r.Save(c); err != nil {
		t.Fatal(err)
	}
	if r.kube, err = clusterapi.Connect(admin); err != nil {
		t.Fatal(err)
	}
	old := ownertest.ListOf(ownertest.Before, "3.6.5-0", "1")
	r.info = clusterinfo.Info{ClusterID: keys.ClusterID{3}, MeasurementSalt: [32]byte{2}, KubernetesVersion: ownertest.Before, ControlPlaneEndpoint: "192.0.2.1:6443", Components: old.Components, Images: old.Images}
	return r
}

func (r *removal) create(t *testing.T, all ...client.Object) {
	t.Helper()
	for _, o := range all {
		if err := r.api.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
}

// edit changes an object, and repeats that if another program has written meanwhile.
func edit[T client.Object](t *testing.T, r *removal, o T, set func(T)) {
	t.Helper()
	for {
		if err := r.api.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			t.Fatal(err)
		}
		set(o)
		err := r.api.Client.Update(t.Context(), o)
		if err == nil {
			return
		}
		if !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
}

const clusterConfiguration = `apiServer:
  extraArgs:
  - {name: authorization-config, value: /etc/kubernetes/authz/config.yaml}
  - {name: enable-bootstrap-token-auth, value: "false"}
  - {name: kubelet-certificate-authority, value: /etc/kubernetes/pki/ca.crt}
apiVersion: kubeadm.k8s.io/v1beta4
controllerManager:
  extraArgs:
  - {name: cluster-signing-duration, value: 24h}
  - {name: controllers, value: '*,-certificatesigningrequest-approving-controller'}
kind: ClusterConfiguration
`

// staticPod is a control plane's pod as its kubelet shows it.
func staticPod(name, node string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name + "-" + node},
		Spec:       corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{{Name: name, Image: "x", Command: append([]string{name}, args...)}}},
	}
}

func (r *removal) manager(t *testing.T, args ...string) {
	t.Helper()
	p := staticPod("kube-controller-manager", "c1", args...)
	if err := r.api.Client.Delete(t.Context(), p, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	if args != nil {
		r.create(t, staticPod("kube-controller-manager", "c1", args...))
	}
}

// install makes a control plane and a worker, with everything that Muster has in a cluster.
func (r *removal) install(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	definitions, err := clusterapi.Definitions()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.kube.EnsureNamespace(ctx), r.kube.Apply(ctx, definitions, func(string) {})); err != nil {
		t.Fatal(err)
	}
	text, err := r.info.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	in := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	label := map[string]string{clusterinfo.ControlPlaneLabel: ""}
	notes := map[string]string{clusterinfo.EpochAnnotation: "1 x", "example.com/other": "stays"}
	enrollment := func(name string, id byte, role v1alpha1.Role, disk string, mode v1alpha1.DiskMode) *v1alpha1.AttestedNode {
		return &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{v1alpha1.RevokeCertificates}}, Spec: v1alpha1.AttestedNodeSpec{
			MachineID: attest.MachineID{id}.String(), Role: role, DiskID: disk, DiskMode: mode,
		}}
	}
	admin := ownertest.ServingCSR(t, "admin")
	admin.ObjectMeta, admin.Spec.SignerName = metav1.ObjectMeta{Name: "muster-admin-1"}, clusterinfo.AdministratorSigner
	r.create(t,
		&corev1.ConfigMap{ObjectMeta: in(clusterapi.Namespace, nodeaccess.ConfigMap), Data: map[string]string{nodeaccess.KeyControlPlanes: "\nc1\n"}},
		&corev1.ConfigMap{ObjectMeta: in(clusterapi.Namespace, clusterinfo.ConfigMap), Data: map[string]string{clusterinfo.Key: string(text)}},
		&corev1.Secret{ObjectMeta: in(clusterapi.Namespace, "muster-kms-root")},
		&corev1.ConfigMap{ObjectMeta: in(metav1.NamespaceSystem, "kubeadm-config"), Data: map[string]string{"ClusterConfiguration": clusterConfiguration}},
		&corev1.ConfigMap{ObjectMeta: in(metav1.NamespaceSystem, "kubelet-config"), Data: map[string]string{"kubelet": "kind: KubeletConfiguration\nrotateCertificates: true\nserverTLSBootstrap: true\n"}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1", Labels: label, Annotations: notes}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}},
		enrollment("c1", 1, v1alpha1.RoleControlPlane, planesDisk, v1alpha1.DiskModePlain),
		enrollment("w1", 2, v1alpha1.RoleWorker, workersDisk, v1alpha1.DiskModePlain),
		&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: workersDisk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: attest.MachineID{2}.String(), Salt: strings.Repeat("ab", 32), RootVersion: 1}},
		staticPod("kube-apiserver", "c1", "--enable-bootstrap-token-auth=true"), staticPod("kube-controller-manager", "c1", "--controllers=*,bootstrapsigner,tokencleaner"),
		admin,
	)
	r.ready(t, "c1", corev1.ConditionTrue)
	r.ready(t, "w1", corev1.ConditionTrue)
	if _, err := r.kube.InstallChart(ctx, clusterapi.Values{
		OwnerKeys: []string{strings.Repeat("A", 43) + "="}, JoinserviceImage: ownertest.ImageOf("joinservice", "1"), KMSImage: ownertest.ImageOf("kms", "1"),
	}, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
}

// ready sets a Node's condition.
func (r *removal) ready(t *testing.T, name string, is corev1.ConditionStatus) {
	t.Helper()
	n := &corev1.Node{}
	if err := r.api.Client.Get(t.Context(), client.ObjectKey{Name: name}, n); err != nil {
		t.Fatal(err)
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: is}}
	if err := r.api.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

func (r *removal) config() UninstallConfig {
	return UninstallConfig{
		Dir: r.Dir, Unencrypted: r.unencrypted, LetBackIn: r.letBackIn, Log: slog.New(slog.DiscardHandler),
		Report: progress.New(progress.Config{Out: io.Writer(r.Out), Format: progress.Plain}),
	}
}

// eventually waits until a check succeeds: admission policies take a moment.
func eventually(t *testing.T, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(err)
		}
	}
}

func (r *removal) as(t *testing.T, cfg *rest.Config, err error) *kubernetes.Clientset {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	k, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func (r *removal) node(t *testing.T, name string) *kubernetes.Clientset {
	t.Helper()
	cfg, err := r.api.AsUser("system:node:"+name, "system:nodes")
	return r.as(t, cfg, err)
}

// nodesWrite waits until kubelets may report the state of their Nodes: if one can't, its pods are moved.
func (r *removal) nodesWrite(t *testing.T) {
	t.Helper()
	for _, name := range []string{"c1", "w1"} {
		k := r.node(t, name)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // less than a Node needs to become NotReady
		var err error
		for ctx.Err() == nil {
			if _, err = k.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(`{"status":{"phase":"Running"}}`), metav1.PatchOptions{}, "status"); err == nil {
				break
			}
			_ = retry.Wait(ctx, 100*time.Millisecond)
		}
		cancel()
		if err != nil {
			t.Fatalf("%s may not write: %v", name, err)
		}
	}
}

// cuts is a way to the API server that breaks.
type cuts struct {
	mu     sync.Mutex
	count  int // of writes until it breaks; 0: broken or never
	broken bool
	stop   func()
	watch  func(*http.Request) // sees each request that is served
}

// newCuts leads the folder's kubeconfig over it.
func newCuts(t *testing.T, r *removal) *cuts {
	t.Helper()
	c := &cuts{}
	transport, err := rest.TransportFor(r.api.Admin)
	if err != nil {
		t.Fatal(err)
	}
	to, err := url.Parse(r.api.Admin.Host)
	if err != nil {
		t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(to) }, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		last, broken := c.see(req)
		if broken { // an answer that no client waits for to change
			http.Error(w, "broken", http.StatusNotImplemented)
			return
		}
		if last { // it has its effect, and no answer
			proxy.ServeHTTP(httptest.NewRecorder(), req.WithContext(context.WithoutCancel(req.Context())))
			panic(http.ErrAbortHandler)
		}
		proxy.ServeHTTP(w, req)
	}))
	t.Cleanup(server.Close)
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}
	conf.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "c"
	text, err := clientcmd.Write(*conf)
	if err == nil {
		err = r.Write(ownerdir.AdminConf, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// after breaks the way at the nth write from now; 0: never. stop is called then, as a signal would end the program.
func (c *cuts) after(n int, stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count, c.broken, c.stop = n, false, stop
}

// left returns how many writes are left until it breaks.
func (c *cuts) left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count
}

func (c *cuts) see(req *http.Request) (last, broken bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken {
		return false, true
	}
	if c.watch != nil {
		c.watch(req)
	}
	if req.Method == http.MethodGet || req.URL.Query().Has("dryRun") || c.count == 0 {
		return false, false
	}
	if c.count--; c.count > 0 {
		return false, false
	}
	c.broken = true
	c.stop()
	return true, false
}
