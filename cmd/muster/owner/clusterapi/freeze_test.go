package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/kubetest"
)

// settles is how long policies and the garbage collector may take to be in force on a machine that compiles at the
// same time.
const settles = 10 * time.Minute

// While the list of nodes that may not write is missing, the chart's policies refuse writes of nodes, and only of
// nodes: neither an install without the list nor its loss may block a cluster.
func TestWithoutTheListNodesAloneAreKeptOut(t *testing.T) {
	api := start(t)
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(text)
	if err != nil {
		t.Fatal(err)
	}
	before := written(t, api)
	for i, o := range needs() { // one more each time
		name := o.GetName()
		_, err := c.InstallChart(t.Context(), values, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), Namespace+"/"+name+" is not there") || !strings.Contains(err.Error(), "muster init") {
			t.Errorf("without %s: %v", name, err)
		}
		if now := written(t, api); now != before+i {
			t.Errorf("without %s the chart made %d objects", name, now-before-i)
		}
		if err := api.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	w := writers(t, api)
	appliedThoughConnectionsBreak(t, api)
	w.want(t, map[string]string{"an enrolled node": "", "a node that was removed": "may not write", "an administrator": "", "a controller": ""})

	list := needs()[0]
	slips := map[string]func(...client.DeleteOption) error{
		"the list": func(o ...client.DeleteOption) error { return api.Client.Delete(t.Context(), list, o...) },
		"its namespace": func(o ...client.DeleteOption) error {
			return api.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, o...)
		},
	}
	for name, slip := range slips {
		eventually(t, func() error {
			return refused(slip(client.DryRunAll), "muster uninstall", "delete "+name)
		})
	}
	// An administrator can still delete it. The garbage collector then removes the nodes' permission.
	keep := &unstructured.Unstructured{}
	keep.SetAPIVersion("admissionregistration.k8s.io/v1")
	keep.SetKind("ValidatingAdmissionPolicyBinding")
	keep.SetName("muster-keep-node-access")
	if err := api.Client.Delete(t.Context(), keep); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return slips["the list"]() })
	const closed = "without the ConfigMap muster-node-access"
	w.want(t, map[string]string{"an enrolled node": closed, "a node that was removed": closed, "an administrator": "", "a controller": ""})
	before = written(t, api)
	if _, err := c.InstallChart(t.Context(), values, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "muster-node-access is not there") {
		t.Errorf("an upgrade without the list: %v", err)
	}
	if now := written(t, api); now != before {
		t.Errorf("%d objects before an upgrade without the list, %d after it", before, now)
	}

	// It can be created again, and the chart then allows writes of nodes again.
	if err := api.Client.Create(t.Context(), needs()[0]); err != nil {
		t.Fatal(err)
	}
	w.want(t, map[string]string{"an enrolled node": closed, "an administrator": ""})
	if _, err := c.InstallChart(t.Context(), values, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	w.want(t, map[string]string{"an enrolled node": "", "a node that was removed": "may not write", "an administrator": "", "a controller": ""})
}

// written counts the objects of all kinds that the chart creates, and those that it needs.
func written(t *testing.T, api *kubetest.Cluster) int {
	t.Helper()
	n := 0
	for apiVersion, kinds := range map[string][]string{
		"v1":                              {"Secret", "ConfigMap", "Service", "ServiceAccount"},
		"apps/v1":                         {"DaemonSet"},
		"networking.k8s.io/v1":            {"NetworkPolicy"},
		"rbac.authorization.k8s.io/v1":    {"Role", "RoleBinding"},
		"admissionregistration.k8s.io/v1": {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"},
	} {
		for _, kind := range kinds {
			l := &unstructured.UnstructuredList{}
			l.SetAPIVersion(apiVersion)
			l.SetKind(kind + "List")
			var in []client.ListOption
			if !strings.HasPrefix(kind, "Validating") {
				in = append(in, client.InNamespace(Namespace))
			}
			if err := api.Client.List(t.Context(), l, in...); err != nil {
				t.Fatal(err)
			}
			n += len(l.Items)
		}
	}
	return n
}

// who writes, each by a request that RBAC allows them.
type who map[string]func(context.Context) error

func writers(t *testing.T, api *kubetest.Cluster) who {
	t.Helper()
	create := func(cfg *rest.Config, err error, o client.Object) func(context.Context) error {
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.New(cfg, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return func(ctx context.Context) error {
			return c.Create(ctx, o.DeepCopyObject().(client.Object), client.DryRunAll)
		}
	}
	node := func(name string) func(context.Context) error {
		cfg, err := api.AsUser("system:node:"+name, "system:nodes")
		return create(cfg, err, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	something := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "x-"}}
	for _, o := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "controller"}},
		&rbacv1.Role{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "controller"},
			Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create"}}},
		},
		&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "controller"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "controller"},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "controller"}},
		},
	} {
		if err := api.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	account, err := api.As(t.Context(), "default", "controller")
	return who{
		"an enrolled node":        node("node1"),
		"a node that was removed": node("node9"),
		"an administrator":        create(api.Admin, nil, something),
		"a controller":            create(account, err, something),
	}
}

// want waits until each may write, or is refused for that reason, all at the same time.
func (w who) want(t *testing.T, reasons map[string]string) {
	t.Helper()
	eventually(t, func() error {
		var errs []error
		for name, reason := range reasons {
			err := w[name](t.Context())
			switch {
			case reason != "":
				errs = append(errs, refused(err, reason, name))
			case err != nil:
				errs = append(errs, fmt.Errorf("%s may not write: %w", name, err))
			}
		}
		return errors.Join(errs...)
	})
}

func refused(err error, reason, what string) error {
	switch {
	case err == nil:
		return fmt.Errorf("%s is not refused", what)
	case !strings.Contains(err.Error(), reason):
		return fmt.Errorf("%s, want %q: %w", what, reason, err)
	}
	return nil
}

func eventually(t *testing.T, f func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), settles)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after %s: %v", settles, err)
		}
	}
}
