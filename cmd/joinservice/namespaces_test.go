package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/podsecurity"
)

// An administrator of one namespace cannot permit himself pods that are root on their node.
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
	// Without its finalizers a Namespace is deleted, and its contents stay.
	if err := s.Namespace(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{name, "gone"} {
		if err := s.Client.Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "owner"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "tenant"}},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		}); err != nil {
			t.Fatal(err)
		}
	}
	var gone corev1.Namespace
	if err := s.Client.Get(t.Context(), client.ObjectKey{Name: "gone"}, &gone); err != nil {
		t.Fatal(err)
	}
	gone.Spec.Finalizers = nil
	if err := s.Client.SubResource("finalize").Update(t.Context(), &gone); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error { // the first starts its deletion, the second removes it
		err := s.Client.Delete(t.Context(), &gone)
		return membertest.Want(apierrors.IsNotFound(err), "%v", err)
	})
	if err := s.Client.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "namespaces"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get", "patch"}}},
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
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "s"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}}}
	if err := tenant.Create(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	ingress := client.RawPatch(types.MergePatchType, []byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"192.168.77.11"}]}}}`))
	finalize := func() error {
		var now corev1.Namespace
		if err := tenant.Get(t.Context(), client.ObjectKey{Name: name}, &now); err != nil {
			return err
		}
		now.Spec.Finalizers = nil
		return tenant.SubResource("finalize").Update(t.Context(), &now)
	}
	again := func() error { // a server-side apply that creates it
		return tenant.Patch(t.Context(), &corev1.Namespace{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: "gone", Labels: map[string]string{podsecurity.Label: "privileged"}},
		}, client.Apply, client.FieldOwner("tenant"), client.ForceOwnership) //nolint:staticcheck // the typed way needs an apply configuration
	}
	const privileged, without = `{"` + podsecurity.Label + `":"privileged"}`, `{"` + podsecurity.Label + `":null}`
	for what, try := range map[string]struct {
		do   func() error
		says string // text of the refusal; empty: it is accepted
	}{
		"raises it":                 {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(privileged)) }, "only who may update or patch all namespaces"},
		"raises it with the status": {func() error { return tenant.Status().Patch(t.Context(), ns.DeepCopy(), patch(privileged)) }, "only who may update or patch all namespaces"},
		"takes the label away":      {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(without)) }, "only who may update or patch all namespaces"},
		"takes all labels away":     {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`null`)) }, "only who may update or patch all namespaces"},
		"chooses an older version": {func() error {
			return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`{"`+podsecurity.Label+`-version":"v1.0"}`))
		}, "only who may update or patch all namespaces"},
		"allows itself devices": {func() error {
			return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`{"resource.kubernetes.io/admin-access":"true"}`))
		}, "only who may update or patch all namespaces"},
		"frees it of finalizers":     {finalize, "only who may finalize all namespaces"},
		"makes it again":             {again, "only who may create all namespaces"},
		"takes an address of a node": {func() error { return tenant.Status().Patch(t.Context(), service.DeepCopy(), ingress) }, "only who may update the status of all Services"},
		"a load balancer gives one": {func() error {
			return s.Client.Status().Patch(t.Context(), service.DeepCopy(), ingress, client.DryRunAll)
		}, ""},
		"adds another label": {func() error { return tenant.Patch(t.Context(), ns.DeepCopy(), patch(`{"team":"a"}`)) }, ""},
		"patches all namespaces": {func() error {
			return user("namespaces").Patch(t.Context(), ns.DeepCopy(), patch(privileged), client.DryRunAll)
		}, ""},
		"an administrator takes it away": {func() error { return s.Client.Patch(t.Context(), ns.DeepCopy(), patch(without), client.DryRunAll) }, ""},
	} {
		membertest.Eventually(t, func() error { // the API server reads policies by a watch
			err := try.do()
			return membertest.Want(err == nil && try.says == "" || err != nil && try.says != "" && strings.Contains(err.Error(), try.says), "%s: %v, want %q", what, err, try.says)
		})
	}
}
