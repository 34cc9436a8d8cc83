package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/refusaltest"
)

// revoke changes the list as the owner's program does when a name is taken from its machine.
func (s *fixture) revoke(t *testing.T, node string) {
	t.Helper()
	s.SetAccess(t, node, func(e nodeaccess.Entry) nodeaccess.Entry { return e.Revoke(time.Now()) })
}

// canWrite waits until the API server accepts a node's write, or, if want is false, refuses it.
func canWrite(t *testing.T, api client.Client, node string, want bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		err := api.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
			client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"x":"`+time.Now().String()+`"}}}`)))
		if want || err == nil {
			return membertest.Want(want && err == nil, "write as %s: %v, want it taken: %v", node, err, want)
		}
		return membertest.Want(apierrors.IsForbidden(err) || apierrors.IsInvalid(err), "write as %s: %v", node, err)
	})
}

// request files a request with a certificate of the node, and returns the key of the requested one.
func request(t *testing.T, api client.Client, node string) (*certificatesv1.CertificateSigningRequest, *ecdsa.PrivateKey) {
	t.Helper()
	key, f := newKey(t), renewal(node)
	o := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr(t, &x509.CertificateRequest{
				Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
			}, key)}),
			SignerName: f.signer, Usages: f.usages,
		},
	}
	membertest.Eventually(t, func() error { return api.Create(t.Context(), o) })
	return o, key
}

// When a name is taken from a machine, no certificate that was issued for it may write any more, also when the next machine
// has the name. Reads stay possible: that is documented.
func TestACertificateOfBeforeDoesNotWriteAsTheNextMachine(t *testing.T) {
	s := setUp(t)
	first, second := s.machine(t), s.machine(t)
	w := worker(t)
	old := s.asNode(t, w, s.ticketFor(t, first, w))
	membertest.Eventually(t, func() error { return old.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}) })
	t.Cleanup(func() {
		_ = s.Client.Delete(context.WithoutCancel(t.Context()), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	})

	// This request waits for a verdict: only its own machine may cause its approval.
	n := s.Node(t, "w1")
	n.Status.LastVerdict, n.Status.Ticket = nil, nil // the certificate of a valid ticket would be allowed
	if err := s.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	waiting, _ := request(t, old, "w1")
	s.waits(t, waiting.Name, "VERDICT_OLD")

	// A request that waits is not decided, so there is no audit record.
	places := refusaltest.Places{Metric: []string{"muster_node_certificate_requests_total"}, Log: []string{"msg", "a kubelet's certificate request waits"}}
	refusaltest.Reported(t, s.observations(t), attestv1.Reason_REASON_CERTIFICATE_RETIRED, places, func() {
		s.revoke(t, "w1")
		s.waits(t, waiting.Name, "CERTIFICATE_RETIRED")
	})
	canWrite(t, old, "w1", false)
	s.unenroll(t, "w1")

	again := worker(t, named("w1", "5f0c95b6-2a3d-4c7e-9f10-000000000002", "192.168.77.12"))
	var ticket *joinv1.IssueJoinTicketResponse
	membertest.Eventually(t, func() (err error) { // when the informers know that the name is free
		ticket, err = s.dial(t, second.Attester("machine")).IssueJoinTicket(t.Context(), again.IssueJoinTicketRequest)
		return err
	})
	next := s.asNode(t, again, ticket)
	membertest.Eventually(t, func() error { return next.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}) })
	canWrite(t, next, "w1", true)
	canWrite(t, old, "w1", false)
	if err := s.Client.Get(t.Context(), client.ObjectKeyFromObject(waiting), waiting); !apierrors.IsNotFound(err) {
		t.Errorf("what the machine of before asked for is still there: %v", err)
	}

	// The kubelet's own renewal: the certificate that a listed one renews is listed too.
	renewed, key := request(t, next, "w1")
	s.decided(t, renewed.Name, certificatesv1.CertificateApproved, "AttestedMachine")
	if err := s.Client.Get(t.Context(), client.ObjectKeyFromObject(renewed), renewed); err != nil {
		t.Fatal(err)
	}
	later := s.asNode(t, &joinRequest{client: key}, &joinv1.IssueJoinTicketResponse{
		CaCertificate: ticket.GetCaCertificate(), KubeletClientCertificate: renewed.Status.Certificate,
	})
	canWrite(t, later, "w1", true)
	canWrite(t, next, "w1", true)
	canWrite(t, old, "w1", false)
}

// When every older certificate has expired, the revocation is removed.
func TestARevocationLapses(t *testing.T) {
	s := setUp(t)
	s.SetAccess(t, "w1", func(nodeaccess.Entry) nodeaccess.Entry {
		return nodeaccess.Entry{Revoked: &nodeaccess.Revocation{Until: time.Now().Add(-time.Minute)}}
	})
	w := worker(t)
	node := s.asNode(t, w, s.ticketFor(t, s.machine(t), w))
	membertest.Eventually(t, func() error {
		r := s.Access(t).Entry("w1").Revoked
		return membertest.Want(r == nil, "it is still there: %+v", r)
	})
	membertest.Eventually(t, func() error {
		return node.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, client.DryRunAll)
	})
}

// The machine of a name changes only in a banned enrollment, which no service writes (J4).
func TestAnEnrollmentChangesItsMachineOnlyWhileBanned(t *testing.T) {
	s := setUp(t)
	s.Enroll(t, "w7", v1alpha1.AttestedNodeSpec{MachineID: s.machine(t).ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk1})
	other := s.machine(t).ID().String()
	update := func(edit func(*v1alpha1.AttestedNodeSpec)) error { // joinservice writes the status meanwhile
		return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			n := s.Node(t, "w7")
			edit(&n.Spec)
			return s.Client.Update(t.Context(), n)
		})
	}
	change := func(banned bool) error {
		return update(func(n *v1alpha1.AttestedNodeSpec) {
			n.MachineID, n.DiskID, n.Banned = other, "5f0c95b6-2a3d-4c7e-9f10-000000000009", banned
		})
	}
	for _, banned := range []bool{false, true} { // a ban and the change in one write are refused too
		if err := change(banned); !apierrors.IsInvalid(err) {
			t.Errorf("machine and disk changed, banned with it: %v: %v", banned, err)
		}
	}
	// Neither is the disk changed by two writes, of which the first removes it.
	if err := update(func(n *v1alpha1.AttestedNodeSpec) { n.DiskID = "" }); !apierrors.IsInvalid(err) {
		t.Errorf("disk removed: %v", err)
	}
	if err := update(func(n *v1alpha1.AttestedNodeSpec) { n.Banned = true }); err != nil {
		t.Fatal(err)
	}
	if err := change(false); err != nil {
		t.Errorf("in a banned enrollment: %v", err)
	}
}
