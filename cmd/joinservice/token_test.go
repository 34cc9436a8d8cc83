package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// tokens lists the bootstrap tokens in the cluster.
func (s *fixture) tokens(t *testing.T) []corev1.Secret {
	t.Helper()
	l := &corev1.SecretList{}
	if err := s.Client.List(t.Context(), l, client.InNamespace("kube-system")); err != nil {
		t.Fatal(err)
	}
	var out []corev1.Secret
	for _, o := range l.Items {
		if o.Type == corev1.SecretTypeBootstrapToken {
			out = append(out, o)
		}
	}
	return out
}

func withTokens(t *testing.T) *fixture {
	t.Helper()
	if err := shared.Namespace(t.Context(), "kube-system"); err != nil {
		t.Fatal(err)
	}
	rights, err := os.ReadFile("../../deploy/charts/testdata/rendered-tokens.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := shared.Apply(t.Context(), rights); err != nil {
		t.Fatal(err)
	}
	return setUp(t, func(s *fixture) { s.flags = []string{"--join-credential=token"} })
}

// In a cluster that Muster did not initialize a ticket has a bootstrap token beside its certificates. It is a bearer
// credential, so it must have few rights and be deleted soon (J5).
func TestATicketsTokenIsOfLittleUseAndGoneOnceTheNodeIsReady(t *testing.T) {
	s := withTokens(t)
	ctx := t.Context()
	w := worker(t)
	before := time.Now()
	ticket := s.ticketFor(t, s.machine(t), w)
	after := time.Now()
	token := ticket.GetBootstrapToken()
	if !regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`).MatchString(token) {
		t.Fatalf("a token of %d characters", len(token))
	}
	if _, secret, _ := strings.Cut(token, "."); bytes.Contains(s.join.Log.Bytes(), []byte(secret)) {
		t.Error("the token is in the log (K3)")
	}
	have := s.tokens(t)
	if len(have) != 1 {
		t.Fatalf("%d tokens", len(have))
	}
	data := have[0].Data
	until, err := time.Parse(time.RFC3339, string(data["expiration"]))
	if err != nil || until.After(after.Add(5*time.Minute)) || until.Before(before.Add(3*time.Minute)) {
		t.Errorf("the ticket of %s has a token that lasts until %s: %v", before, until, err)
	}
	if string(data["auth-extra-groups"]) != "system:bootstrappers:muster" || string(data["usage-bootstrap-authentication"]) != "true" || string(data["usage-bootstrap-signing"]) != "true" {
		t.Errorf("groups %s, usages %s %s", data["auth-extra-groups"], data["usage-bootstrap-authentication"], data["usage-bootstrap-signing"])
	}

	bearer, err := client.New(&rest.Config{Host: s.Admin.Host, BearerToken: token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: s.Admin.CAData}}, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	allowed := func(name string) error {
		return bearer.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: name}, &corev1.ConfigMap{})
	}
	membertest.Eventually(t, func() error { // when RBAC and the token's informer have seen it
		return membertest.Want(apierrors.IsNotFound(allowed("kubeadm-config")), "kubeadm-config: %v", allowed("kubeadm-config"))
	})
	if err := allowed("kubelet-config"); !apierrors.IsNotFound(err) {
		t.Errorf("kubelet-config: %v", err)
	}
	if err := bearer.Get(ctx, client.ObjectKey{Name: "w1"}, &corev1.Node{}); !apierrors.IsNotFound(err) {
		t.Errorf("get a Node: %v", err)
	}
	request := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: []byte("x"), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
	for name, try := range map[string]func() error{
		"ask for a certificate":  func() error { return bearer.Create(ctx, request) },
		"read its own Secret":    func() error { return bearer.Get(ctx, client.ObjectKeyFromObject(&have[0]), &corev1.Secret{}) },
		"list Secrets":           func() error { return bearer.List(ctx, &corev1.SecretList{}, client.InNamespace("kube-system")) },
		"list Nodes":             func() error { return bearer.List(ctx, &corev1.NodeList{}) },
		"read another ConfigMap": func() error { return allowed("extension-apiserver-authentication") },
		"make a Node":            func() error { return bearer.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}) },
	} {
		if err := try(); !apierrors.IsForbidden(err) {
			t.Errorf("the token can %s: %v", name, err)
		}
	}

	node := s.asNode(t, w, ticket)
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	membertest.Eventually(t, func() error { return node.Create(ctx, n) })
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
	if len(s.tokens(t)) != 1 {
		t.Error("it is gone before its node is Ready")
	}
	if err := node.Status().Update(ctx, n); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error { return membertest.Want(len(s.tokens(t)) == 0, "it is still there") })
	membertest.Eventually(t, func() error {
		return membertest.Want(apierrors.IsUnauthorized(allowed("kubeadm-config")), "it still authenticates: %v", allowed("kubeadm-config"))
	})
}

func TestAReturnedTicketTakesItsTokenAlong(t *testing.T) {
	s := withTokens(t)
	m := s.machine(t)
	caller := s.dial(t, m.Attester(attest.PurposeMachine))
	ticket := s.ticketFor(t, m, worker(t))
	if len(s.tokens(t)) != 1 {
		t.Error("no token")
	}
	membertest.Eventually(t, func() error {
		_, err := caller.ReturnJoinTicket(t.Context(), &joinv1.ReturnJoinTicketRequest{TicketId: ticket.GetTicketId()})
		return err
	})
	if n := len(s.tokens(t)); n != 0 {
		t.Errorf("%d tokens are left", n)
	}
}

func TestATicketHasNoTokenUnlessTheClusterWantsOne(t *testing.T) {
	s := setUp(t)
	if s.ticketFor(t, s.machine(t), worker(t)).GetBootstrapToken() != "" || len(s.tokens(t)) != 0 {
		t.Error("there is a token")
	}
	if err := run(t.Context(), []string{"--owner-keys=YQkOxhcpgzUAX4ejzUsSgNYqOQlzmMMqYpxcXcfAUJg=", "--join-credential=bearer"}, new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), "--join-credential") {
		t.Errorf("%v", err)
	}
}
