package main

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestAWorkerGetsAllThatANodeNeeds(t *testing.T) {
	s := setUp(t)
	m, w := s.machine(t), worker(t)
	ticket := s.ticketFor(t, m, w)

	if !bytes.Equal(ticket.GetDiskKey(), s.DiskKey(t, disk1)) {
		t.Error("the disk key is another than the root secret gives")
	}
	if !bytes.Equal(ticket.GetClusterId(), s.ID[:]) || len(ticket.GetTicketId()) != 16 || ticket.GetKubernetesVersion() != "1.36.1" || ticket.GetControlPlaneEndpoint() != "192.168.77.1:6443" {
		t.Errorf("ticket %v", ticket)
	}
	if len(ticket.GetControlPlaneFiles()) != 0 {
		t.Error("a worker got a control plane's files (J6)")
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ticket.GetCaCertificate())
	for kind, tt := range map[string]struct {
		chain []byte
		key   any
		usage x509.ExtKeyUsage
	}{
		"client":  {ticket.GetKubeletClientCertificate(), w.client.Public(), x509.ExtKeyUsageClientAuth},
		"serving": {ticket.GetKubeletServingCertificate(), w.serving.Public(), x509.ExtKeyUsageServerAuth},
	} {
		c := leaf(t, tt.chain)
		if _, err := c.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{tt.usage}}); err != nil {
			t.Errorf("%s certificate: %v", kind, err)
		}
		if len(c.ExtKeyUsage) != 1 || c.Subject.CommonName != "system:node:w1" || !w.client.PublicKey.Equal(c.PublicKey) && !w.serving.PublicKey.Equal(c.PublicKey) {
			t.Errorf("%s certificate of %s for %v", kind, c.Subject, c.ExtKeyUsage)
		}
		if ticket.GetExpiresAt().AsTime().After(c.NotAfter) {
			t.Errorf("the ticket outlives its %s certificate", kind)
		}
	}

	n := s.Node(t, "w1")
	if n == nil {
		t.Fatal("not enrolled")
	}
	if n.Spec.MachineID != m.ID().String() || n.Spec.Role != v1alpha1.RoleWorker || n.Spec.DiskID != disk1 || n.Spec.DiskMode != v1alpha1.DiskModePlain || !slices.Equal(n.Spec.Addresses, []string{"192.168.77.12"}) {
		t.Errorf("enrollment %+v", n.Spec)
	}
	st := n.Status
	if st.LastVerdict == nil || !st.LastVerdict.Accepted || st.PolicyGeneration == 0 || st.PolicySerial != 1 || st.PCRs["4"] != hex.EncodeToString(m.PCRs()[4]) || st.Ticket == nil || st.Ticket.ID != hex.EncodeToString(ticket.GetTicketId()) || st.Ticket.CertificateID != nodeaccess.ID(leaf(t, ticket.GetKubeletClientCertificate())) {
		t.Errorf("status %+v", st)
	}
	if nodes := s.Access(t).Nodes(); len(nodes) > 0 { // a healthy cluster has none
		t.Errorf("nodes that may not write: %v", nodes)
	}

	id := hex.EncodeToString(ticket.GetTicketId())
	for _, event := range []string{"ticket decided", "ticket issued"} {
		if !s.recorded(t, func(r audit.Record) bool {
			return r.Event == event && r.Ticket == id && r.Reason == "ACCEPTED" && r.Machine == m.ID().String() && r.Node == "w1" && r.Disk == disk1 && r.PolicySerial == 1
		}) {
			t.Errorf("no record %q", event)
		}
	}
	if !s.join.Logged("msg", "ticket issued", "ticket", id) || s.join.Metric(t, "muster_join_tickets_total", "role", "worker", "reason", "ACCEPTED") != 1 {
		t.Error("the ticket is not in log and metrics")
	}
	if s.join.Metric(t, "muster_join_stage_seconds", "stage", "total") != 1 || s.join.Metric(t, "muster_insecure_config", "reason", "allowPlainState") != 1 {
		t.Error("stages or insecure switches are not in the metrics")
	}
	records := s.auditText(t)
	token, err := os.ReadFile(s.token)
	if err != nil {
		t.Fatal(err)
	}
	for where, text := range map[string]string{"log": s.join.Log.String(), "audit log": string(records)} {
		for _, secret := range [][]byte{ticket.GetDiskKey(), s.Root[:], bytes.TrimSpace(token)} {
			if strings.Contains(text, string(secret)) || strings.Contains(text, hex.EncodeToString(secret)) {
				t.Errorf("a secret is in the %s (K3)", where)
			}
		}
	}

	t.Run("with it the machine is its node, and no other", func(t *testing.T) {
		api := s.asNode(t, w, ticket)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
		membertest.Eventually(t, func() error { return api.Create(t.Context(), node) }) // when the admission policy has seen the list
		other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}
		if err := api.Create(t.Context(), other); !apierrors.IsForbidden(err) {
			t.Errorf("it could make another node: %v", err)
		}
		if err := api.List(t.Context(), &corev1.SecretList{}); !apierrors.IsForbidden(err) {
			t.Errorf("it could read secrets: %v", err)
		}
	})
}

func TestATicketTakesAtMostEightRequests(t *testing.T) {
	s := setUp(t)
	s.ticketFor(t, s.machine(t), worker(t)) // the first one also reads which APIs exist
	s.expiries(t, "w1")                     // the writes after a ticket are done
	m, w := s.machine(t), worker(t, named("w2", strings.Replace(disk1, "1", "2", 1), "192.168.77.13"))
	var before, after time.Time // of the attempt that succeeds
	membertest.Eventually(t, func() error {
		before = time.Now()
		_, err := s.dial(t, m.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		after = time.Now()
		return err
	})
	ofKMS := s.Requests(t, kmsAgent)
	if len(ofKMS) == 0 {
		t.Error("no request of kms is known")
	}
	var took []string
	for _, r := range append(s.Requests(t, "muster-joinservice/"), ofKMS...) {
		if r.Received.After(before) && r.Received.Before(after) && !byTime(r) {
			took = append(took, fmt.Sprintf("%s %s/%s %d", r.Verb, r.Object.Resource, r.Object.Subresource, r.Status.Code))
		}
	}
	// A read of the AttestedDisk is one of them: it checks that the disk still has its salt (K4).
	if len(took) == 0 || len(took) > 8 {
		t.Errorf("joinservice and kms made %d requests: %v", len(took), took)
	}
	t.Logf("%v", took)
}

// byTime reports whether a request is of a kind that comes at most once in a period, however many tickets there are.
func byTime(r kubetest.Request) bool {
	switch r.Verb + " " + r.Object.Resource {
	case "get configmaps":
		return r.Object.Name == waiting.ConfigMap // every five seconds
	case "create tokenreviews": // by kms, which accepts joinservice's token for ten seconds
		return true
	case "deletecollection certificatesigningrequests": // those of each minute, by one request
		return true
	}
	return r.Verb == "watch"
}

func TestTheSameMachineMayAskAgain(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	first := s.ticketFor(t, m, worker(t))
	uid := s.Node(t, "w1").UID
	second := s.ticketFor(t, m, worker(t))
	m.LockTo(s.ID) // and after it has taken the node lock
	third := s.ticketFor(t, m, worker(t))
	m.Reboot()
	fourth := s.ticketFor(t, m, worker(t))
	for _, again := range []*joinv1.IssueJoinTicketResponse{second, third, fourth} {
		if !bytes.Equal(again.GetDiskKey(), first.GetDiskKey()) || bytes.Equal(again.GetTicketId(), first.GetTicketId()) {
			t.Error("another disk key, or the same ticket")
		}
	}
	if n := s.Node(t, "w1"); n.UID != uid {
		t.Error("it was enrolled anew")
	}
}

func TestOfTwoWhoAskAtOnceOneGetsIt(t *testing.T) {
	s := setUp(t)
	for name, tt := range map[string]struct {
		second func(*requestOptions)
		reason attestv1.Reason
	}{
		"the same name":    {named("w1", "5f0c95b6-2a3d-4c7e-9f10-00000000000b", "192.168.77.22"), attestv1.Reason_REASON_NAME_TAKEN},
		"the same disk":    {named("x2", disk1, "192.168.77.22"), attestv1.Reason_REASON_DISK_MISMATCH},
		"the same address": {named("x2", "5f0c95b6-2a3d-4c7e-9f10-00000000000b", "192.168.77.12"), attestv1.Reason_REASON_ADDRESS_REFUSED},
	} {
		t.Run(name, func(t *testing.T) {
			for range 3 {
				s.forget(t, "w1", "x2")
				one, two := s.dial(t, s.machine(t).Attester(attest.PurposeMachine)), s.dial(t, s.machine(t).Attester(attest.PurposeMachine))
				first, second := worker(t), worker(t, tt.second)
				var wg sync.WaitGroup
				var errOne, errTwo error
				wg.Go(func() { _, errOne = one.IssueJoinTicket(t.Context(), first.IssueJoinTicketRequest) })
				wg.Go(func() { _, errTwo = two.IssueJoinTicket(t.Context(), second.IssueJoinTicketRequest) })
				wg.Wait()
				if errOne == nil && errTwo == nil {
					t.Fatal("both got a ticket")
				}
				for _, err := range []error{errOne, errTwo} {
					if err != nil && rpc.ReasonFrom(err) != tt.reason && !tooSlow(err) {
						t.Errorf("%v, want %s", err, attest.ReasonName(tt.reason))
					}
				}
			}
		})
	}
}

func TestAReturnedTicketLeavesNothingOfUse(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	client := s.dial(t, m.Attester(attest.PurposeMachine))
	ticket := s.ticketFor(t, m, worker(t))
	for name, tt := range map[string]struct {
		caller attest.Attester
		id     []byte
	}{
		"a ticket that was not issued": {m.Attester(attest.PurposeMachine), make([]byte, 16)},
		"an ID of another length":      {m.Attester(attest.PurposeMachine), ticket.GetTicketId()[:15]},
		"another machine's ticket":     {s.machine(t).Attester(attest.PurposeMachine), ticket.GetTicketId()},
	} {
		t.Run(name, func(t *testing.T) {
			client, about := s.dial(t, tt.caller), []string{"event", "return refused"}
			places := refusaltest.Places{Metric: []string{"muster_join_returns_total"}, Log: about, Audit: about}
			refusaltest.Refused(t, s.observations(t), attestv1.Reason_REASON_TICKET_UNKNOWN, places, func() error {
				_, err := client.ReturnJoinTicket(t.Context(), &joinv1.ReturnJoinTicketRequest{TicketId: tt.id})
				return err
			})
			if s.Node(t, "w1") == nil {
				t.Error("the enrollment is gone")
			}
		})
	}
	s.returned(t, m, ticket)
	if n := s.Node(t, "w1"); n.Status.ReleasedAt == nil || n.Status.Ticket != nil {
		t.Errorf("status %+v, want it released", n.Status)
	}
	if !s.Access(t).Entry("w1").Suspended {
		t.Error("it may still write")
	}
	if !s.recorded(t, func(r audit.Record) bool {
		return r.Event == "ticket returned" && r.Ticket == hex.EncodeToString(ticket.GetTicketId())
	}) {
		t.Error("no record")
	}
	// The machine may still have certificate and disk key: until they are useless, name and disk stay the machine's (J2,
	// J4).
	other := s.machine(t)
	s.refused(t, s.dial(t, other.Attester(attest.PurposeMachine)), other, worker(t), attestv1.Reason_REASON_NAME_TAKEN)
	s.refused(t, s.dial(t, other.Attester(attest.PurposeMachine)), other, worker(t, named("w2", disk1, "192.168.77.13")), attestv1.Reason_REASON_DISK_MISMATCH)
	s.refused(t, client, m, worker(t, named("w2", disk2, "192.168.77.13")), attestv1.Reason_REASON_NAME_MISMATCH)
	t.Run("the same machine may come back", func(t *testing.T) {
		again := s.ticketFor(t, m, worker(t))
		if n := s.Node(t, "w1"); n.Status.ReleasedAt != nil {
			t.Errorf("status %+v", n.Status)
		}
		s.returned(t, m, again)
	})
	t.Run("another machine may have the name once the certificate has expired", func(t *testing.T) {
		n, expired := s.Node(t, "w1"), time.Now().Add(-25*time.Hour)
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AskedAt, expired.UTC().Format(time.RFC3339))
		if err := s.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		n.Status.ReleasedAt = new(metav1.NewTime(expired))
		if err := s.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		// With its own disk: the other one stays the first machine's (J2).
		membertest.Eventually(t, func() error {
			_, err := s.dial(t, other.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_DISK_MISMATCH, "%v, want DISK_MISMATCH", err)
		})
		s.ticketFor(t, other, worker(t, named("w1", disk3, "192.168.77.12")))
		if n := s.Node(t, "w1"); n.Spec.MachineID != other.ID().String() || n.Status.ReleasedAt != nil {
			t.Errorf("enrollment %+v, status %+v", n.Spec, n.Status)
		}
	})
}

func TestATicketThatIsTooOldIsNotReturned(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	client := s.dial(t, m.Attester(attest.PurposeMachine))
	ticket := s.ticketFor(t, m, worker(t))
	give := func() error {
		_, err := client.ReturnJoinTicket(t.Context(), &joinv1.ReturnJoinTicketRequest{TicketId: ticket.GetTicketId()})
		return err
	}
	issued := func(at time.Time) {
		n := s.Node(t, "w1")
		n.Status.Ticket.IssuedAt = metav1.NewTime(at)
		if err := s.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	issued(time.Now().Add(-time.Hour))
	membertest.Eventually(t, func() error {
		err := give()
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_TICKET_UNKNOWN, "%v, want TICKET_UNKNOWN", err)
	})
	issued(time.Now())
	membertest.Eventually(t, give)
}

func TestAControlPlaneGetsItsFiles(t *testing.T) {
	s := setUp(t)
	cross := []byte("the cross certificate of a rotation")
	if err := os.WriteFile(filepath.Join(s.pki, "muster-cross.crt"), cross, 0o600); err != nil {
		t.Fatal(err)
	}
	m := s.controlMachine(t)
	s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane})
	w := worker(t, named("cp2", disk1, "192.168.77.12"), func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE })
	client := s.dial(t, m.Attester(attest.PurposeMachine))
	var ticket *joinv1.IssueJoinTicketResponse
	membertest.Eventually(t, func() (err error) {
		ticket, err = client.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		return err
	})
	var got []string
	for _, f := range ticket.GetControlPlaneFiles() {
		got = append(got, f.GetPath())
		if !bytes.Equal(f.GetContent(), s.pkiFile(f.GetPath())) {
			t.Errorf("%s holds something else", f.GetPath())
		}
	}
	if !slices.Equal(got, slices.Sorted(slices.Values(pkiFiles))) {
		t.Errorf("files %v", got)
	}
	if !bytes.Equal(ticket.GetCrossCertificate(), cross) { // it has no key to sign one
		t.Errorf("cross certificate %q", ticket.GetCrossCertificate())
	}
	if n := s.Node(t, "cp2"); n.Spec.DiskID != disk1 || n.Annotations[v1alpha1.EnrolledByTicket] != "" {
		t.Errorf("enrollment %+v, ticket %+v", n.Spec, n.Status.Ticket)
	}
	t.Run("a returned ticket leaves the owner's enrollment", func(t *testing.T) {
		s.returned(t, m, ticket)
		if s.Node(t, "cp2") == nil {
			t.Error("it is gone")
		}
	})
}
