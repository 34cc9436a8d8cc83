package main

import (
	"context"
	"errors"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// stolen is what an attacker took from node w1: its kubelet's key and certificate, and the token of a DaemonSet's pod that
// may list Services.
type stolen struct {
	kubelet, token client.Client
	pod            *corev1.Pod
	secret         *corev1.Secret
}

func (s *fixture) steal(t *testing.T, kubelet client.Client) *stolen {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	membertest.Eventually(t, func() error {
		return kubelet.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	})
	out := &stolen{kubelet: kubelet, secret: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "of-a-pod"}}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "proxy"}}
	out.pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "proxy-w1"}, Spec: corev1.PodSpec{
		NodeName: "w1", ServiceAccountName: account.Name, Containers: []corev1.Container{{Name: "x", Image: "x"}},
		Volumes: []corev1.Volume{{Name: "x", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: out.secret.Name}}},
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
		}}}}},
	}}
	for _, o := range []client.Object{account, out.secret, out.pod} {
		must(client.IgnoreAlreadyExists(s.Client.Create(t.Context(), o)))
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), out.secret) })
	token, err := s.Token(t.Context(), namespace, account.Name, "", out.pod)
	must(err)
	out.token, err = client.New(&rest.Config{Host: s.Admin.Host, BearerToken: token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: s.Admin.CAData}}, client.Options{Scheme: clusterview.Scheme(), Mapper: kubelet.RESTMapper()})
	must(err)
	membertest.Eventually(t, func() error { // when the authorizer knows the pod
		return kubelet.Get(t.Context(), client.ObjectKeyFromObject(out.secret), out.secret)
	})
	if err := out.useToken(t); !apierrors.IsForbidden(err) {
		t.Fatalf("the token is not believed: %v", err)
	}
	must(out.askForToken(t))
	return out
}

// useToken uses the token: a valid one without rights is forbidden, an invalid one is unauthorized.
func (s *stolen) useToken(t *testing.T) error {
	t.Helper()
	return s.token.List(t.Context(), &corev1.SecretList{}, client.InNamespace(namespace))
}

// askForToken asks, as the kubelet, for another token of the pod.
func (s *stolen) askForToken(t *testing.T) error {
	t.Helper()
	return s.kubelet.SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "proxy"}},
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: s.pod.Name, UID: s.pod.UID}}})
}

// worthLittle checks what docs/leaving.md states about them after their node is evicted.
func (s *stolen) worthLittle(t *testing.T) {
	t.Helper()
	refused := func(err error) bool {
		return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err)
	}
	for what, try := range map[string]func() error{
		"reads a Secret of its pod": func() error {
			return s.kubelet.Get(t.Context(), client.ObjectKeyFromObject(s.secret), &corev1.Secret{})
		},
		"reads its pod": func() error { return s.kubelet.Get(t.Context(), client.ObjectKeyFromObject(s.pod), &corev1.Pod{}) },
		"gets a token":  func() error { return s.askForToken(t) },
		"makes its Node": func() error {
			return s.kubelet.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
		},
		"files a request": func() error {
			f := renewal("w1")
			return s.kubelet.Create(t.Context(), &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"}, Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: []byte("any"), SignerName: f.signer, Usages: f.usages,
			}})
		},
		"lists all Nodes":   func() error { return s.kubelet.List(t.Context(), &corev1.NodeList{}) },
		"lists all Secrets": func() error { return s.kubelet.List(t.Context(), &corev1.SecretList{}) },
		"lists all pods":    func() error { return s.kubelet.List(t.Context(), &corev1.PodList{}) },
		"reads enrollments": func() error { return s.kubelet.List(t.Context(), &v1alpha1.AttestedNodeList{}) },
	} {
		membertest.Eventually(t, func() error {
			err := try()
			return membertest.Want(refused(err), "the kubelet's certificate %s: %v", what, err)
		})
	}
	membertest.Eventually(t, func() error {
		err := s.useToken(t)
		return membertest.Want(apierrors.IsUnauthorized(err), "the pod's token: %v", err)
	})
	// These remain readable until the certificate expires.
	for kind, version := range map[string]string{"Service": "v1", "CSIDriver": "storage.k8s.io/v1", "RuntimeClass": "node.k8s.io/v1", "CertificateSigningRequest": "certificates.k8s.io/v1"} {
		l := &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: version, Kind: kind + "List"}}
		if err := s.kubelet.List(t.Context(), l); err != nil {
			t.Errorf("docs/leaving.md says that the certificate still reads every %s: %v", kind, err)
		}
	}
}

func (s *fixture) banned(t *testing.T, banned bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := s.Node(t, "w1")
		n.Spec.Banned = banned
		return s.Client.Update(t.Context(), n)
	})
}

// Invariant J10.
func TestWhatIsTakenFromANodeIsWorthLittleOnceItIsBanned(t *testing.T) {
	s := setUp(t)
	m, w := s.machine(t), worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, m, w)))
	s.banned(t, true)
	took.worthLittle(t)
	s.banned(t, false)
	membertest.Eventually(t, func() error { // its kubelet registers when it starts
		return took.kubelet.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	})
}

// `kubectl delete attestednode` deletes the enrollment, and then another machine gets the name.
func TestWhatIsTakenFromANodeIsWorthLittleOnceItsEnrollmentIsDeleted(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, s.machine(t), w)))
	s.unenroll(t, "w1")
	took.worthLittle(t)
	again := worker(t, named("w1", diskNumber(2), "192.168.77.12"))
	var next client.Client
	membertest.Eventually(t, func() error {
		ticket, err := s.dial(t, s.machine(t).Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), again.IssueJoinTicketRequest)
		if err == nil {
			next = s.asNode(t, again, ticket)
		}
		return err
	})
	membertest.Eventually(t, func() error { return next.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}) })
	canWrite(t, next, "w1", true)
	canWrite(t, took.kubelet, "w1", false)
}

// While it is enrolled, a node prepares for its ban: what it may write then can't keep its pods, and no client can bind one
// to it afterwards (J10).
func TestANodePutsNothingInTheWayOfItsEviction(t *testing.T) {
	s := setUp(t)
	m, w := s.machine(t), worker(t)
	took := s.steal(t, s.asNode(t, w, s.ticketFor(t, m, w)))
	var node corev1.Node
	if err := s.Client.Get(t.Context(), client.ObjectKey{Name: "w1"}, &node); err != nil {
		t.Fatal(err)
	}
	mirror := func(namespace string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: "static-w1", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: new(true)}},
			},
			Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "x", Image: "x"}}},
		}
	}
	finalize := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/keep"]}}`))
	event := func(kind string) *corev1.Event {
		return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, GenerateName: "x"}, Reason: "Evicted", InvolvedObject: corev1.ObjectReference{Kind: kind, Name: "w1"}}
	}
	for what, try := range map[string]struct {
		do   func() error
		says string
	}{
		"makes a mirror pod": {func() error {
			return took.kubelet.Create(t.Context(), mirror(metav1.NamespaceSystem), client.DryRunAll)
		}, "creates no pods"},
		"makes one of its own": {func() error {
			return took.kubelet.Create(t.Context(), mirror(metav1.NamespaceDefault), client.DryRunAll)
		}, "creates no pods"},
		"gives its Node a finalizer": {func() error {
			return took.kubelet.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, finalize)
		}, "finalizer"},
		"gives its Node one with its status": {func() error {
			return took.kubelet.Status().Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, finalize)
		}, "finalizer"},
		"gives its pod one with its status": {func() error { return took.kubelet.Status().Patch(t.Context(), took.pod.DeepCopy(), finalize) }, "adds no finalizers"},
		"writes an event of its Node":       {func() error { return took.kubelet.Create(t.Context(), event("Node"), client.DryRunAll) }, ""},
		"writes a large one": {func() error {
			e := event("Node")
			e.Message = strings.Repeat("x", 13<<10)
			return took.kubelet.Create(t.Context(), e, client.DryRunAll)
		}, "at most 4 KiB"},
		"writes one whose object is large": {func() error {
			e := event("Node")
			e.InvolvedObject.FieldPath = strings.Repeat("x", 5000)
			return took.kubelet.Create(t.Context(), e, client.DryRunAll)
		}, "at most 4 KiB"},
		"writes one of its enrollment": {func() error { return took.kubelet.Create(t.Context(), event("AttestedNode"), client.DryRunAll) }, "only joinservice and administrators"},
	} {
		membertest.Eventually(t, func() error { // the API server reads policies and their parameters by a watch
			err := try.do()
			return membertest.Want(err == nil && try.says == "" || err != nil && try.says != "" && strings.Contains(err.Error(), try.says), "a node %s: %v, want %q", what, err, try.says)
		})
	}
	// Small ones are limited in number, for one user.
	membertest.Eventually(t, func() error {
		for range 300 {
			if err := took.kubelet.Create(t.Context(), event("Node")); err != nil {
				return membertest.Want(apierrors.IsTooManyRequests(err), "events without end: %v", err)
			}
		}
		return errors.New("300 events at once")
	})
	// The static pods of a control plane may stay, but not finalizers and pods beside joinservice.
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c1"}}
	enrolled := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "c1"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{9}.String(), Role: v1alpha1.RoleControlPlane}}
	for _, o := range []client.Object{other, enrolled} {
		if err := s.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	enrolled.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}
	if err := s.Client.Status().Update(t.Context(), enrolled); err != nil {
		t.Fatal(err)
	}
	// A node that is older than Muster may have static pods, but none that count as a control plane's.
	s.SetAccess(t, "w0", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true} })
	before, static := s.as(t, "w0"), mirror(metav1.NamespaceSystem)
	earlier := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w0"}}
	if err := s.Client.Create(t.Context(), earlier); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), earlier) })
	static.Name, static.Spec.NodeName, static.OwnerReferences[0].Name, static.OwnerReferences[0].UID = "static-w0", "w0", "w0", earlier.UID
	membertest.Eventually(t, func() error { return before.Create(t.Context(), static.DeepCopy(), client.DryRunAll) })
	static.Labels = map[string]string{"component": "etcd", "tier": "control-plane"}
	if err := before.Create(t.Context(), static, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "no pods of a control plane") {
		t.Errorf("a pod of etcd by a node that was not appraised: %v", err)
	}
	controlPlane, own := s.as(t, "c1"), mirror(metav1.NamespaceSystem)
	own.Name, own.Spec.NodeName, own.OwnerReferences[0].Name, own.OwnerReferences[0].UID = "etcd-c1", "c1", "c1", other.UID
	own.Labels = static.Labels
	membertest.Eventually(t, func() error { return controlPlane.Create(t.Context(), own.DeepCopy(), client.DryRunAll) })
	for says, change := range map[string]func(*corev1.Pod){
		"adds no finalizers":            func(p *corev1.Pod) { p.Finalizers = []string{"example.com/keep"} },
		"makes no pods in " + namespace: func(p *corev1.Pod) { p.Namespace = namespace },
	} {
		p := own.DeepCopy()
		change(p)
		if err := controlPlane.Create(t.Context(), p, client.DryRunAll); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("a control plane's pod: %v, want %q", err, says)
		}
	}
	// A finalizer that another client has added does not prevent a kubelet's writes.
	if err := s.Client.Patch(t.Context(), took.pod, finalize); err != nil {
		t.Fatal(err)
	}
	if err := took.kubelet.Status().Patch(t.Context(), took.pod.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status":{"phase":"Running"}}`))); err != nil {
		t.Error(err)
	}
	if err := s.Client.Patch(t.Context(), took.pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	s.banned(t, true)
	took.worthLittle(t)
	late := mirror(metav1.NamespaceDefault)
	late.Annotations, late.OwnerReferences = nil, nil
	membertest.Eventually(t, func() error {
		err := s.Client.Create(t.Context(), late.DeepCopy(), client.DryRunAll)
		return membertest.Want(err != nil && strings.Contains(err.Error(), "w1 may not write"), "a pod is made for a banned node: %v", err)
	})
	late.Spec.NodeName = ""
	if err := s.Client.Create(t.Context(), late); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), late) })
	err := s.Client.SubResource("binding").Create(t.Context(), late, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "w1"}})
	if err == nil || !strings.Contains(err.Error(), "w1 may not write") {
		t.Errorf("a pod is bound to a banned node: %v", err)
	}
}
