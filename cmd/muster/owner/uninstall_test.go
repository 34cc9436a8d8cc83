package owner

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
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
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/envtest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// removal is a cluster that has Muster, with the controllers that end a namespace and approve certificates in plain kubeadm.
type removal struct {
	*owned
	api         *envtest.Cluster
	kube        *clusterapi.Client
	info        clusterinfo.Info
	unencrypted []string
	letBackIn   bool
}

const planesDisk, workersDisk = "5f0c95b6-2a3d-4c7e-9f10-000000000001", "5f0c95b6-2a3d-4c7e-9f10-000000000002"

func newRemoval(t *testing.T) *removal {
	t.Helper()
	api, err := envtest.Start(t.Context(), "namespace-controller", "garbage-collector-controller", "certificatesigningrequest-approving-controller")
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
	r := &removal{owned: own(t, &firstMachine{addr: "192.0.2.1:9000"}, strings.TrimPrefix(api.Admin.Host, "https://"), policy), api: api}
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
	old := listOf(before, "3.6.5-0", "1")
	r.info = clusterinfo.Info{ClusterID: keys.ClusterID{3}, MeasurementSalt: [32]byte{2}, KubernetesVersion: before, ControlPlaneEndpoint: "192.0.2.1:6443", Components: old.Components, Images: old.Images}
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
	definitions, err := Definitions()
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
		return &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{v1alpha1.RetireCertificates}}, Spec: v1alpha1.AttestedNodeSpec{
			MachineID: attest.MachineID{id}.String(), Role: role, DiskID: disk, DiskMode: mode,
		}}
	}
	admin := servingCSR(t, "admin")
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
	if _, err := r.kube.InstallChart(ctx, clusterapi.Values{
		OwnerPublicKey: strings.Repeat("A", 43) + "=", JoinserviceImage: imageOf("joinservice", "1"), KMSImage: imageOf("kms", "1"),
	}, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
}

func (r *removal) config() UninstallConfig {
	return UninstallConfig{
		Dir: r.Dir, Unencrypted: r.unencrypted, LetBackIn: r.letBackIn, Log: slog.New(slog.DiscardHandler),
		Report: progress.New(progress.Config{Out: io.Writer(r.out), Format: progress.Plain}),
	}
}

// eventually waits until a check succeeds: admission policies take a moment.
func eventually(t *testing.T, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
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
		}
		cancel()
		if err != nil {
			t.Fatalf("%s may not write: %v", name, err)
		}
	}
}

func TestAMusterThatIsUninstalledLeavesPlainKubeadm(t *testing.T) {
	r := newRemoval(t)
	r.install(t)
	t.Run("it is refused while something is in the way", r.refusals)
	cuts := newCuts(t, r)
	runs := 0
	for err := errors.New("begun"); err != nil; runs++ {
		if runs > 25 {
			t.Fatalf("it does not end: %v\n%s", err, r.out)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cuts.after(1+runs*(runs+1)/2, cancel)
		_, err = Uninstall(ctx, r.config())
		cancel()
		if err != nil && cuts.left() > 0 {
			t.Fatalf("it failed by itself: %v: %s\n%s", err, remedy(err), r.out)
		}
		cuts.after(0, nil)
		r.nodesWrite(t)
	}
	t.Logf("%d runs", runs)
	if runs < 5 {
		t.Errorf("it was cut off %d times only", runs-1)
	}
	if r.leaks([]byte(r.out.String())) {
		t.Error("a secret was reported (K3)")
	}
	t.Run("nothing is left", r.isGone)
	t.Run("kubeadm's cluster goes on", r.goesOn)
	t.Run("what a machine's units write later is removed", r.later)
}

func (r *removal) isGone(t *testing.T) {
	p, err := PlanUninstall(t.Context(), r.config())
	if err != nil || len(p.Steps) > 0 || len(p.Problems) > 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	if want := []UninstalledMachine{{"c1", v1alpha1.RoleControlPlane}, {"w1", v1alpha1.RoleWorker}}; !slices.Equal(p.Machines, want) {
		t.Errorf("machines %v, want %v", p.Machines, want)
	}
	k := r.as(t, r.api.Admin, nil)
	if l, err := k.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(t.Context(), metav1.ListOptions{}); err != nil || len(l.Items) > 0 {
		t.Errorf("%d policies, %v", len(l.Items), err)
	}
	if _, err := k.CoreV1().Namespaces().Get(t.Context(), clusterapi.Namespace, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the namespace: %v", err)
	}
	if names, err := r.kube.Defined(t.Context(), "attestednodes.muster.dev", "attesteddisks.muster.dev", "attestationpolicies.muster.dev"); err != nil || len(names) > 0 {
		t.Errorf("definitions %v, %v", names, err)
	}
	roles, err := k.RbacV1().ClusterRoles().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range roles.Items {
		if strings.HasPrefix(o.Name, "muster") {
			t.Errorf("ClusterRole %s is left", o.Name)
		}
	}
	n, err := k.CoreV1().Nodes().Get(t.Context(), "c1", metav1.GetOptions{})
	if err != nil || len(n.Annotations) != 1 || n.Annotations["example.com/other"] != "stays" || len(n.Labels) != 1 {
		t.Errorf("annotations %v, labels %v, %v", n.Annotations, n.Labels, err)
	}
	saved, err := filepath.Glob(filepath.Join(r.Path(), "backups", "*", "disks.yaml"))
	if err != nil || len(saved) == 0 {
		t.Fatalf("no backup: %v", err)
	}
	if text, err := os.ReadFile(saved[0]); err != nil || !strings.Contains(string(text), workersDisk) {
		t.Errorf("the backup does not have the disk: %v", err)
	}
}

// token is a bootstrap token as `kubeadm token create` makes it.
const token = "abcdef.0123456789abcdef"

// goesOn has a running node and a new machine get certificates as with plain kubeadm.
func (r *removal) goesOn(t *testing.T) {
	r.create(t, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "bootstrap-token-abcdef"}, Type: corev1.SecretTypeBootstrapToken,
		StringData: map[string]string{"token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token"},
	})
	joins := rest.AnonymousClientConfig(r.api.Admin)
	joins.BearerToken = token
	for name, who := range map[string]*kubernetes.Clientset{"w1": r.node(t, "w1"), "new": r.as(t, joins, nil)} {
		csr := servingCSR(t, name)
		csr.Spec = clientRequest(t, name)
		made, err := who.CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		eventually(t, func(ctx context.Context) error {
			got := &certificatesv1.CertificateSigningRequest{}
			if err := r.api.Client.Get(ctx, client.ObjectKeyFromObject(made), got); err != nil {
				return err
			}
			if len(got.Status.Certificate) == 0 {
				return fmt.Errorf("%s has no certificate: %+v", name, got.Status.Conditions)
			}
			return nil
		})
	}
	if _, err := r.as(t, joins, nil).CoreV1().Nodes().Get(t.Context(), "w1", metav1.GetOptions{}); err != nil {
		t.Errorf("kubeadm join could not see whether the name is taken: %v", err)
	}
	anybody := r.as(t, rest.AnonymousClientConfig(r.api.Admin), nil)
	m, err := anybody.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(t.Context(), "cluster-info", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if c, err := clientcmd.Load([]byte(m.Data["kubeconfig"])); err != nil || len(c.AuthInfos) > 0 || c.Clusters[""] == nil || len(c.Clusters[""].CertificateAuthorityData) == 0 {
		t.Errorf("cluster-info: %v\n%s", err, m.Data["kubeconfig"])
	}
	for name, want := range map[string]string{
		"kubeadm-config": "apiServer:\n  extraArgs:\n  - name: authorization-config\n    value: /etc/kubernetes/authz/config.yaml\napiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager: {}\nkind: ClusterConfiguration\n",
		"kubelet-config": "kind: KubeletConfiguration\nrotateCertificates: true\n",
	} {
		m := &corev1.ConfigMap{}
		if err := r.api.Client.Get(t.Context(), types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: name}, m); err != nil {
			t.Fatal(err)
		}
		for key, text := range m.Data {
			if text != want {
				t.Errorf("%s of %s:\n%s", key, name, text)
			}
		}
	}
}

// later removes what a control plane's units have written after the uninstall; what the administrator has removed stays removed.
func (r *removal) later(t *testing.T) {
	edit(t, r, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1"}}, func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, clusterinfo.EpochAnnotation, "2 y") })
	if p, err := Uninstall(t.Context(), r.config()); err != nil || len(p.Steps) != 1 {
		t.Errorf("%+v, %v", p, err)
	}
	k := r.as(t, r.api.Admin, nil)
	if err := k.RbacV1().ClusterRoleBindings().Delete(t.Context(), "kubeadm:kubelet-bootstrap", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if p, err := Uninstall(t.Context(), r.config()); err != nil || len(p.Steps) != 0 {
		t.Errorf("%+v, %v", p, err)
	}
}

// clientRequest is the request for a kubelet's client certificate.
func clientRequest(t *testing.T, node string) certificatesv1.CertificateSigningRequestSpec {
	t.Helper()
	return certificatesv1.CertificateSigningRequestSpec{
		Request: csrOf(t, node, func(*x509.CertificateRequest) {}), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	}
}

// refusals makes each problem, and takes only it away again.
func (r *removal) refusals(t *testing.T) {
	worker := func() *v1alpha1.AttestedNode {
		return &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	}
	spec := func(set func(*v1alpha1.AttestedNodeSpec)) func(*testing.T) {
		return func(t *testing.T) { edit(t, r, worker(), func(n *v1alpha1.AttestedNode) { set(&n.Spec) }) }
	}
	mode := func(m v1alpha1.DiskMode) func(*testing.T) {
		return spec(func(s *v1alpha1.AttestedNodeSpec) { s.DiskMode = m })
	}
	access := func(entries map[string]nodeaccess.Entry) func(*testing.T) {
		return func(t *testing.T) {
			l := nodeaccess.New(false)
			l.Set("c1", nodeaccess.Entry{ControlPlane: true})
			for name, e := range entries {
				l.Set(name, e)
			}
			data, err := l.Data()
			if err != nil {
				t.Fatal(err)
			}
			edit(t, r, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: nodeaccess.ConfigMap}}, func(m *corev1.ConfigMap) { m.Data = data })
		}
	}
	describe := func(set func(*clusterinfo.Info)) func(*testing.T) {
		return func(t *testing.T) {
			if err := r.kube.Describe(t.Context(), func(i *clusterinfo.Info) error { set(i); return nil }); err != nil {
				t.Fatal(err)
			}
		}
	}
	folder := func(set func(*ownerdir.Cluster)) func(*testing.T) {
		return func(t *testing.T) {
			c := r.Cluster()
			set(&c)
			if err := r.Save(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	next := listOf(after, "3.6.6-0", "2")
	release := &clusterinfo.Release{KubernetesVersion: after, Components: next.Components, Images: next.Images}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: clusterinfo.ControlPlaneLease}}
	r.create(t, lease)
	hold := func(holder string, since time.Duration) func(*testing.T) {
		return func(t *testing.T) {
			edit(t, r, lease, func(l *coordinationv1.Lease) {
				l.Spec.HolderIdentity, l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = &holder, new(metav1.NewMicroTime(time.Now().Add(-since))), new(int32(40))
			})
		}
	}
	drained := func(value string) func(*testing.T) {
		return func(t *testing.T) {
			edit(t, r, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, func(n *corev1.Node) {
				delete(n.Annotations, v1alpha1.Returns)
				if value != "" {
					metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.Returns, value)
				}
			})
		}
	}
	managed := func(args ...string) func(*testing.T) { return func(t *testing.T) { r.manager(t, args...) } }
	off := managed("--controllers=*,-certificatesigningrequest-approving-controller")
	on := managed("--controllers=*,bootstrapsigner,tokencleaner")
	var note string
	order := func(t *testing.T) {
		key, err := r.OwnerKey()
		if err != nil {
			t.Fatal(err)
		}
		n := worker()
		if err := r.api.Client.Get(t.Context(), client.ObjectKeyFromObject(n), n); err != nil {
			t.Fatal(err)
		}
		s, err := newOrder(r.Dir, n, ownerorder.ActionReboot, nil, time.Now(), key)
		if err != nil {
			t.Fatal(err)
		}
		note = s.Digest()
		edit(t, r, worker(), func(n *v1alpha1.AttestedNode) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, s.Note())
		})
	}
	reports := func(state v1alpha1.OrderState) func(*testing.T) {
		return func(t *testing.T) {
			n := worker()
			if err := r.api.Client.Get(t.Context(), client.ObjectKeyFromObject(n), n); err != nil {
				t.Fatal(err)
			}
			n.Status.Order = &v1alpha1.OrderReport{Digest: note, Action: string(ownerorder.ActionReboot), State: state}
			if err := r.api.Client.Status().Update(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}
	}
	later, past := nodeaccess.Entry{Revoked: &nodeaccess.Revocation{Until: time.Now().Add(time.Hour)}}, nodeaccess.Entry{Revoked: &nodeaccess.Revocation{Until: time.Now().Add(-time.Hour)}}
	for _, tt := range []struct {
		name        string
		breaks, fix func(*testing.T)
		reason      attestv1.Reason
		say         string
	}{
		{"an encrypted state disk", mode(v1alpha1.DiskModeLUKS), mode(v1alpha1.DiskModePlain), attestv1.Reason_REASON_STATE_DISK, "the state disks of w1 are encrypted"},
		{"a disk of which nothing is recorded", mode(""), func(*testing.T) { r.unencrypted = []string{"w1"} }, attestv1.Reason_REASON_STATE_DISK, "--unencrypted NODE"},
		{"an encrypted disk that the owner calls plain", mode(v1alpha1.DiskModeLUKS), mode(v1alpha1.DiskModePlain), attestv1.Reason_REASON_STATE_DISK, "the state disks of w1 are encrypted"},
		{"a banned machine", spec(func(s *v1alpha1.AttestedNodeSpec) { s.Banned = true }), spec(func(s *v1alpha1.AttestedNodeSpec) { s.Banned = false }), attestv1.Reason_REASON_BANNED, "w1"},
		{"a suspended node", access(map[string]nodeaccess.Entry{"w7": {Suspended: true}}), access(nil), attestv1.Reason_REASON_BANNED, "w7"},
		{"a revoked certificate", access(map[string]nodeaccess.Entry{"w8": later}), access(map[string]nodeaccess.Entry{"w8": past}), attestv1.Reason_REASON_CERTIFICATE_RETIRED, "w8 until"},
		{"a revoked certificate that the owner accepts", access(map[string]nodeaccess.Entry{"w8": later}), func(*testing.T) { r.letBackIn = true }, attestv1.Reason_REASON_CERTIFICATE_RETIRED, "--let-back-in"},
		{"no approver", off, on, attestv1.Reason_REASON_MACHINE_CONFIG, "uninstall-control-plane"},
		{"an approver of which nothing is known", managed(), on, attestv1.Reason_REASON_MACHINE_CONFIG, "c1"},
		{"an upgrade of Kubernetes", describe(func(i *clusterinfo.Info) { i.Next = release }), describe(func(i *clusterinfo.Info) { i.Next = nil }), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "being upgraded"},
		{"an upgrade that only the folder knows", folder(func(c *ownerdir.Cluster) { c.Upgrade = release }), folder(func(c *ownerdir.Cluster) { c.Upgrade = nil }), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "being upgraded"},
		{"a control plane that joins", hold("c2", 0), hold("c2", time.Minute), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "c2 holds the join lease"},
		{"a node that muster has drained", drained("1"), drained(""), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "has drained w1"},
		{"an order that may begin", order, reports(v1alpha1.OrderDone), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, `w1 has the order "reboot"`},
		{"an order that runs", reports(v1alpha1.OrderRunning), reports(v1alpha1.OrderFailed), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, `w1 has the order "reboot"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.breaks(t)
			_, err := Uninstall(t.Context(), r.config())
			if p := Explain(err); err == nil || p.Reason != attest.ReasonName(tt.reason) || !strings.Contains(p.Message, tt.say) || p.Remedy == "" {
				t.Errorf("%+v", p)
			}
			tt.fix(t)
			p, err := PlanUninstall(t.Context(), r.config())
			if err != nil || p.Err() != nil || len(p.Steps) != 8 {
				t.Errorf("with only that corrected: %+v, %v", p, err)
			}
		})
	}
	mode(v1alpha1.DiskModePlain)(t)
	access(nil)(t)
	r.unencrypted, r.letBackIn = nil, false
	p, err := PlanUninstall(t.Context(), r.config())
	if err != nil || p.Err() != nil || len(p.Notes) > 0 {
		t.Errorf("%+v, %v", p, err)
	}
}

// cuts is a way to the API server that breaks.
type cuts struct {
	mu     sync.Mutex
	count  int // of writes until it breaks; 0: broken or never
	broken bool
	stop   func()
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
		if broken {
			panic(http.ErrAbortHandler)
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
