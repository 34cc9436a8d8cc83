package main

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// stringsOf calls set for each string below v, also behind pointers and in structs, with its path. It skips metadata.
func stringsOf(v reflect.Value, path string, set func(path string, f reflect.Value)) {
	switch v.Kind() {
	case reflect.String:
		set(path, v)
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		stringsOf(v.Elem(), path, set)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[metav1.Time]() || v.Type() == reflect.TypeFor[metav1.MicroTime]() {
			return
		}
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.Name != "TypeMeta" && f.Name != "ObjectMeta" {
				stringsOf(v.Field(i), path+"."+f.Name, set)
			}
		}
	default:
	}
}

// No field of an event can be large in etcd, whatever its name.
func TestANodesEventsAreSmall(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, s.machine(t), w)))
	about := corev1.ObjectReference{Kind: "Node", Name: "w1"}
	large := strings.Repeat("x", 5000)
	events := map[string]func() client.Object{
		"core": func() client.Object {
			return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "x"}, Reason: "Starting", Type: "Normal", InvolvedObject: about}
		},
		"events.k8s.io": func() client.Object {
			return &eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "x"}, Reason: "Starting", Type: "Normal", Regarding: about, EventTime: metav1.NowMicro(),
				Action: "Starting", ReportingController: "example.com/kubelet", ReportingInstance: "w1",
			}
		},
	}
	create := func(o client.Object) error { _, err := createAny(t, took.kubelet, o); return err }
	refused := func(o client.Object, what string) {
		if is, err := createAny(t, took.kubelet, o); err == nil && is > 4500 { // the API server drops some fields
			t.Errorf("%s: an event of %d bytes is taken", what, is)
		}
	}
	membertest.Eventually(t, func() error { // the API server reads policies by a watch
		o := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "x"}, InvolvedObject: about, Message: large}
		return says(create(o), "an event has at most 4 KiB")
	})
	for group, fresh := range events {
		membertest.Eventually(t, func() error { return create(fresh()) })
		var paths []string
		stringsOf(reflect.ValueOf(fresh()).Elem(), "", func(path string, _ reflect.Value) { paths = append(paths, path) })
		if len(paths) < 15 {
			t.Fatalf("%s: only %v", group, paths)
		}
		for _, path := range paths {
			o := fresh()
			stringsOf(reflect.ValueOf(o).Elem(), "", func(p string, f reflect.Value) {
				if p == path {
					f.SetString(large)
				}
			})
			refused(o, group+path)
		}
		for name, change := range map[string]func(client.Object){
			"name":          func(o client.Object) { o.SetName(large) },
			"generateName":  func(o client.Object) { o.SetGenerateName(large) },
			"selfLink":      func(o client.Object) { o.SetSelfLink(large) },
			"annotations":   func(o client.Object) { o.SetAnnotations(map[string]string{"a": large}) },
			"managedFields": func(o client.Object) { o.SetManagedFields(managed(t, 1, large)) },
			"managers":      func(o client.Object) { o.SetManagedFields(managed(t, 20, "x")) },
		} {
			o := fresh()
			change(o)
			refused(o, group+" "+name)
		}
	}
}

// createAny creates an object whose type its client may not know, as a dry run, and returns its size in bytes.
func createAny(t *testing.T, as client.Client, o client.Object) (int, error) {
	t.Helper()
	raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		t.Fatal(err)
	}
	u := &unstructured.Unstructured{Object: raw}
	switch o.(type) {
	case *corev1.Event:
		u.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Event"))
	case *eventsv1.Event:
		u.SetGroupVersionKind(eventsv1.SchemeGroupVersion.WithKind("Event"))
	case *resourcev1.ResourceSlice:
		u.SetGroupVersionKind(resourcev1.SchemeGroupVersion.WithKind("ResourceSlice"))
	}
	err = as.Create(t.Context(), u, client.DryRunAll)
	is, merr := u.MarshalJSON()
	if merr != nil {
		t.Fatal(merr)
	}
	return len(is), err
}

// managed returns n managers of a field with that name.
func managed(t *testing.T, n int, field string) (out []metav1.ManagedFieldsEntry) {
	t.Helper()
	raw, err := json.Marshal(map[string]any{"f:" + field: map[string]any{}})
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		out = append(out, metav1.ManagedFieldsEntry{
			Manager: fmt.Sprintf("m%d", i), Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(raw)),
			Time: &metav1.Time{Time: time.Now()},
		})
	}
	return out
}

// controlPlanes enrolls control planes that have joined, and waits until the list names them.
func (s *fixture) controlPlanes(t *testing.T, names ...string) {
	t.Helper()
	for i, name := range names {
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{0xc0, byte(i)}.String(), Role: v1alpha1.RoleControlPlane}}
		if err := s.Client.Create(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), n) })
		n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}
		if err := s.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	membertest.Eventually(t, func() error {
		for _, name := range names {
			if !s.Access(t).Entry(name).ControlPlane {
				return fmt.Errorf("%s is not listed as a control plane", name)
			}
		}
		return nil
	})
}

// A node that is not listed as a control plane gets no pod of Muster's services, shows no static pod under another node's
// name, and leaves nothing permanent in etcd.
func TestAWorkerIsNoControlPlane(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, s.machine(t), w)))
	s.controlPlanes(t, "c1", "c2")
	pod := func(node string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "kms-"}, Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "x", Image: "x"}}},
		}
	}
	membertest.Eventually(t, func() error { return s.Client.Create(t.Context(), pod("c1"), client.DryRunAll) })
	membertest.Eventually(t, func() error {
		return says(s.Client.Create(t.Context(), pod("w1"), client.DryRunAll), "gets no pods of "+namespace)
	})
	unbound := pod("")
	if err := s.Client.Create(t.Context(), unbound); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), unbound, client.GracePeriodSeconds(0)) })
	bind := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "w1"}}
	if err := says(s.Client.SubResource("binding").Create(t.Context(), unbound, bind), "gets no pods of "+namespace); err != nil {
		t.Error(err)
	}

	slice := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"},
		Spec:       resourcev1.ResourceSliceSpec{NodeName: new("w1"), Driver: "a.b", Pool: resourcev1.ResourcePool{Name: "p", Generation: 1, ResourceSliceCount: 1}},
	}
	_, err := createAny(t, took.kubelet, slice)
	if err := says(err, "publishes no ResourceSlices"); err != nil {
		t.Error(err)
	}

	// c2 is a control plane, but may not show pods of c1's.
	c2 := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c2"}}
	if err := s.Client.Create(t.Context(), c2); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), c2) })
	static := pod("c2")
	static.ObjectMeta = metav1.ObjectMeta{
		Namespace: metav1.NamespaceSystem, Name: "kube-apiserver-c2", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "c2", UID: c2.UID, Controller: new(true)}},
	}
	kubelet := s.as(t, "c2")
	membertest.Eventually(t, func() error { return kubelet.Create(t.Context(), static.DeepCopy(), client.DryRunAll) })
	static.Name = "kube-apiserver-c1"
	if err := says(kubelet.Create(t.Context(), static, client.DryRunAll), "ends in the node's name"); err != nil {
		t.Error(err)
	}
}

// An administrator of one namespace cannot make the API server send requests to an arbitrary address.
func TestATenantGivesNoPodAnAddress(t *testing.T) {
	s := setUp(t)
	const tenant = "tenant-of-pods"
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "p"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}}}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "all"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "tina"}},
	}
	for _, o := range []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}, binding, pod} {
		if err := client.IgnoreAlreadyExists(s.Client.Create(t.Context(), o)); err != nil {
			t.Fatal(err)
		}
	}
	cfg, err := s.AsUser("tina", "tenants")
	if err != nil {
		t.Fatal(err)
	}
	tina, err := client.New(cfg, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	status := func(s string) client.Patch {
		return client.RawPatch(types.MergePatchType, []byte(`{"status":`+s+`}`))
	}
	address := status(`{"podIP":"10.1.2.3","podIPs":[{"ip":"10.1.2.3"}]}`)
	membertest.Eventually(t, func() error {
		return says(tina.Status().Patch(t.Context(), pod.DeepCopy(), address, client.DryRunAll), "only who may update the status of all pods")
	})
	if err := tina.Status().Patch(t.Context(), pod.DeepCopy(), status(`{"message":"x"}`), client.DryRunAll); err != nil {
		t.Error(err)
	}
	if err := s.Client.Status().Patch(t.Context(), pod.DeepCopy(), address, client.DryRunAll); err != nil {
		t.Error(err)
	}
}

// A tenant's pods don't take the resources of Muster's, and preempt no other pods.
func TestATenantsPodsAreNotCritical(t *testing.T) {
	s := setUp(t)
	namespaces := map[string]map[string]string{
		"plain": nil, "baseline": {"pod-security.kubernetes.io/enforce": "baseline"}, "drivers": {"pod-security.kubernetes.io/enforce": "privileged"},
	}
	for name, labels := range namespaces {
		if err := client.IgnoreAlreadyExists(s.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}})); err != nil {
			t.Fatal(err)
		}
	}
	create := func(namespace, class string) error {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "p-"},
			Spec:       corev1.PodSpec{PriorityClassName: class, Containers: []corev1.Container{{Name: "x", Image: "x"}}},
		}
		return s.Client.Create(t.Context(), p, client.DryRunAll)
	}
	const refused = "are created in namespaces with the label pod-security.kubernetes.io/enforce=privileged only"
	for _, class := range []string{"system-node-critical", "system-cluster-critical"} {
		for _, namespace := range []string{"plain", "baseline"} {
			membertest.Eventually(t, func() error { return says(create(namespace, class), refused) })
		}
		for _, namespace := range []string{"drivers", metav1.NamespaceSystem, clusterinfo.Namespace} {
			if err := create(namespace, class); err != nil {
				t.Errorf("%s in %s: %v", class, namespace, err)
			}
		}
	}
	if err := create("plain", ""); err != nil {
		t.Error(err)
	}
}

// says returns nil if err contains the words.
func says(err error, words string) error {
	return membertest.Want(err != nil && strings.Contains(err.Error(), words), "%v, want %q", err, words)
}

// The token of a network driver, which is on every worker, may change nodes. It can make none of them a control plane,
// cannot have any deleted or kept during a ban, and cannot fill etcd with events.
func TestOnlyAdministratorsLabelControlPlanes(t *testing.T) {
	s := setUp(t)
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "driver"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes", "nodes/status", "events"}, Verbs: []string{"create", "patch", "update", "get"}}},
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "driver"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "driver"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "driver", Namespace: metav1.NamespaceSystem}},
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	control := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}}
	for _, o := range []client.Object{role, binding, node, control} {
		if err := s.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	cfg, err := s.AsUser("system:serviceaccount:kube-system:driver", "system:serviceaccounts")
	if err != nil {
		t.Fatal(err)
	}
	driver, err := client.New(cfg, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	event := func(kind, message string) *corev1.Event {
		return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "x"}, Message: message, InvolvedObject: corev1.ObjectReference{Kind: kind, Name: "x"}}
	}
	patch := func(value string) client.Patch {
		return client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"`+clusterinfo.ControlPlaneLabel+`":`+value+`}}}`))
	}
	const no, keeps = "only an administrator changes the label", "only who may delete all nodes gives one"
	metadata := func(s string) client.Patch {
		return client.RawPatch(types.MergePatchType, []byte(`{"metadata":`+s+`}`))
	}
	owner := metadata(`{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"none","uid":"00000000-0000-0000-0000-000000000001"}]}`)
	finalizer := metadata(`{"finalizers":["example.com/hold"]}`)
	for what, try := range map[string]struct {
		do   func() error
		says string
	}{
		"by the status": {func() error {
			return driver.Status().Patch(t.Context(), node.DeepCopy(), patch(`""`), client.DryRunAll)
		}, no},
		"of the Node": {func() error { return driver.Patch(t.Context(), node.DeepCopy(), patch(`""`), client.DryRunAll) }, no},
		"takes one's away": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), patch(`null`), client.DryRunAll)
		}, no},
		"gives another value": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), patch(`"x"`), client.DryRunAll)
		}, no},
		"creates one": {func() error {
			return driver.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c9", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}}, client.DryRunAll)
		}, no},
		"writes a status": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`)), client.DryRunAll)
		}, ""},
		"gives it an owner, so that it is collected": {func() error { return driver.Patch(t.Context(), control.DeepCopy(), owner, client.DryRunAll) }, keeps},
		"gives it a finalizer":                       {func() error { return driver.Patch(t.Context(), control.DeepCopy(), finalizer, client.DryRunAll) }, keeps},
		"gives it one by the status": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), finalizer, client.DryRunAll)
		}, keeps},
		"administrator gives it one": {func() error { return s.Client.Patch(t.Context(), control.DeepCopy(), finalizer, client.DryRunAll) }, ""},
		"writes a large event": {func() error {
			return driver.Create(t.Context(), event("Pod", strings.Repeat("x", 5000)), client.DryRunAll)
		}, "at most 4 KiB"},
		"writes an event of Muster's": {func() error { return driver.Create(t.Context(), event("attestednode", "x"), client.DryRunAll) }, "only joinservice and administrators"},
		"writes an event":             {func() error { return driver.Create(t.Context(), event("Pod", "x"), client.DryRunAll) }, ""},
		"administrator":               {func() error { return s.Client.Patch(t.Context(), node.DeepCopy(), patch(`""`), client.DryRunAll) }, ""},
		"administrator, by the status": {func() error {
			return s.Client.Status().Patch(t.Context(), node.DeepCopy(), patch(`""`), client.DryRunAll)
		}, no},
	} {
		membertest.Eventually(t, func() error { // the API server reads roles by a watch
			err := try.do()
			return membertest.Want(err == nil && try.says == "" || err != nil && try.says != "" && strings.Contains(err.Error(), try.says), "%s: %v, want %q", what, err, try.says)
		})
	}
}
