package doctor

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

const patience = 10 * time.Minute

var shared *kubetest.Cluster

func TestMain(m *testing.M) {
	kubetest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		if shared, err = kubetest.Start(ctx); err != nil {
			return nil, err
		}
		return shared.Stop, nil
	})
}

// patient is a healthy cluster on a real API server, with its chart installed, and its owner's folder.
type patient struct {
	folder string
	dir    *ownerdir.Dir
	kube   *clusterapi.Client
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
	now    func() time.Time
}

func (p *patient) examine(t *testing.T) *checkup.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		r := Examine(ctx, Config{Folder: p.folder, DialContext: p.dial, Now: p.now})
		// An API server whose etcd waits for a busy disk is briefly not ready. None of the faults here is meant to do
		// that.
		if !slices.ContainsFunc(r.Findings, func(f checkup.Finding) bool { return f.Check == CheckAPI && f.Level == checkup.Fail }) {
			return r
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return r
		}
	}
}

func try(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func newPatient(t *testing.T) *patient {
	t.Helper()
	ctx := t.Context()
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	_, key, err := ed25519.GenerateKey(nil)
	try(t, err)
	text, err := os.ReadFile(shared.Kubeconfig)
	try(t, err)
	secrets := ownerdir.NewSecrets([32]byte{7})
	id := keys.NewRoot(secrets.Root, secrets.Salt).ClusterID(secrets.MeasurementSalt)
	m.LockTo(id)
	p := &patient{folder: filepath.Join(t.TempDir(), "muster-prod"), now: time.Now}
	endpoint := strings.TrimPrefix(shared.Admin.Host, "https://")
	d, err := ownerdir.Create(p.folder, ownerdir.New{
		Cluster: ownerdir.Cluster{Name: "prod", Endpoint: "192.168.77.11:9000", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: endpoint, PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}},
		Secrets: secrets, OwnerKey: key, Policy: attesttest.Policy(t, ca, []*attesttest.Machine{m}, attesttest.ControlPlanes(m)),
	})
	try(t, err)
	c := d.Cluster()
	c.Stage, c.ClusterID, c.ControlPlanes = ownerdir.StageInstalled, id.String(), map[string]attest.MachineID{"node1": m.ID()}
	try(t, d.Save(c), d.Write(ownerdir.AdminConf, text))
	p.kube, err = access.Connect(d)
	try(t, err)

	definitions, err := clusterapi.Definitions()
	try(t, err)
	report := func(string) {}
	try(t, p.kube.EnsureNamespace(ctx), p.kube.Apply(ctx, definitions, report))
	_, err = p.kube.Enroll(ctx, "node1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane, Addresses: []string{"192.168.77.11"}}, keys.DiskSalt{})
	_, signed, serr := policies.SignedPolicy(d)
	try(t, err, serr, p.kube.EnsureAccess(ctx, false, "node1", nil), ownertest.PutPolicy(ctx, p.kube, signed))
	info := &clusterinfo.Info{ClusterID: id, MeasurementSalt: secrets.MeasurementSalt, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: endpoint}
	described, err := info.Marshal()
	try(t, err)
	for _, o := range []client.Object{
		&corev1.Secret{ObjectMeta: in("muster-kms-root"), Data: map[string][]byte{"root": secrets.Root[:], "salt": secrets.Salt[:]}},
		&corev1.ConfigMap{ObjectMeta: in(clusterinfo.ConfigMap), Data: map[string]string{clusterinfo.Key: string(described)}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, apiServer("node1", extendTokens+"=false"),
	} {
		try(t, shared.Client.Create(ctx, o))
	}
	public := key.Public().(ed25519.PublicKey)
	_, err = p.kube.InstallChart(ctx, clusterapi.Values{
		OwnerKeys:        []string{base64.StdEncoding.EncodeToString(public)},
		JoinserviceImage: "registry.example/joinservice@sha256:" + strings.Repeat("1", 64), KMSImage: "registry.example/kms@sha256:" + strings.Repeat("2", 64),
	}, slog.New(slog.DiscardHandler))
	try(t, err)
	p.healthy(t)
	try(t, p.kube.EnsureAccess(ctx, false, "node1", nil)) // as joinservice does, which does not run here
	try(t, d.Close())                                     // doctor records the state of the cluster in it
	p.dir, err = ownerdir.View(p.folder)
	try(t, err)
	t.Cleanup(func() { _ = p.dir.Close() })
	p.dial = serveJoin(t, m)
	return p
}

func in(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: name}
}

// healthy writes the status that controllers, kubelets and services would write.
func (p *patient) healthy(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	change(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, true, func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.NewTime(time.Now().Add(time.Hour))}} // until the test ends
	})
	p.attested(t)
	change(t, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, true, func(a *v1alpha1.AttestationPolicy) {
		a.Status = v1alpha1.AttestationPolicyStatus{Accepted: true, ObservedGeneration: a.Generation, Generation: a.Generation, Serial: 1}
	})
	for _, name := range clusterapi.Services {
		set := &unstructured.Unstructured{}
		set.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("DaemonSet"))
		try(t, shared.Client.Get(ctx, client.ObjectKey{Namespace: clusterapi.Namespace, Name: name}, set))
		try(t, unstructured.SetNestedMap(set.Object, map[string]any{
			"observedGeneration": set.GetGeneration(), "desiredNumberScheduled": int64(1), "currentNumberScheduled": int64(1), "updatedNumberScheduled": int64(1), "numberReady": int64(1), "numberMisscheduled": int64(0),
		}, "status"))
		try(t, shared.Client.Status().Update(ctx, set))
	}
}

// attested says that the machine was accepted just now: it does that every five minutes, and doctor warns after fifteen.
func (p *patient) attested(t *testing.T) {
	t.Helper()
	change(t, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, true, func(n *v1alpha1.AttestedNode) {
		n.Status.LastVerdict, n.Status.PolicySerial = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}, 1
	})
}

// change reads an object, changes it, and writes it or its status.
func change[T client.Object](t *testing.T, o T, status bool, f func(T)) {
	t.Helper()
	try(t, shared.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o))
	f(o)
	if status {
		try(t, shared.Client.Status().Update(t.Context(), o))
		return
	}
	try(t, shared.Client.Update(t.Context(), o))
}

// serveJoin runs a joinservice's port on a machine, and returns a dialer that connects to it.
func serveJoin(t *testing.T, m *attesttest.Machine) func(ctx context.Context, network, addr string) (net.Conn, error) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	try(t, err)
	metrics, err := rpc.NewMetrics(prometheus.NewRegistry())
	try(t, err)
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, ATLS: atls.ServerConfig{Attester: m.Attester(attest.PurposeJoinservice), Appraiser: atls.NoAppraiser}, Health: rpc.NewHealth(), Metrics: metrics, Log: slog.New(slog.DiscardHandler), Grace: time.Second,
		Services: []rpc.Service{rpc.Serve(joinv1connect.JoinServiceName, joinv1connect.JoinServiceHandler(joinv1connect.UnimplementedJoinServiceHandler{}), joinv1connect.NewJoinServiceHandler)},
	})
	try(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); try(t, <-done) })
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == "192.168.77.11:30090" {
			addr = l.Addr().String()
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
}

func rbac(kind, name string) *unstructured.Unstructured {
	return typed(schema.GroupVersionKind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: kind}, name)
}

func typed(kind schema.GroupVersionKind, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	o.SetName(name)
	return o
}

// A healthy cluster passes; then one thing at a time is broken, the check for it reports that and its remedy, and the
// cluster passes again after the repair.
func TestEachHarmIsFound(t *testing.T) {
	p := newPatient(t)
	// The root of this test's TPMs is valid for a day, and its policy lists no machines: both are expected findings.
	known := map[checkup.Finding]bool{}
	for _, f := range p.examine(t).Findings {
		switch {
		case f.Level == checkup.Warn && f.Check == CheckPolicy:
			known[f] = true
		case f.Level != checkup.OK:
			t.Fatalf("a sound cluster: %+v", f)
		}
	}
	if len(known) != 2 {
		t.Fatalf("known beforehand: %v", known)
	}
	// An examination takes most of a second of a processor: that of the next harm shows that the one before is repaired, since no other check may report
	// something, and one at the end that all are.
	for _, tt := range slices.Concat(p.harms(), p.rolledBack(t), p.records(), p.inForce()) {
		t.Run(tt.check+": "+tt.says, func(t *testing.T) {
			p.attested(t)
			repair := tt.harm(t)
			found := false
			for _, f := range p.examine(t).Findings {
				if f.Level == checkup.OK || known[f] {
					continue
				}
				found = found || f.Check == tt.check && f.Level == tt.level && strings.Contains(f.Detail, tt.says)
				if f.Remedy == "" {
					t.Errorf("without a remedy: %+v", f)
				}
				if f.Check != tt.check && !strings.Contains(tt.also, f.Check) {
					t.Errorf("another check: %+v", f)
				}
			}
			if !found {
				t.Errorf("%s does not say %q: %+v", tt.check, tt.says, p.examine(t).Findings)
			}
			repair(t)
		})
	}
	for _, f := range p.examine(t).Findings {
		if f.Level != checkup.OK && !known[f] {
			t.Errorf("a sound cluster: %+v", f)
		}
	}
	// The same cluster: there is only one.
	t.Run("kept", func(t *testing.T) { p.attested(t); testKept(t, p) })
	t.Run("drill", func(t *testing.T) { p.attested(t); testDrill(t, p) })
}

type harm struct {
	check string
	level checkup.Level
	says  string
	also  string // checks that fail as well
	harm  func(t *testing.T) (repair func(t *testing.T))
}

// file returns a harm to a file of the folder.
func (p *patient) file(name string, do func(path string, content []byte) error) func(*testing.T) func(*testing.T) {
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		path := filepath.Join(p.folder, name)
		content, err := os.ReadFile(path)
		try(t, err, do(path, content))
		return func(t *testing.T) {
			t.Helper()
			_ = os.Remove(path)
			try(t, os.WriteFile(path, content, 0o600))
		}
	}
}

// deleted returns a harm that deletes an object.
func deleted(o *unstructured.Unstructured) func(*testing.T) func(*testing.T) {
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		try(t, shared.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o))
		saved := o.DeepCopy()
		try(t, shared.Client.Delete(t.Context(), o))
		return func(t *testing.T) {
			t.Helper()
			saved.SetResourceVersion("")
			saved.SetUID("")
			try(t, shared.Client.Create(t.Context(), saved))
		}
	}
}

// created returns a harm that creates one.
func created(o client.Object) func(*testing.T) func(*testing.T) {
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		try(t, shared.Client.Create(t.Context(), o))
		return func(t *testing.T) { t.Helper(); try(t, shared.Client.Delete(t.Context(), o)) }
	}
}

// edited returns a harm that edits one; the repair takes back what it did.
func edited(o *unstructured.Unstructured, value any, path ...string) func(*testing.T) func(*testing.T) {
	set := func(t *testing.T, v any) any {
		t.Helper()
		var old any
		change(t, o, false, func(u *unstructured.Unstructured) {
			old, _, _ = unstructured.NestedFieldCopy(u.Object, path...)
			if v == nil {
				unstructured.RemoveNestedField(u.Object, path...)
				return
			}
			try(t, unstructured.SetNestedField(u.Object, v, path...))
		})
		return old
	}
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		old := set(t, value)
		return func(t *testing.T) { t.Helper(); set(t, old) }
	}
}

// leased is created in a namespace that this control plane has no controller to create.
func leased(o client.Object) func(*testing.T) func(*testing.T) {
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		try(t, shared.Namespace(t.Context(), o.GetNamespace()))
		return created(o)(t)
	}
}

func namespaced(kind schema.GroupVersionKind, name string) *unstructured.Unstructured {
	o := typed(kind, name)
	o.SetNamespace(clusterapi.Namespace)
	return o
}

func (p *patient) harms() []harm {
	admission := func(kind, name string) *unstructured.Unstructured {
		return typed(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: kind}, name)
	}
	core := corev1.SchemeGroupVersion
	token := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "bootstrap-token-abcdef"}, Type: corev1.SecretTypeBootstrapToken, Data: map[string][]byte{"token-id": []byte("abcdef")}}
	bind := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: forbidden[0]}, RoleRef: rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: "system:node-bootstrapper"}}
	ahead := typed(coordinationv1.SchemeGroupVersion.WithKind("Lease"), "node1")
	ahead.SetNamespace("kube-node-lease")
	ahead.Object["spec"] = map[string]any{"holderIdentity": "node1", "leaseDurationSeconds": int64(40), "renewTime": time.Now().Add(3 * time.Hour).UTC().Format("2006-01-02T15:04:05.000000Z")}
	at := func(d time.Duration) func(*testing.T) func(*testing.T) {
		return func(*testing.T) func(*testing.T) {
			p.now = func() time.Time { return time.Now().Add(d) }
			return func(*testing.T) { p.now = time.Now }
		}
	}
	set := func(value any, path ...string) func(*testing.T) func(*testing.T) {
		return edited(namespaced(appsv1.SchemeGroupVersion.WithKind("DaemonSet"), "muster-kms"), value, path...)
	}
	return []harm{
		{CheckFolder, checkup.Fail, "mode 0644", "", p.file("owner.key", func(path string, _ []byte) error { return os.Chmod(path, 0o644) })},
		{CheckFolder, checkup.Fail, "root-secret", "", p.file("root-secret", func(path string, _ []byte) error { return os.Remove(path) })},
		{CheckFolder, checkup.Warn, "requested", "", p.file("cluster.json", func(path string, b []byte) error {
			return os.WriteFile(path, []byte(strings.Replace(string(b), `"installed"`, `"requested"`, 1)), 0o600)
		})},
		{CheckPolicy, checkup.Fail, "POLICY_INVALID", "", p.file(ownerdir.PolicyFile, func(path string, _ []byte) error { return os.WriteFile(path, []byte("version: 9\n"), 0o600) })},
		{CheckPolicy, checkup.Warn, "differs from the cluster's", "", p.file(ownerdir.PolicyFile, func(path string, b []byte) error {
			return os.WriteFile(path, []byte(strings.Replace(string(b), `"serial":"1"`, `"serial":"2"`, 1)), 0o600)
		})},
		{CheckKubeconfig, checkup.Fail, "has no admin.conf yet", "", p.file(ownerdir.AdminConf, func(path string, _ []byte) error { return os.Remove(path) })},
		{CheckKubeconfig, checkup.Fail, "ended on", CheckClock + CheckPolicy, at(200 * 365 * 24 * time.Hour)},
		{CheckClock, checkup.Fail, "API server's clock differs from this computer's by 2h59m", CheckPolicy, at(-3 * time.Hour)},
		{CheckNodeClocks, checkup.Fail, "node1", "", leased(ahead)},
		{CheckKinds, checkup.Warn, "another version", "", edited(typed(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"}, "attestednodes.muster.dev"), "xn", "spec", "names", "singular")},
		{CheckAdmission, checkup.Fail, "ValidatingAdmissionPolicyBinding muster-node-certificates was deleted", "", deleted(admission("ValidatingAdmissionPolicyBinding", "muster-node-certificates"))},
		{CheckAdmission, checkup.Fail, "muster-node-access differs from the chart", "", edited(admission("ValidatingAdmissionPolicyBinding", "muster-node-access"), []any{"Audit"}, "spec", "validationActions")},
		{CheckObjects, checkup.Fail, "ClusterRole muster:kms differs from the chart", "", edited(rbac("ClusterRole", "muster:kms"), []any{map[string]any{"apiGroups": []any{"*"}, "resources": []any{"*"}, "verbs": []any{"*"}}}, "rules")},
		{CheckObjects, checkup.Fail, "ConfigMap muster-waiting was deleted", "", deleted(namespaced(core.WithKind("ConfigMap"), "muster-waiting"))},
		{CheckImages, checkup.Fail, "kms:latest", CheckObjects, p.rolled(set([]any{map[string]any{"name": "kms", "image": "registry.example/kms:latest"}}, "spec", "template", "spec", "containers"))},
		{CheckServices, checkup.Fail, "0/1 ready", "", func(t *testing.T) func(*testing.T) {
			change(t, namespaced(appsv1.SchemeGroupVersion.WithKind("DaemonSet"), "muster-kms"), true, func(u *unstructured.Unstructured) {
				try(t, unstructured.SetNestedField(u.Object, int64(0), "status", "numberReady"))
			})
			return p.healthy
		}},
		{CheckOwnerKey, checkup.Fail, "another owner's key", CheckPolicy, p.file("owner.key", func(path string, _ []byte) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			_, err := ownerdir.NewKeyFile(path)
			return err
		})},
		{CheckOwnerKey, checkup.Warn, "its rotation is unfinished", "", func(t *testing.T) func(*testing.T) {
			path := filepath.Join(p.folder, "owner-next.key")
			_, err := ownerdir.NewKeyFile(path)
			try(t, err)
			return func(t *testing.T) { try(t, os.Remove(path)) }
		}},
		{CheckPolicy, checkup.Fail, "POLICY_SIGNATURE", "", func(t *testing.T) func(*testing.T) {
			change(t, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, true, func(a *v1alpha1.AttestationPolicy) {
				a.Status.Accepted, a.Status.Reason = false, "POLICY_SIGNATURE"
			})
			return p.healthy
		}},
		{CheckRoot, checkup.Fail, "gone", "", deleted(namespaced(core.WithKind("Secret"), "muster-kms-root"))},
		{CheckRoot, checkup.Fail, "not the one", "", edited(namespaced(core.WithKind("Secret"), "muster-kms-root"), base64.StdEncoding.EncodeToString(make([]byte, 32)), "data", "root")},
		{CheckDescription, checkup.Fail, "gone", "", deleted(namespaced(core.WithKind("ConfigMap"), clusterinfo.ConfigMap))},
		{CheckDescription, checkup.Fail, "not the one", CheckJoinservice, p.file("cluster.json", func(path string, b []byte) error {
			return os.WriteFile(path, []byte(strings.Replace(string(b), p.dir.Cluster().ClusterID, hex.EncodeToString(make([]byte, 32)), 1)), 0o600)
		})},
		{CheckRotation, checkup.Warn, "service-account-key is in the phase accept", "", p.rotates(clusterinfo.Rotation{Key: clusterinfo.ServiceAccountKey, Phase: clusterinfo.RotationAccept})},
		{CheckRotation, checkup.Warn, "still accept the old one", "", p.rotates(clusterinfo.Rotation{Key: clusterinfo.EncryptionKey, Phase: clusterinfo.RotationSettled, ID: strings.Repeat("ab", 32)})},
		{CheckAccess, checkup.Fail, "node9 is listed as a node that may write", "", edited(namespaced(core.WithKind("ConfigMap"), "muster-node-access"), "\nnode1\nnode9\n", "data", "control-planes")},
		{CheckAccess, checkup.Fail, "refuses its writes", "", edited(namespaced(core.WithKind("ConfigMap"), "muster-node-access"), "\nnode1\n", "data", "suspended")},
		{CheckAccess, checkup.Warn, `has the addresses ["192.168.77.66"]`, "", reports("192.168.77.66", "192.168.77.11")},
		{CheckAccess, checkup.Fail, "want a name and a time", "", edited(namespaced(core.WithKind("ConfigMap"), "muster-node-access"), "\nnode1\n", "data", "revoked-certificates")},
		{CheckTPMs, checkup.Fail, "w8, w9 have the same TPM", CheckNodes, func(t *testing.T) func(*testing.T) {
			var repairs []func(*testing.T)
			for _, n := range []*v1alpha1.AttestedNode{attestedAs("w8", "8", "01"), attestedAs("w9", "9", "01")} {
				repairs = append(repairs, created(n.DeepCopy())(t))
				change(t, n, true, func(have *v1alpha1.AttestedNode) { have.Status.AKName = "01" })
			}
			return func(t *testing.T) {
				for _, repair := range repairs {
					repair(t)
				}
			}
		}},
		{CheckBindings, checkup.Fail, forbidden[0], "", created(bind)},
		{CheckTokens, checkup.Fail, "bootstrap-token-abcdef", "", created(token)},
		{CheckPodTokens, checkup.Warn, "kube-apiserver-node2", "", created(apiServer("node2"))},
		{CheckJoinservice, checkup.Fail, "192.168.77.11:30090", "", func(*testing.T) func(*testing.T) {
			dial := p.dial
			p.dial = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no route to host") }
			return func(*testing.T) { p.dial = dial }
		}},
		{CheckAudit, checkup.Warn, "muster-joinservice-x", "", created(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: "muster-joinservice-x", Labels: map[string]string{"app.kubernetes.io/name": "muster-joinservice"}},
			Spec:       corev1.PodSpec{NodeName: "node1", ServiceAccountName: "joinservice", Containers: []corev1.Container{{Name: "x", Image: "x"}}, TerminationGracePeriodSeconds: new(int64(0))},
		})},
		{CheckNodes, checkup.Warn, "not Ready", "", func(t *testing.T) func(*testing.T) {
			change(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, true, func(n *corev1.Node) { n.Status.Conditions = nil })
			return p.healthy
		}},
	}
}

// rotates returns a harm that begins a rotation.
func (p *patient) rotates(r clusterinfo.Rotation) func(*testing.T) func(*testing.T) {
	describe := func(t *testing.T, to *clusterinfo.Rotation) {
		t.Helper()
		try(t, p.kube.Describe(t.Context(), func(i *clusterinfo.Info) error { i.Rotation = to; return nil }))
	}
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		r.Since = time.Now().Add(-time.Minute).UTC().Truncate(time.Second)
		describe(t, &r)
		return func(t *testing.T) { t.Helper(); describe(t, nil) }
	}
}

// rolled waits until the DaemonSet's pods follow a harm and its repair.
func (p *patient) rolled(h func(*testing.T) func(*testing.T)) func(*testing.T) func(*testing.T) {
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		repair := h(t)
		p.healthy(t)
		return func(t *testing.T) { t.Helper(); repair(t); p.healthy(t) }
	}
}
