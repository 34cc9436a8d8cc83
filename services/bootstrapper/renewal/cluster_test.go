package renewal

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// These are all requests of a renewal, at a real API server.
func TestClusterOfARealAPIServer(t *testing.T) {
	ctx := t.Context()
	api, err := kubetest.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := api.Namespace(ctx, clusterinfo.Namespace); err != nil {
		t.Fatal(err)
	}
	root := newControlPlane(t)
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	server := regexp.MustCompile(`server: https://\S+`)
	for name, b := range map[string][]byte{
		"controller-manager.conf": text,
		"admin.conf":              server.ReplaceAll(text, []byte("server: https://127.0.0.1:1")), // an attacker has taken over the endpoint's address
	} {
		if err := os.WriteFile(filepath.Join(root, folder, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	on := func(node string) *cluster {
		t.Helper()
		c, err := connect(root, node, nil, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		c.retry = 200 * time.Millisecond
		return c
	}
	a, b := on("node1"), on("node2")

	t.Run("the lease is one control plane's at a time", func(t *testing.T) {
		var inside atomic.Int32
		var wg sync.WaitGroup
		for _, c := range []Cluster{a, b} {
			wg.Go(func() {
				err := c.Exclusively(ctx, func(ctx context.Context) error {
					if inside.Add(1) != 1 {
						return errors.New("two have it")
					}
					defer inside.Add(-1)
					_, err := c.Unhealthy(ctx) // a call that takes some time
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
	t.Run("it is given back although a renewal is in flight", func(t *testing.T) {
		c := on("node3")
		inFlight, ended := make(chan struct{}), make(chan struct{})
		var writes, canceled atomic.Int32
		config, err := kubeconfig(root, "controller-manager.conf")
		if err != nil {
			t.Fatal(err)
		}
		config.WrapTransport = func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPut && writes.Add(1) == 2 { // the first one acquires the lease
					close(inFlight)
					<-ended
					select {
					case <-r.Context().Done():
						canceled.Add(1)
					case <-time.After(200 * time.Millisecond):
					}
				}
				return next.RoundTrip(r)
			})
		}
		k, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		c.Interface = k
		if err := c.Exclusively(ctx, func(ctx context.Context) error {
			defer close(ended)
			select {
			case <-inFlight:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}); err != nil {
			t.Fatal(err)
		}
		if canceled.Load() != 0 || writes.Load() != 3 {
			t.Errorf("%d of %d writes were canceled", canceled.Load(), writes.Load())
		}
	})
	t.Run("a machine that joins keeps it", func(t *testing.T) {
		var l coordinationv1.Lease
		key := client.ObjectKey{Namespace: clusterinfo.Namespace, Name: clusterinfo.ControlPlaneLease}
		get := func() {
			t.Helper()
			if err := api.Client.Get(ctx, key, &l); err != nil {
				t.Fatal(err)
			}
		}
		get()
		if h := l.Spec.HolderIdentity; h != nil && *h != "" {
			t.Fatalf("given back, and held by %q", *h)
		}
		l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds, l.Spec.RenewTime = new("aaaa/node3"), new(int32(40)), new(metav1.NowMicro())
		if err := api.Client.Update(ctx, &l); err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		if err := a.Exclusively(short, func(context.Context) error { t.Error("renewed while a machine joins"); return nil }); err == nil {
			t.Error("no error")
		}
		get()
		if *l.Spec.HolderIdentity != "aaaa/node3" {
			t.Errorf("held by %q", *l.Spec.HolderIdentity)
		}
		l.Spec.HolderIdentity = nil
		if err := api.Client.Update(ctx, &l); err != nil {
			t.Fatal(err)
		}
		done := false
		if err := a.Exclusively(ctx, func(context.Context) error { done = true; return nil }); err != nil || !done {
			t.Errorf("%v, done: %v", err, done)
		}
	})
	must := func(t *testing.T, errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("a part runs once its pod is Ready with the annotation", func(t *testing.T) {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "etcd-node1", Labels: map[string]string{"tier": "control-plane"}, Annotations: map[string]string{Annotation: "new"}},
			Spec:       corev1.PodSpec{NodeName: "node1", Containers: []corev1.Container{{Name: "etcd", Image: "etcd"}}},
		}
		want := func(annotation string, runs bool, unhealthy ...string) {
			t.Helper()
			got, err := a.Runs(ctx, "etcd", annotation)
			if err != nil || got != runs {
				t.Errorf("with %q: runs %v, %v", annotation, got, err)
			}
			bad, err := a.Unhealthy(ctx)
			if err != nil || !slices.Equal(bad, unhealthy) {
				t.Errorf("unhealthy %q, %v", bad, err)
			}
		}
		want("new", false)
		workers := pod.DeepCopy() // a worker's kubelet writes it
		workers.Name, workers.Spec.NodeName = "etcd-worker", "worker"
		must(t, api.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}}))
		must(t, api.Client.Create(ctx, workers))
		want("new", false, "etcd-worker") // in an adopted cluster
		must(t, api.InstallCRDs(ctx), api.Client.Create(ctx, &v1alpha1.AttestedNode{
			ObjectMeta: metav1.ObjectMeta{Name: "worker"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{7}.String(), Role: v1alpha1.RoleWorker},
		}))
		must(t, api.Client.Create(ctx, pod))
		want("new", false, "etcd-node1")
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if err := api.Client.Status().Update(ctx, pod); err != nil {
			t.Fatal(err)
		}
		want("old", false)
		want("new", true)
		place := pod.DeepCopy() // a worker takes its name
		must(t, api.Client.Delete(ctx, pod, client.GracePeriodSeconds(0)))
		place.ResourceVersion, place.UID, place.Spec.NodeName = "", "", "node8"
		must(t, api.Client.Create(ctx, place))
		place.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		must(t, api.Client.Status().Update(ctx, place))
		want("new", false)
	})
	t.Run("a control plane whose enrollment is banned or deleted is shut out", func(t *testing.T) {
		shutOut := func(want bool) {
			t.Helper()
			if got, err := a.ShutOut(ctx); err != nil || got != want {
				t.Errorf("shut out %v, %v, want %v", got, err, want)
			}
		}
		shutOut(false) // the node was adopted
		n := &v1alpha1.AttestedNode{
			ObjectMeta: metav1.ObjectMeta{Name: "node1", Finalizers: []string{v1alpha1.RevokeCertificates}},
			Spec:       v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{1}.String(), Role: v1alpha1.RoleControlPlane},
		}
		if err := api.Client.Create(ctx, n); err != nil {
			t.Fatal(err)
		}
		shutOut(false)
		banned := func(by Cluster, want map[string]string) {
			t.Helper()
			if got, err := by.Banned(ctx); err != nil || !maps.Equal(got, want) {
				t.Errorf("banned: %v, %v, want %v", got, err, want)
			}
		}
		banned(b, nil)
		n.Spec.Banned = true
		if err := api.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		shutOut(true)
		banned(a, nil) // itself
		first := fmt.Sprintf("%s/%d", n.UID, n.Generation)
		banned(b, map[string]string{first: "node1"})
		n.Annotations = map[string]string{v1alpha1.KeepNode: "true"}
		if err := api.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		banned(b, nil)
		n.Spec.Banned = false
		if err := api.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		shutOut(false)
		n.Annotations, n.Spec.Banned = nil, true
		if err := api.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		again, err := b.Banned(ctx)
		if err != nil || len(again) != 1 || again[first] != "" {
			t.Errorf("banned again: %v, %v, want another ID than %s", again, err, first)
		}
		n.Status.AKName = "000b"
		if err := api.Client.Status().Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		banned(b, again) // the same ban
		if err := api.Client.Delete(ctx, n); err != nil {
			t.Fatal(err)
		}
		shutOut(true)
	})
	t.Run("a node is evicted once it has neither a Node nor pods", func(t *testing.T) {
		evicted := func(node string, want bool) {
			t.Helper()
			if got, err := b.Evicted(ctx, node); err != nil || got != want {
				t.Errorf("%s evicted: %v, %v, want %v", node, got, err, want)
			}
		}
		evicted("node8", false) // a pod
		evicted("node7", true)
		if err := api.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node7"}}); err != nil {
			t.Fatal(err)
		}
		evicted("node7", false)
	})
	t.Run("certificates are published on the Node", func(t *testing.T) {
		list := Read(root)
		for range 2 {
			if err := a.Publish(ctx, list); err != nil {
				t.Fatal(err)
			}
		}
		var n corev1.Node
		if err := api.Client.Get(ctx, client.ObjectKey{Name: "node1"}, &n); err != nil {
			t.Fatal(err)
		}
		var got []Certificate
		if err := json.Unmarshal([]byte(n.Annotations[clusterinfo.CertificatesAnnotation]), &got); err != nil || len(got) != len(files) || !got[0].NotAfter.Equal(list[0].NotAfter) {
			t.Errorf("%+v, %v", got, err)
		}
	})
	t.Run("an administrator's certificate is renewed, and a node gets none", func(t *testing.T) {
		if err := api.Client.Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: admins}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: admins}},
		}); err != nil {
			t.Fatal(err)
		}
		for user, group := range map[string]string{"kubernetes-admin": admins, "system:node:node2": "system:nodes"} {
			config := rest.CopyConfig(api.Admin)
			config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{group, "system:authenticated"}}
			k, err := kubernetes.NewForConfig(config)
			if err != nil {
				t.Fatal(err)
			}
			_, r := request(t, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins}}})
			r.Name = map[string]string{admins: "of-an-administrator", "system:nodes": "of-a-node"}[group]
			r.Spec.Username, r.Spec.Groups = "system:admin", []string{"system:masters", admins} // the API server writes these
			var made *certificatesv1.CertificateSigningRequest
			if err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 5*time.Minute, true, func(ctx context.Context) (bool, error) {
				made, err = k.CertificatesV1().CertificateSigningRequests().Create(ctx, r, metav1.CreateOptions{})
				if apierrors.IsForbidden(err) {
					return false, nil // the API server's authorizer has not seen the binding yet
				}
				return err == nil, err
			}); err != nil {
				t.Fatal(err)
			}
			r = made
			if user != "kubernetes-admin" { // an administrator has approved it without a check
				r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved, "ByHand", "")}
				if err := api.Client.SubResource("approval").Update(ctx, r); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.SignAdministrators(ctx, Config{Root: root, Kubeadm: image, Now: time.Now, Log: slog.New(slog.DiscardHandler)}); err != nil {
				t.Fatal(err)
			}
			var got certificatesv1.CertificateSigningRequest
			if err := api.Client.Get(ctx, client.ObjectKey{Name: r.Name}, &got); err != nil {
				t.Fatal(err)
			}
			if issued := len(got.Status.Certificate) > 0; issued != (group == admins) {
				t.Errorf("%s: issued %v, %v", user, issued, got.Status.Conditions)
			}
		}
	})
	t.Run("what a restored copy would undo is counted", func(t *testing.T) {
		var left v1alpha1.AttestedNode
		must(t, api.Client.Get(ctx, client.ObjectKey{Name: "node1"}, &left))
		left.Finalizers = nil
		must(t, api.Client.Update(ctx, &left), api.Client.DeleteAllOf(ctx, &v1alpha1.AttestedNode{}), api.Client.DeleteAllOf(ctx, &corev1.Node{}))
		whatARestoredCopyWouldUndoIsCounted(t, api)
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
