package main

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// waiting reads the list as the owner's program does.
func (s *fixture) waiting(t *testing.T) map[string]waiting.Entry {
	t.Helper()
	m := &corev1.ConfigMap{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: waiting.ConfigMap}, m); err != nil {
		t.Fatal(err)
	}
	entries, bad := waiting.Parse(m.Data)
	if len(bad) > 0 {
		t.Errorf("can't be read: %v", bad)
	}
	out := map[string]waiting.Entry{}
	for _, e := range entries {
		out[e.Machine] = e
	}
	return out
}

// expiries waits until the ends of a node's certificates are in its status.
func (s *fixture) expiries(t *testing.T, node string) (out *v1alpha1.NodeCertificates) {
	t.Helper()
	membertest.Eventually(t, func() error {
		out = s.Node(t, node).Status.Certificates
		return membertest.Want(out != nil && out.ClientExpiresAt != nil && out.ServingExpiresAt != nil, "of %s: %+v", node, out)
	})
	return out
}

// A machine that is refused although its evidence is genuine is in the owner's list, with the one reason (R1), until it is
// admitted. A peer without genuine evidence is never listed.
func TestTheOwnerSeesWhoWaits(t *testing.T) {
	s := setUp(t, recordsSoon)
	changed := attesttest.NewMachine(t, s.ca, attesttest.Options{Image: "tampered"})
	untrusted := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	late := s.controlMachine(t)
	ask := func(m *attesttest.Machine, w *joinRequest) attestv1.Reason {
		_, err := s.dial(t, m.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		return rpc.ReasonFrom(err)
	}
	controlPlane := worker(t, named("cp2", disk2, "192.168.77.22"), func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE })
	for _, tt := range []struct {
		m    *attesttest.Machine
		w    *joinRequest
		want attestv1.Reason
	}{
		{untrusted, worker(t), attestv1.Reason_REASON_EK_UNTRUSTED},
		{changed, worker(t), attestv1.Reason_REASON_POLICY_REFUSED},
		{late, controlPlane, attestv1.Reason_REASON_NOT_ENROLLED},
	} {
		if got := ask(tt.m, tt.w); got != tt.want {
			t.Fatalf("refused with %s, want %s", attest.ReasonName(got), attest.ReasonName(tt.want))
		}
	}
	membertest.Eventually(t, func() error { n := len(s.waiting(t)); return membertest.Want(n == 2, "%d wait", n) })
	list := s.waiting(t)
	if _, there := list[untrusted.ID().String()]; there {
		t.Error("an untrusted machine is listed")
	}
	if e := list[changed.ID().String()]; e.Reason != "POLICY_REFUSED" || e.Node != "" || e.Address != "127.0.0.1" || e.Expired(time.Now()) {
		t.Errorf("the changed machine: %+v", e)
	}
	if e := list[late.ID().String()]; e.Reason != "NOT_ENROLLED" || e.Node != "cp2" || e.Role != "control-plane" || e.Address != "127.0.0.1" || e.Since.IsZero() {
		t.Errorf("the control plane: %+v", e)
	}
	s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: late.ID().String(), Role: v1alpha1.RoleControlPlane})
	membertest.Eventually(t, func() error {
		got := ask(late, controlPlane)
		return membertest.Want(got == attestv1.Reason_REASON_ACCEPTED, "refused with %s", attest.ReasonName(got))
	})
	membertest.Eventually(t, func() error {
		_, there := s.waiting(t)[late.ID().String()]
		return membertest.Want(!there, "the admitted machine is still listed")
	})
	if _, there := s.waiting(t)[changed.ID().String()]; !there {
		t.Error("the machine that still waits is no longer listed")
	}
}

// A machine that a list of the policy lacks is in a list of its own, with what it booted; the owner sees whether listing it is enough. Once the policy
// lists it, it is refused for nothing.
func TestTheOwnerSeesWhoLacksAList(t *testing.T) {
	s := setUp(t, recordsSoon)
	bare, tampered := attesttest.NewMachine(t, s.ca, attesttest.Options{Bare: true}), attesttest.NewMachine(t, s.ca, attesttest.Options{Bare: true, Image: "tampered"})
	ask := func(m *attesttest.Machine) attestv1.Reason {
		_, err := s.dial(t, m.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
		return rpc.ReasonFrom(err)
	}
	// Its root certifies keys of another kind: no list of the policy could let it in.
	other := attesttest.NewMachine(t, s.ca, attesttest.Options{EK: attest.EKRSA2048})
	for _, m := range []*attesttest.Machine{other, bare, tampered} {
		if got := ask(m); got != attestv1.Reason_REASON_EK_UNTRUSTED {
			t.Fatalf("refused with %s", attest.ReasonName(got))
		}
	}
	membertest.Eventually(t, func() error { n := len(s.waiting(t)); return membertest.Want(n >= 2, "%d wait", n) })
	list := s.waiting(t)
	if e, there := list[other.ID().String()]; there {
		t.Errorf("a machine that no list lets in is listed: %+v", e)
	}
	if e := list[bare.ID().String()]; !e.Listable() || e.List != "tpm2.bareMachineIds" || e.Endorsement != "bare-ek" || e.Image != "image-0" || e.Class != "class-0" || e.Address != "127.0.0.1" {
		t.Errorf("the machine: %+v", e)
	}
	if e := list[tampered.ID().String()]; e.Listable() || e.List != "tpm2.bareMachineIds" || !strings.Contains(e.Differs, "PCR 4") {
		t.Errorf("the changed machine: %+v", e)
	}
}

// A node that was refused for a while, by a policy that its owner has corrected since, is no longer listed.
func TestAMachineThatIsAcceptedAgainWaitsNoLonger(t *testing.T) {
	s := setUp(t, recordsSoon)
	m := s.machine(t)
	s.ticketFor(t, m, worker(t))
	m.LockTo(s.ID)
	e := waiting.Entry{Machine: m.ID().String(), Node: "w1", Role: "worker", Reason: "POLICY_REFUSED", Since: time.Now(), Last: time.Now()}
	text, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	list := &corev1.ConfigMap{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: waiting.ConfigMap}, list); err != nil {
		t.Fatal(err)
	}
	next := list.DeepCopy()
	next.Data = map[string]string{e.Machine: text}
	if err := s.Client.Patch(t.Context(), next, client.MergeFrom(list)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.reattested(t, m); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		n := len(s.waiting(t))
		return membertest.Want(n == 0, "%d wait", n)
	})
}

// The end of a node's certificates is known from the ticket, and later from its machine, which reports those that it has.
func TestTheEndsOfCertificatesAreNoted(t *testing.T) {
	s := setUp(t, recordsSoon)
	m := s.machine(t)
	ticket := s.ticketFor(t, m, worker(t))
	m.LockTo(s.ID)
	first := s.expiries(t, "w1")
	for _, c := range []struct {
		pem []byte
		end time.Time
	}{{ticket.GetKubeletClientCertificate(), first.ClientExpiresAt.Time}, {ticket.GetKubeletServingCertificate(), first.ServingExpiresAt.Time}} {
		if want := leaf(t, c.pem).NotAfter; !c.end.Equal(want) {
			t.Errorf("%s, want %s", c.end, want)
		}
	}
	client, serving := time.Now().Add(8760*time.Hour).Truncate(time.Second), time.Now().Add(time.Hour).Truncate(time.Second)
	says := &joinv1.ReattestRequest{BootSecret: oneSecret, KubeletClientExpiresAt: timestamppb.New(client), KubeletServingExpiresAt: timestamppb.New(serving)}
	if err := patiently(t, func() error {
		_, err := s.dial(t, m.Attester(attest.PurposeMachine)).Reattest(t.Context(), says)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if now := s.expiries(t, "w1"); !now.ClientExpiresAt.Time.Equal(client) || !now.ServingExpiresAt.Time.Equal(serving) {
		t.Errorf("%s and %s, want %s and %s", now.ClientExpiresAt, now.ServingExpiresAt, client, serving)
	}
	// A certificate that was made for it, but that it does not have, changes nothing.
	s.decided(t, s.file(t, renewal("w1")), certificatesv1.CertificateApproved, "AttestedMachine")
	if _, err := s.reattested(t, m); err != nil { // as one that can read no certificate
		t.Fatal(err)
	}
	if now := s.expiries(t, "w1"); !now.ClientExpiresAt.Time.Equal(client) {
		t.Errorf("%s, and the machine said %s", now.ClientExpiresAt, client)
	}
}
