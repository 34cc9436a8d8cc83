package uninstall

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestAMusterThatIsUninstalledLeavesPlainKubeadm(t *testing.T) {
	r := newRemoval(t)
	t.Run("services that helm has not installed are left to their tool", r.foreign)
	r.install(t)
	if !t.Run("it is refused while something is in the way", r.refusals) {
		return
	}
	cuts := newCuts(t, r)
	violated := r.servicesEnd(t, cuts)
	runs := 0
	for err := errors.New("begun"); err != nil; runs++ {
		if runs > 25 {
			t.Fatalf("it does not end: %v\n%s", err, r.Out)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cuts.after(1+runs*(runs+1)/2, cancel)
		_, err = Uninstall(ctx, r.config())
		cancel()
		if err != nil && cuts.left() > 0 {
			t.Fatalf("it failed by itself: %v: %s\n%s", err, problem.Remedy(err), r.Out)
		}
		cuts.after(0, nil)
		r.nodesWrite(t)
	}
	if requests := violated(); len(requests) > 0 {
		t.Errorf("while a service ran, which deletes the Node of an enrollment that is being deleted: %v", requests)
	}
	t.Logf("%d runs", runs)
	if runs < 5 {
		t.Errorf("it was cut off %d times only", runs-1)
	}
	if r.Leaks([]byte(r.Out.String())) {
		t.Error("a secret was reported (K3)")
	}
	t.Run("nothing is left", r.isGone)
	t.Run("kubeadm's cluster goes on", r.goesOn)
	t.Run("what a machine's units write later is removed", r.later)
	t.Run("by its kinds the status sees that Muster is not there", r.noKinds)
	t.Run("a kubelet that does not run is named", r.silent)
}

// foreign has the chart's DaemonSet without a release.
func (r *removal) foreign(t *testing.T) {
	if err := r.kube.EnsureNamespace(t.Context()); err != nil {
		t.Fatal(err)
	}
	label := map[string]string{"app.kubernetes.io/part-of": "muster"}
	ds := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: "muster-kms", Labels: label}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: label},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: label}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}}},
	}}
	r.create(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}})
	r.manager(t, "--controllers=*")
	server := staticPod("kube-apiserver", "c1")
	r.create(t, server)
	sets := r.as(t, r.api.Admin, nil).AppsV1().DaemonSets(clusterapi.Namespace)
	if _, err := sets.Create(t.Context(), ds, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := Uninstall(t.Context(), r.config()); err == nil || !strings.Contains(err.Error(), "muster-kms") {
		t.Errorf("%v", err)
	}
	if err := sets.Delete(t.Context(), ds.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func(ctx context.Context) error {
		p, err := PlanUninstall(ctx, r.config())
		if err == nil {
			err = p.Err()
		}
		return err
	})
	r.manager(t)
	for _, o := range []client.Object{server, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1"}}} {
		if err := r.api.Client.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
}

// servicesEnd makes a pod of joinservice, and ends it, as its kubelet would, when the uninstall has looked for pods three times since the DaemonSet is gone.
// It returns the requests that came too early.
func (r *removal) servicesEnd(t *testing.T, c *cuts) (violated func() []string) {
	t.Helper()
	label := map[string]string{"app.kubernetes.io/part-of": "muster"}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: "muster-joinservice-1", Labels: label},
		Spec:       corev1.PodSpec{NodeName: "c1", TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	r.create(t, pod)
	k, background := r.as(t, r.api.Admin, nil), context.WithoutCancel(t.Context())
	runs := func() bool {
		_, err := k.CoreV1().Pods(clusterapi.Namespace).Get(background, pod.Name, metav1.GetOptions{})
		return err == nil
	}
	wanted := func() bool {
		_, err := k.AppsV1().DaemonSets(clusterapi.Namespace).Get(background, "muster-joinservice", metav1.GetOptions{})
		return err == nil
	}
	looks, early := 0, []string{}
	c.watch = func(req *http.Request) {
		path := req.URL.Path
		switch {
		case req.Method != http.MethodGet && !req.URL.Query().Has("dryRun") && (strings.Contains(path, "/attestednodes") || strings.Contains(path, "/customresourcedefinitions") || strings.HasSuffix(path, "/namespaces/"+clusterapi.Namespace)):
			if runs() {
				early = append(early, req.Method+" "+path)
			}
		case req.Method == http.MethodGet && strings.HasSuffix(path, "/"+clusterapi.Namespace+"/pods") && !wanted():
			if looks++; looks == 3 {
				if err := r.api.Client.Delete(background, pod); err != nil {
					t.Error(err)
				}
			}
		}
	}
	return func() []string {
		c.mu.Lock()
		defer c.mu.Unlock()
		return early
	}
}

func (r *removal) isGone(t *testing.T) {
	p, err := PlanUninstall(t.Context(), r.config())
	if err != nil || len(p.Steps) > 0 || len(p.Problems) > 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	if want := []UninstalledMachine{{"c1", v1alpha1.RoleControlPlane, true}, {"w1", v1alpha1.RoleWorker, true}}; !slices.Equal(p.Machines, want) {
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
		csr := ownertest.ServingCSR(t, name)
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
	anonymous := r.as(t, rest.AnonymousClientConfig(r.api.Admin), nil)
	m, err := anonymous.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(t.Context(), "cluster-info", metav1.GetOptions{})
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

func (r *removal) noKinds(t *testing.T) {
	kube, err := access.Connect(r.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := kube.Reader().Get(t.Context(), types.NamespacedName{Name: v1alpha1.PolicyName}, &v1alpha1.AttestationPolicy{}); !meta.IsNoMatchError(err) {
		t.Errorf("%v, want that there is no such kind", err)
	}
}

// silent has two Nodes whose conditions say Ready, and the Lease of only one is renewed.
func (r *removal) silent(t *testing.T) {
	leases := r.as(t, r.api.Admin, nil).CoordinationV1().Leases(corev1.NamespaceNodeLease)
	lease := func(node string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: time.Now()}}}
	}
	if _, err := leases.Create(t.Context(), lease("w1"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	renewed, err := leases.Create(t.Context(), lease("c1"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(100 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			renewed.Spec.RenewTime.Time = time.Now()
			next, err := leases.Update(ctx, renewed, metav1.UpdateOptions{})
			if err != nil {
				if ctx.Err() == nil {
					t.Error(err)
				}
				return
			}
			renewed = next
		}
	}()
	p := &UninstallPlan{Machines: []UninstalledMachine{{Node: "c1", Ready: true}, {Node: "off"}, {Node: "w1", Ready: true}}}
	silent, err := p.Listen(t.Context(), r.Dir, 5*time.Second)
	cancel()
	<-done
	if err != nil || !slices.Equal(silent, []string{"w1"}) || !p.Machines[0].Ready || p.Machines[2].Ready {
		t.Errorf("silent are %q, want w1; %+v, %v", silent, p.Machines, err)
	}
}

// clientRequest is the request for a kubelet's client certificate.
func clientRequest(t *testing.T, node string) certificatesv1.CertificateSigningRequestSpec {
	t.Helper()
	return certificatesv1.CertificateSigningRequestSpec{
		Request: ownertest.CSROf(t, node, func(*x509.CertificateRequest) {}), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
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
	rotates := func(phase clusterinfo.RotationPhase) func(*testing.T) {
		return describe(func(i *clusterinfo.Info) {
			if i.Rotation = nil; phase != "" {
				id, public := ownertest.MadeKey(clusterinfo.ServiceAccountKey)
				i.Rotation = &clusterinfo.Rotation{Key: clusterinfo.ServiceAccountKey, Phase: phase, ID: id, Public: public, Since: time.Now()}
			}
		})
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
	next := ownertest.ListOf(ownertest.After, "3.6.6-0", "2")
	release := &clusterinfo.Release{KubernetesVersion: ownertest.After, Components: next.Components, Images: next.Images}
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
				n.Spec.Unschedulable = value != ""
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
		s, err := orders.Sign(r.Dir, n, ownerorder.ActionReboot, nil, time.Now(), key)
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
		{"an approver of which nothing is known", managed(), on, attestv1.Reason_REASON_MACHINE_CONFIG, "on c1: run the block uninstall-control-plane of docs/runbooks.md#uninstall on each of these control planes, one after another. For one that will not return, run muster forget NAME"},
		{"an upgrade of Kubernetes", describe(func(i *clusterinfo.Info) { i.Next = release }), describe(func(i *clusterinfo.Info) { i.Next = nil }), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "being upgraded"},
		{"an upgrade that only the folder knows", folder(func(c *ownerdir.Cluster) { c.Upgrade = release }), folder(func(c *ownerdir.Cluster) { c.Upgrade = nil }), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "being upgraded"},
		{"a phase of a rotation", rotates(clusterinfo.RotationUse), rotates(""), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "muster rotate service-account-key completes it"},
		{"a rotation that is not finished", rotates(clusterinfo.RotationSettled), rotates(""), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "muster rotate service-account-key --finish completes it"},
		{"a control plane that joins", hold("c2", 0), hold("c2", time.Minute), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "c2 holds the join lease"},
		{"a node that muster has drained", drained("1"), drained(""), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "has drained w1"},
		{"an order that may begin", order, reports(v1alpha1.OrderDone), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, `w1 has an unfinished order "reboot"`},
		{"an order that runs", reports(v1alpha1.OrderRunning), reports(v1alpha1.OrderFailed), attestv1.Reason_REASON_CONTROL_PLANE_BUSY, `w1 has an unfinished order "reboot"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.breaks(t)
			_, err := Uninstall(t.Context(), r.config())
			if err == nil {
				t.Fatal("it was not refused")
			}
			if p := problem.Explain(err); p.Reason != attest.ReasonName(tt.reason) || !strings.Contains(p.Message, tt.say) || p.Remedy == "" {
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
	r.ready(t, "w1", corev1.ConditionUnknown) // it is off: no problem, but it would not come back by itself
	p, err = PlanUninstall(t.Context(), r.config())
	if err != nil || p.Err() != nil || len(p.Notes) != 1 || !strings.HasPrefix(p.Notes[0], "not Ready: w1. ") || !slices.Contains(p.Machines, UninstalledMachine{"w1", v1alpha1.RoleWorker, false}) {
		t.Errorf("with w1 off: %+v, %v", p, err)
	}
	r.ready(t, "w1", corev1.ConditionTrue)
}
