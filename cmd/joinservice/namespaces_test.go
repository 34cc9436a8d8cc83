package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/podsecurity"
)

// Whoever may do everything in one namespace may not allow himself pods that are root on their node.
func TestWhoOwnsANamespaceDoesNotChooseThePodSecurityOfIt(t *testing.T) {
	s := setUp(t)
	const name = "tenant"
	if err := s.Namespace(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	patch := func(labels string) client.Patch {
		return client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":`+labels+`}}`))
	}
	if err := s.Client.Patch(t.Context(), ns, patch(`{"`+podsecurity.Label+`":"baseline"}`)); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "owner"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "tenant"}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "namespaces"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get", "update", "patch"}}},
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "namespaces"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "namespaces"}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "namespaces"},
	}); err != nil {
		t.Fatal(err)
	}
	user := func(name string) client.Client {
		cfg, err := s.AsUser(name)
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.New(cfg, client.Options{Scheme: s.Client.Scheme()})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	tenant := user("tenant")
	const privileged, without = `{"` + podsecurity.Label + `":"privileged"}`, `{"` + podsecurity.Label + `":null}`
	for what, try := range map[string]struct {
		do   func() error
		says string // empty: it is accepted
	}{
		"raises it":                 {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(privileged)) }, "only who may update all namespaces"},
		"raises it with the status": {func() error { return tenant.Status().Patch(t.Context(), ns.DeepCopy(), patch(privileged)) }, "only who may update all namespaces"},
		"takes the label away":      {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(without)) }, "only who may update all namespaces"},
		"takes all labels away":     {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`null`)) }, "only who may update all namespaces"},
		"chooses an older version": {func() error {
			return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`{"`+podsecurity.Label+`-version":"v1.0"}`))
		}, "only who may update all namespaces"},
		"adds another label":             {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`{"team":"a"}`)) }, ""},
		"updates all namespaces":         {func() error { return user("namespaces").Patch(t.Context(), ns.DeepCopy(), patch(privileged)) }, ""},
		"an administrator takes it away": {func() error { return s.Client.Patch(t.Context(), ns.DeepCopy(), patch(without), client.DryRunAll) }, ""},
	} {
		err := try.do()
		if err != nil && (try.says == "" || !strings.Contains(err.Error(), try.says)) || err == nil && try.says != "" {
			t.Errorf("%s: %v, want %q", what, err, try.says)
		}
	}
}
