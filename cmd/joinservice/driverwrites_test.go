package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// write is one write as a dry run, and the expected text of its refusal; empty if it is accepted.
type write struct {
	do   func() error
	says string
}

func (s *fixture) try(t *testing.T, writes map[string]write) {
	t.Helper()
	for what, w := range writes {
		membertest.Eventually(t, func() error { // the API server reads roles and policies by a watch
			err := w.do()
			return membertest.Want(err == nil && w.says == "" || err != nil && w.says != "" && strings.Contains(err.Error(), w.says), "%s: %v, want %q", what, err, w.says)
		})
	}
}

// asUser returns a client that acts as user, whose scheme has all kinds of Kubernetes.
func (s *fixture) asUser(t *testing.T, user string, groups ...string) client.Client {
	t.Helper()
	cfg, err := s.AsUser(user, groups...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Tokens of network and storage drivers are on every worker. With the rights of such drivers, an attacker cannot change
// objects that Muster depends on.
func TestADriversTokenBreaksNothing(t *testing.T) {
	s := setUp(t)
	all := []string{"get", "create", "patch", "update", "delete"}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "driver-of-all"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes", "nodes/status", "pods/status", "events", "endpoints", "persistentvolumes"}, Verbs: all[:4]},
		{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: all},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: all},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices", "endpointslices/restricted"}, Verbs: all},
		{APIGroups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions", "customresourcedefinitions/status"}, Verbs: all},
	}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "driver-of-all"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "driver-of-all"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "driver", Namespace: metav1.NamespaceSystem}},
	}
	control := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1", Labels: map[string]string{clusterinfo.ControlPlaneLabel: ""}}}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "etcd-c1", Labels: map[string]string{"component": "etcd"}, Annotations: map[string]string{"kubeadm.kubernetes.io/x": "1"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kube-controller-manager"}}
	joinLease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: "muster-control-plane-join"}}
	kubelets := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "c1"}}
	served := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: "muster-joinservice-x"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	endpoints := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: "muster-joinservice-x", Labels: map[string]string{discoveryv1.LabelServiceName: "muster-joinservice"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}},
	}
	foreign := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "a-driver"}}
	joinservices := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: "muster-joinservice"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"a": "b"}, Ports: []corev1.ServicePort{{Port: 9090}}},
	}
	admin := s.asUser(t, "admin", "system:masters")
	for _, o := range []client.Object{role, binding, control, pod, lease, joinLease, kubelets, served, endpoints, foreign, joinservices} {
		if err := client.IgnoreAlreadyExists(admin.Create(t.Context(), o)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = admin.Delete(context.WithoutCancel(t.Context()), o, client.GracePeriodSeconds(0)) })
	}
	driver := s.asUser(t, "system:serviceaccount:kube-system:driver", "system:serviceaccounts")
	collector := s.asUser(t, "system:serviceaccount:kube-system:generic-garbage-collector", "system:serviceaccounts")
	merge := func(s string) client.Patch { return client.RawPatch(types.MergePatchType, []byte(s)) }
	ofNode := func(as client.Client, p string) func() error {
		return func() error { return as.Patch(t.Context(), control.DeepCopy(), merge(p), client.DryRunAll) }
	}
	ofPod := func(p string) func() error {
		return func() error { return driver.Status().Patch(t.Context(), pod.DeepCopy(), merge(p), client.DryRunAll) }
	}
	slice := func(namespace, name, service string) func() error {
		return func() error {
			return driver.Create(t.Context(), &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
				AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}},
			}, client.DryRunAll)
		}
	}
	takes := func(as client.Client, name string) func() error {
		return func() error {
			l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name}}
			return as.Patch(t.Context(), l, merge(`{"spec":{"holderIdentity":"x"}}`), client.DryRunAll)
		}
	}
	definition := func(as client.Client, group, kind, plural string) func() error {
		return func() error {
			o := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": plural + "." + group},
				"spec": map[string]any{
					"group": group, "scope": "Cluster", "names": map[string]any{"kind": kind, "plural": plural},
					"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}}},
				},
			}}
			return as.Create(t.Context(), o, client.DryRunAll)
		}
	}
	ours := func(name string) *unstructured.Unstructured {
		o := &unstructured.Unstructured{}
		o.SetAPIVersion("apiextensions.k8s.io/v1")
		o.SetKind("CustomResourceDefinition")
		o.SetName(name + ".muster.dev")
		return o
	}
	deletes := func(as client.Client, o client.Object) func() error {
		return func() error {
			return as.Delete(t.Context(), o.DeepCopyObject().(client.Object), client.DryRunAll)
		}
	}
	patches := func(as client.Client, o client.Object, p string) func() error {
		return func() error {
			return as.Patch(t.Context(), o.DeepCopyObject().(client.Object), merge(p), client.DryRunAll)
		}
	}
	volume := func(as client.Client, source corev1.PersistentVolumeSource) func() error {
		return func() error {
			v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{GenerateName: "v-"}, Spec: corev1.PersistentVolumeSpec{
				PersistentVolumeSource: source, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			}}
			if source.Local != nil {
				v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpExists}},
				}}}}
			}
			return as.Create(t.Context(), v, client.DryRunAll)
		}
	}
	folder := func(path string) corev1.PersistentVolumeSource {
		return corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}
	}
	const full = `{"metadata":{"labels":{` // of a Node; the labels follow
	s.try(t, map[string]write{
		"deletes kube-controller-manager's lease":  {deletes(driver, lease), "no service account takes the Lease"},
		"an administrator deletes it":              {deletes(s.Client, lease), ""},
		"a kubelet's lease":                        {patches(driver, kubelets, `{"spec":{"holderIdentity":"x"}}`), "no service account takes the Lease"}, // J11
		"deletes a kubelet's lease":                {deletes(driver, kubelets), "no service account takes the Lease"},
		"the garbage collector deletes it":         {deletes(collector, kubelets), ""},
		"deletes a lease of its own":               {deletes(driver, foreign), ""},
		"the join Lease of control planes":         {patches(driver, joinLease, `{"spec":{"holderIdentity":"x"}}`), "no service account takes the Lease"},
		"deletes the join Lease of control planes": {deletes(driver, joinLease), "no service account takes the Lease"},
		"an administrator takes the join Lease":    {patches(s.Client, joinLease, `{"spec":{"holderIdentity":"x"}}`), ""},
		"deletes endpoints of joinservice":         {deletes(driver, endpoints), "only Kubernetes' own controllers"},
		"changes nothing of endpoints":             {patches(driver, endpoints, `{}`), ""},
		"an administrator deletes endpoints":       {deletes(admin, endpoints), ""},

		"another address of joinservice": {func() error {
			return driver.Status().Patch(t.Context(), served.DeepCopy(), merge(`{"status":{"podIP":"10.9.9.9","podIPs":[{"ip":"10.9.9.9"}]}}`), client.DryRunAll)
		}, "write the status of pods of " + clusterinfo.Namespace},
		"a condition of joinservice": {func() error {
			return driver.Status().Patch(t.Context(), served.DeepCopy(), merge(`{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`), client.DryRunAll)
		}, "write the status of pods of " + clusterinfo.Namespace},
		"an annotation of joinservice": {func() error {
			return driver.Status().Patch(t.Context(), served.DeepCopy(), merge(`{"metadata":{"annotations":{"cni.example/podIP":"10.1.2.3"}}}`), client.DryRunAll)
		}, ""},

		"other pods for joinservice's Service": {patches(driver, joinservices, `{"spec":{"selector":{"app":"x"}}}`), "only who may update Muster's DaemonSets"},
		"deletes joinservice's Service":        {deletes(driver, joinservices), "only who may update Muster's DaemonSets"},
		"an administrator changes it":          {patches(s.Client, joinservices, `{"metadata":{"labels":{"a":"b"}}}`), ""},

		"a definition that ends": {func() error {
			return driver.Status().Patch(t.Context(), ours("attestednodes"), merge(`{"status":{"conditions":[{"type":"Terminating","status":"True"}]}}`), client.DryRunAll)
		}, "only who may update Muster's policies"},

		"a control plane's root":            {volume(driver, folder("/")), "persistentVolumes.nodePaths"},
		"its keys":                          {volume(driver, folder("/etc/kubernetes")), "persistentVolumes.nodePaths"},
		"by a longer way":                   {volume(driver, folder("/mnt/../etc")), "must not contain"}, // a check of Kubernetes itself
		"what only begins as an allowed":    {volume(driver, folder("/mntx")), "persistentVolumes.nodePaths"},
		"as a local volume":                 {volume(driver, corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/dev/vda"}}), "persistentVolumes.nodePaths"},
		"a folder for volumes":              {volume(driver, folder("/mnt/disks/one")), ""},
		"a local volume":                    {volume(driver, corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/mnt/disks/one"}}), ""},
		"an administrator gives any folder": {volume(s.Client, folder("/")), ""},
		"a volume of a driver":              {volume(driver, corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "x.example", VolumeHandle: "x"}}), ""},

		"a Node that is full": {patches(driver, control, full+manyLabels(3000)+`}}}`), "at most 512 KiB"},
		"a Node with some":    {patches(driver, control, full+manyLabels(100)+`}}}`), ""},

		"addresses of a node's pods": {func() error {
			return driver.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n9"}, Spec: corev1.NodeSpec{PodCIDR: "203.0.113.0/24", PodCIDRs: []string{"203.0.113.0/24"}}}, client.DryRunAll)
		}, "chooses the addresses of one's pods"},
		"addresses of a node that has none yet": {ofNode(driver, `{"spec":{"podCIDR":"203.0.113.0/24","podCIDRs":["203.0.113.0/24"]}}`), "chooses the addresses of one's pods"},
		"kube-controller-manager allots them":   {ofNode(s.Client, `{"spec":{"podCIDR":"10.244.9.0/24","podCIDRs":["10.244.9.0/24"]}}`), ""},
		"where its kubelet is": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), merge(`{"status":{"addresses":[{"type":"InternalIP","address":"192.168.77.11"}]}}`), client.DryRunAll)
		}, "changes the addresses of one"},
		"the port of its kubelet": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), merge(`{"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":6443}}}}`), client.DryRunAll)
		}, "changes the addresses of one"},
		"a Node with addresses": {func() error {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n9"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "c1"}}}}
			return driver.Create(t.Context(), n, client.DryRunAll)
		}, "changes the addresses of one"},
		"a cloud's controller, which deletes Nodes, writes them": {func() error {
			return s.Client.Status().Patch(t.Context(), control.DeepCopy(), merge(`{"status":{"addresses":[{"type":"ExternalIP","address":"192.0.2.1"}]}}`), client.DryRunAll)
		}, ""},
		"a condition of a Node": {func() error {
			return driver.Status().Patch(t.Context(), control.DeepCopy(), merge(`{"status":{"conditions":[{"type":"NetworkUnavailable","status":"False"}]}}`), client.DryRunAll)
		}, ""},
		"a control plane's certificates": {ofNode(driver, `{"metadata":{"annotations":{"`+clusterinfo.CertificatesAnnotation+`":"[]"}}}`), "only an administrator changes annotations"},
		"as muster-renewal.service does": {ofNode(s.Client, `{"metadata":{"annotations":{"`+clusterinfo.CertificatesAnnotation+`":"[]"}}}`), ""},
		"an annotation of its own":       {ofNode(driver, `{"metadata":{"annotations":{"example.com/x":"y"}}}`), ""},

		"labels of a pod":                     {ofPod(`{"metadata":{"labels":{"tier":"control-plane"}}}`), "only who may update all pods changes labels"},
		"takes a pod's labels away":           {ofPod(`{"metadata":{"labels":{"component":null}}}`), "only who may update all pods changes labels"},
		"an address for kubeadm":              {ofPod(`{"metadata":{"annotations":{"kubeadm.kubernetes.io/etcd.advertise-client-urls":"https://192.0.2.1:2379"}}}`), "only who may update all pods changes labels"},
		"another one":                         {ofPod(`{"metadata":{"annotations":{"kubeadm.kubernetes.io/x":"2"}}}`), "only who may update all pods changes labels"},
		"takes one away":                      {ofPod(`{"metadata":{"annotations":{"kubeadm.kubernetes.io/x":null}}}`), "only who may update all pods changes labels"},
		"a finalizer of a pod":                {ofPod(`{"metadata":{"finalizers":["example.com/hold"]}}`), "only who may update all pods adds finalizers"},
		"a pod has failed":                    {ofPod(`{"status":{"phase":"Failed"}}`), "only who may delete all pods says"},
		"a container waits":                   {ofPod(`{"status":{"containerStatuses":[{"name":"x","image":"x","imageID":"","ready":false,"restartCount":1}]}}`), "only who may delete all pods says"},
		"an annotation of a pod, as networks": {ofPod(`{"metadata":{"annotations":{"cni.example/podIP":"10.1.2.3"}}}`), ""},
		"a condition of a pod":                {ofPod(`{"status":{"conditions":[{"type":"example.com/ready","status":"True"}]}}`), ""},

		"kube-controller-manager's lease": {takes(driver, "kube-controller-manager"), "no service account takes the Lease"},
		"kube-scheduler's lease": {func() error {
			return driver.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kube-scheduler"}}, client.DryRunAll)
		}, "no service account takes the Lease"},
		"an administrator takes it": {takes(s.Client, "kube-controller-manager"), ""},

		"endpoints of joinservice":    {slice(clusterinfo.Namespace, "x", "muster-joinservice"), "only Kubernetes' own controllers"},
		"endpoints of the API server": {slice(metav1.NamespaceDefault, "x", "kubernetes"), "only Kubernetes' own controllers"},
		"endpoints of others":         {slice(metav1.NamespaceDefault, "x", "x"), ""},

		"a kind with the name of ours": {definition(driver, "aaa.example", "AttestedNode", "things"), "no other group's kind has a name"},
		"a plural with the name":       {definition(s.Client, "aaa.example", "Thing", "attestednodes"), "no other group's kind has a name"},
		"a kind of our group":          {definition(driver, "muster.dev", "Thing", "things"), "only who may update Muster's policies"},
		"changes ours": {func() error {
			return driver.Patch(t.Context(), ours("attestednodes"), merge(`{"metadata":{"labels":{"a":"b"}}}`), client.DryRunAll)
		}, "only who may update Muster's policies"},
		"deletes ours": {func() error { return driver.Delete(t.Context(), ours("attestationpolicies"), client.DryRunAll) }, "only who may update Muster's policies"},
		"an administrator changes ours": {func() error {
			return s.Client.Patch(t.Context(), ours("attestednodes"), merge(`{"metadata":{"labels":{"a":"b"}}}`), client.DryRunAll)
		}, ""},
		"a kind of its own": {definition(driver, "aaa.example", "Thing", "things"), ""},

		"an event about what looks like ours": {func() error {
			return driver.Create(t.Context(), &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "x"}, InvolvedObject: corev1.ObjectReference{Kind: " AttestedNode", Name: "x"}}, client.DryRunAll)
		}, "only joinservice and administrators"},
	})
}

// Other users cannot change joinservice's events, and cannot make an event large by finalizers.
func TestEventsStayWhatTheyAre(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, s.machine(t), w)))
	event := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "held.1"}, InvolvedObject: corev1.ObjectReference{Kind: "AttestedNode", Name: "w1"}, Reason: "NotEvicted"}
	other := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "other.1"}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "w1"}}
	for _, o := range []client.Object{event, other} {
		if err := client.IgnoreAlreadyExists(s.Client.Create(t.Context(), o)); err != nil {
			t.Fatal(err)
		}
	}
	patch := func(o client.Object, p string) func() error {
		return func() error {
			return took.kubelet.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(p)), client.DryRunAll)
		}
	}
	s.try(t, map[string]write{
		"rewrites it":       {patch(event.DeepCopy(), `{"message":"all is well","involvedObject":{"kind":"Node","apiVersion":"v1"}}`), "only joinservice and administrators"},
		"turns one into it": {patch(other.DeepCopy(), `{"involvedObject":{"kind":"AttestedNode"}}`), "only joinservice and administrators"},
		"finalizers": {func() error {
			return s.Client.Patch(t.Context(), other.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/a"]}}`)), client.DryRunAll)
		}, "an event has at most 4 KiB"},
		"characters of 4 bytes": {patch(other.DeepCopy(), `{"message":"`+strings.Repeat("😀", 1100)+`"}`), "an event has at most 4 KiB"},
		"counts once more":      {patch(other.DeepCopy(), `{"count":2}`), ""},
	})
}

// A node can report only what its kubelet knows, and not labels and addresses that other programs use for control planes or
// routing.
func TestANodeDescribesNothingButItself(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, s.machine(t), w)))
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	routed := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: corev1.NodeSpec{PodCIDR: "203.0.113.0/24", PodCIDRs: []string{"203.0.113.0/24"}}}
	_ = s.Client.Delete(t.Context(), node.DeepCopy())
	csiNode := func(owners ...string) func() error { // it would exist after the Node, and belong to the next machine
		n := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
		for _, o := range owners {
			n.OwnerReferences = append(n.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: o, UID: "8f5cbb5b-7a5d-4b57-9f36-1a2b3c4d5e6f"})
		}
		kubelet := s.asUser(t, "system:node:w1", "system:nodes")
		return func() error { return kubelet.Create(t.Context(), n.DeepCopy(), client.DryRunAll) }
	}
	s.try(t, map[string]write{
		"with addresses for its pods":  {func() error { return took.kubelet.Create(t.Context(), routed.DeepCopy(), client.DryRunAll) }, "only who may delete all nodes chooses the addresses"},
		"without":                      {func() error { return took.kubelet.Create(t.Context(), node.DeepCopy(), client.DryRunAll) }, ""},
		"of volumes, without an owner": {csiNode(), "is owned by its Node"},
		"of another Node":              {csiNode("w2"), "is owned by its Node"},
		"of volumes":                   {csiNode("w1"), ""},
		"with a control plane's certificates": {func() error {
			n := node.DeepCopy()
			n.Annotations = map[string]string{clusterinfo.CertificatesAnnotation: "[]"}
			return took.kubelet.Create(t.Context(), n, client.DryRunAll)
		}, "only an administrator changes annotations"},
	})
}

// manyLabels returns n members of a JSON object: labels of 260 bytes each.
func manyLabels(n int) string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf(`"%s.example/%d":"%s"`, strings.Repeat("x", 180), i, strings.Repeat("y", 60)))
	}
	return strings.Join(out, ",")
}

// A pod can be deleted, whatever its contents: its deletion is written first, and etcd refuses an object above 1.5 MiB.
func TestAPodCanBeDeleted(t *testing.T) {
	s := setUp(t)
	create := func(size int, dryRun bool, finalizers ...string) (*corev1.Pod, error) {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "p-", Finalizers: finalizers},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x", Args: []string{strings.Repeat("x", size)}}}},
		}
		var o []client.CreateOption
		if dryRun {
			o = append(o, client.DryRunAll)
		}
		return p, s.Client.Create(t.Context(), p, o...)
	}
	pod := func(size int, finalizers ...string) func() error {
		return func() error { _, err := create(size, true, finalizers...); return err }
	}
	s.try(t, map[string]write{
		"large, and held": {pod(1<<20, "example.com/hold"), "at most 512 KiB"},
		"large":           {pod(1 << 20), "at most 512 KiB"},
		"held":            {pod(100<<10, "batch.kubernetes.io/job-tracking"), ""},
		"of some size":    {pod(400 << 10), ""},
	})
	// The largest accepted pod, filled with labels, can be deleted.
	p, err := create(400<<10, false)
	if err != nil {
		t.Fatal(err)
	}
	fill := func(n int) error {
		return s.Client.Patch(t.Context(), p.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{`+manyLabels(n)+`}}}`)))
	}
	if err := fill(4000); err == nil || !strings.Contains(err.Error(), "at most 512 KiB") {
		t.Errorf("a pod of 1.4 MiB: %v", err)
	}
	if err := fill(100); err != nil {
		t.Error(err)
	}
	if err := s.Client.Delete(t.Context(), p, client.GracePeriodSeconds(0)); err != nil {
		t.Error(err)
	}
}

// A pod with an anti-affinity for pods of another namespace would keep those off every node.
func TestNoPodKeepsThoseOfOtherNamespacesAway(t *testing.T) {
	s := setUp(t)
	pod := func(namespaces ...string) func() error {
		return func() error {
			return s.Client.Create(t.Context(), &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "p-"},
				Spec: corev1.PodSpec{
					Containers: []corev1.Container{{Name: "x", Image: "x"}},
					Affinity: &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
						LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}, TopologyKey: corev1.LabelOSStable, Namespaces: namespaces,
					}}}},
				},
			}, client.DryRunAll)
		}
	}
	s.try(t, map[string]write{
		"of Muster's":  {pod(clusterinfo.Namespace), "CrossNamespacePodAffinity"},
		"of their own": {pod(), ""},
	})
}
