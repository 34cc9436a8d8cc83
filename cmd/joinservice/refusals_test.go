package main

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

const (
	disk2 = "5f0c95b6-2a3d-4c7e-9f10-000000000002"
	disk3 = "5f0c95b6-2a3d-4c7e-9f10-000000000003"
)

// Each refusal has its one reason in error detail, metric, log and audit record (R1) and leaves neither enrollment nor
// certificate request; the same machine gets its ticket when only the offending input is repaired (J2, J4, J6).
func TestRefusedRequests(t *testing.T) {
	s := setUp(t)
	ctx := t.Context()
	// Other objects exist: another worker, a Node that Muster did not create, a Service.
	neighbour := s.machine(t)
	s.ticketFor(t, neighbour, worker(t, named("w2", disk2, "192.168.77.20")))
	foreign := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "legacy"}}
	if err := s.Client.Create(ctx, foreign); err != nil {
		t.Fatal(err)
	}
	foreign.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.77.30"}}
	if err := s.Client.Status().Update(ctx, foreign); err != nil {
		t.Fatal(err)
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "x"}, Spec: corev1.ServiceSpec{ClusterIP: "10.96.77.77", Ports: []corev1.ServicePort{{Port: 80}}}}
	if err := s.Client.Create(ctx, service); err != nil {
		t.Fatal(err)
	}

	for name, tt := range map[string]struct {
		change func(*requestOptions)
		// enrolled is the enrollment that the owner made beforehand, as w1.
		enrolled *v1alpha1.AttestedNodeSpec
		// repair reverts the change where the plain request of a worker would not be valid.
		repair func(*requestOptions)
		reason attestv1.Reason
	}{
		"a name that belongs to another machine":       {change: named("w2", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NAME_TAKEN},
		"the name of the control plane":                {change: named("cp1", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NAME_TAKEN},
		"a name of the API server":                     {change: named("kubernetes", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NAME_TAKEN},
		"another name of the API server":               {change: named("localhost", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NAME_TAKEN},
		"a name that the owner gave to the API server": {change: named("api", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NAME_TAKEN},
		"an address of the API server":                 {change: named("w1", disk1, "192.168.77.200"), reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"another name than it is enrolled under": {
			enrolled: &v1alpha1.AttestedNodeSpec{Role: v1alpha1.RoleWorker}, change: named("w9", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NAME_MISMATCH,
		},
		"a name for which there is a Node":   {change: named("legacy", disk1, "192.168.77.12"), reason: attestv1.Reason_REASON_NODE_EXISTS},
		"a control plane without enrollment": {change: func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE }, reason: attestv1.Reason_REASON_NOT_ENROLLED},
		"an enrolled worker that asks to be a control plane": {
			enrolled: &v1alpha1.AttestedNodeSpec{Role: v1alpha1.RoleWorker}, change: func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE }, reason: attestv1.Reason_REASON_ROLE_REFUSED,
		},
		"an enrolled control plane that asks to be a worker": {
			enrolled: &v1alpha1.AttestedNodeSpec{Role: v1alpha1.RoleControlPlane}, change: func(*requestOptions) {}, repair: func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE }, reason: attestv1.Reason_REASON_ROLE_REFUSED,
		},
		"another machine's disk": {change: func(w *requestOptions) { w.disk = disk2 }, reason: attestv1.Reason_REASON_DISK_MISMATCH},
		"another disk than it is enrolled with": {
			enrolled: &v1alpha1.AttestedNodeSpec{Role: v1alpha1.RoleWorker, DiskID: disk1}, change: func(w *requestOptions) { w.disk = disk3 }, reason: attestv1.Reason_REASON_DISK_MISMATCH,
		},
		"a disk that is no longer encrypted": {
			enrolled: &v1alpha1.AttestedNodeSpec{Role: v1alpha1.RoleWorker, DiskID: disk1, DiskMode: v1alpha1.DiskModeLUKS}, change: func(*requestOptions) {}, repair: func(w *requestOptions) { w.mode = joinv1.DiskMode_DISK_MODE_LUKS }, reason: attestv1.Reason_REASON_DISK_MISMATCH,
		},
		"an address outside the policy's CIDRs":     {change: func(w *requestOptions) { w.addresses = []string{"203.0.113.1"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"a second address outside them":             {change: func(w *requestOptions) { w.addresses = append(w.addresses, "2001:db8::1") }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"the address of another enrolled node":      {change: func(w *requestOptions) { w.addresses = []string{"192.168.77.20"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"the address of the control plane":          {change: func(w *requestOptions) { w.addresses = []string{"192.168.77.11"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"the address of a Node Muster did not make": {change: func(w *requestOptions) { w.addresses = []string{"192.168.77.30"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"the address of a Service":                  {change: func(w *requestOptions) { w.addresses = []string{"10.96.77.77"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"the address of the Kubernetes Service":     {change: func(w *requestOptions) { w.addresses = []string{"10.96.0.1"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},
		"the address of the control-plane endpoint": {change: func(w *requestOptions) { w.addresses = []string{"192.168.77.1"} }, reason: attestv1.Reason_REASON_ADDRESS_REFUSED},

		"a client request for another node": {change: func(w *requestOptions) {
			w.template = func(c, _ *x509.CertificateRequest) { c.Subject.CommonName = "system:node:w2" }
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"a serving request for another node": {change: func(w *requestOptions) {
			w.template = func(_, s *x509.CertificateRequest) {
				s.Subject.CommonName, s.DNSNames = "system:node:w2", []string{"w2"}
			}
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"a second organisation": {change: func(w *requestOptions) {
			w.template = func(c, _ *x509.CertificateRequest) {
				c.Subject.Organization = []string{"system:nodes", "system:masters"}
			}
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"a further name in the SAN": {change: func(w *requestOptions) {
			w.template = func(_, s *x509.CertificateRequest) { s.DNSNames = append(s.DNSNames, "kubernetes.default.svc") }
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"a CA flag": {change: func(w *requestOptions) {
			w.template = func(_, s *x509.CertificateRequest) {
				s.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 0x03, 0x01, 0x01, 0xff}}}
			}
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"a SAN in the client request": {change: func(w *requestOptions) {
			w.template = func(c, _ *x509.CertificateRequest) { c.IPAddresses = []net.IP{net.IPv4(192, 168, 77, 12).To4()} }
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"a request with the signature of another key": {change: func(w *requestOptions) {
			w.request = func(r *joinv1.IssueJoinTicketRequest) { r.KubeletClientCsr[len(r.GetKubeletClientCsr())-1] ^= 1 }
		}, reason: attestv1.Reason_REASON_CSR_INVALID},
		"no serving request": {change: func(w *requestOptions) {
			w.request = func(r *joinv1.IssueJoinTicketRequest) { r.KubeletServingCsr = nil }
		}, reason: attestv1.Reason_REASON_CSR_INVALID},

		"no name":            {change: func(w *requestOptions) { w.request = func(r *joinv1.IssueJoinTicketRequest) { r.NodeName = "" } }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"a name with a path": {change: func(w *requestOptions) { w.request = func(r *joinv1.IssueJoinTicketRequest) { r.NodeName = "../w1" } }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"no role":            {change: func(w *requestOptions) { w.role = 0 }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"an unknown role":    {change: func(w *requestOptions) { w.role = 77 }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"no disk mode":       {change: func(w *requestOptions) { w.mode = 0 }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"no disk":            {change: func(w *requestOptions) { w.disk = "" }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"a disk in braces":   {change: func(w *requestOptions) { w.disk = "{" + disk1 + "}" }, reason: attestv1.Reason_REASON_REQUEST_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			s.forget(t, "w1")
			m := s.machine(t)
			if tt.enrolled != nil && tt.enrolled.Role == v1alpha1.RoleControlPlane {
				m = s.controlMachine(t)
			}
			if tt.enrolled != nil {
				tt.enrolled.MachineID = m.ID().String()
				s.Enroll(t, "w1", *tt.enrolled)
			}
			client := s.dial(t, m.Attester(attest.PurposeMachine))
			if tt.enrolled != nil { // until joinservice has seen the enrollment
				s.seen(t, client, m)
			}
			before := s.CSRs(t)
			s.refused(t, client, m, worker(t, tt.change), tt.reason)
			if tt.enrolled == nil {
				s.nothingOf(t, m)
			}
			s.filedNothing(t, before)
			var repair []func(*requestOptions)
			if tt.repair != nil {
				repair = append(repair, tt.repair)
			}
			s.ticketFor(t, m, worker(t, repair...)) // repaired
		})
	}
}

// seen waits until joinservice knows the machine's enrollment, by a request that must be refused.
func (s *fixture) seen(t *testing.T, client joinv1connect.JoinServiceClient, m *attesttest.Machine) {
	t.Helper()
	_ = m
	ask := worker(t, named("probe", disk3, "192.168.77.99"))
	membertest.Eventually(t, func() error {
		_, err := client.IssueJoinTicket(t.Context(), ask.IssueJoinTicketRequest)
		if err == nil {
			s.forget(t, "probe")
		}
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_NAME_MISMATCH, "%v, want NAME_MISMATCH", err)
	})
}

// refused asks, and compares error detail, metric, log and audit record.
func (s *fixture) refused(t *testing.T, client joinv1connect.JoinServiceClient, m *attesttest.Machine, w *joinRequest, want attestv1.Reason) {
	t.Helper()
	about := []string{"event", "ticket refused", "machine", m.ID().String()}
	places := refusaltest.Places{Metric: []string{"muster_join_tickets_total"}, Log: about, Audit: about}
	if s.audit == full {
		places.Audit = nil
	}
	refusaltest.Refused(t, s.observations(t), want, places, func() error {
		_, err := client.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		return err
	})
}

func TestWhatThePolicyForbids(t *testing.T) {
	s := setUp(t)
	serial := uint64(1)
	next := func(p *attestv1.Policy) { // every change has a new serial
		serial++
		p.Serial = serial
	}
	for name, tt := range map[string]struct {
		policy func(*attestv1.Policy)
		reason attestv1.Reason
	}{
		"plain state":   {func(p *attestv1.Policy) { p.Insecure = nil }, attestv1.Reason_REASON_PLAIN_STATE_REFUSED},
		"workers":       {func(p *attestv1.Policy) { p.Roles = []string{"control-plane"} }, attestv1.Reason_REASON_ROLE_REFUSED},
		"all roles":     {func(p *attestv1.Policy) { p.Roles = nil }, attestv1.Reason_REASON_ROLE_REFUSED},
		"every address": {func(p *attestv1.Policy) { p.NodeCidrs = nil }, attestv1.Reason_REASON_ADDRESS_REFUSED},
	} {
		t.Run(name, func(t *testing.T) {
			s.forget(t, "w1")
			m := s.machine(t)
			s.inForce(t, s.policy(t, tt.policy, next))
			s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t), tt.reason)
			s.nothingOf(t, m)
			s.inForce(t, s.policy(t, next))
			s.ticketFor(t, m, worker(t))
		})
	}
}

// inForce waits until that generation of the policy is in force.
func (s *fixture) inForce(t *testing.T, generation int64) {
	t.Helper()
	membertest.Eventually(t, func() error {
		got := s.join.Metric(t, "muster_policy_generation")
		return membertest.Want(int64(got) == generation, "generation %v is in force, want %d", got, generation)
	})
}

func make32(b byte) []byte {
	out := make([]byte, 32)
	out[0] = b
	return out
}

func TestATPMThatWasClearedNeedsTheOwner(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	m.SetCounters(7, 0, 0)
	s.ticketFor(t, m, worker(t))
	m.SetCounters(1, 0, 0)
	s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t), attestv1.Reason_REASON_MACHINE_CLONED)
	m.SetCounters(8, 0, 0)
	s.ticketFor(t, m, worker(t))
}

func TestFaultsOfOursLeaveNothing(t *testing.T) {
	s := setUp(t)
	t.Run("a sealed root", func(t *testing.T) {
		m := s.machine(t)
		path := filepath.Join(s.rootDir, "root")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		client := s.dial(t, m.Attester(attest.PurposeMachine))
		s.refused(t, client, m, worker(t), attestv1.Reason_REASON_ROOT_SEALED)
		_, err := client.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
		if rpc.RetryAfterFrom(err) == 0 {
			t.Errorf("%v has no hint when to try again", err)
		}
		s.nothingOf(t, m)
		if err := os.WriteFile(path, s.Root[:], 0o600); err != nil {
			t.Fatal(err)
		}
		s.ticketFor(t, m, worker(t))
		s.forget(t, "w1")
	})
	t.Run("a token that the key service does not accept", func(t *testing.T) {
		m := s.machine(t)
		good, err := os.ReadFile(s.token)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.token, []byte("expired"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t), attestv1.Reason_REASON_KMS_UNAVAILABLE)
		s.nothingOf(t, m)
		// The kubelet replaces the token: no restart is needed.
		if err := os.WriteFile(s.token, good, 0o600); err != nil {
			t.Fatal(err)
		}
		s.ticketFor(t, m, worker(t))
		s.forget(t, "w1")
	})
	t.Run("a control plane's file that is missing", func(t *testing.T) {
		m := s.controlMachine(t)
		s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane})
		client := s.dial(t, m.Attester(attest.PurposeMachine))
		s.seen(t, client, m)
		path := filepath.Join(s.pki, "etcd", "ca.key")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		w := worker(t, named("cp2", disk2, "192.168.77.13"), func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE })
		s.refused(t, client, m, w, attestv1.Reason_REASON_INTERNAL)
		if n := s.Node(t, "cp2"); n.Spec.DiskID != "" || s.Access(t).Entry("cp2").ControlPlane {
			t.Errorf("enrollment %+v, and it is listed as a control plane: %t", n.Spec, s.Access(t).Entry("cp2").ControlPlane)
		}
		if err := os.WriteFile(path, []byte("content of etcd/ca.key"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.ticketFor(t, m, w)
		s.forget(t, "cp2")
	})
	t.Run("a description that the root secret does not lead to", func(t *testing.T) {
		m := s.machine(t)
		asker := s.dial(t, m.Attester(attest.PurposeMachine))
		s.SetMeasurementSalt(t, [32]byte{9})
		membertest.Eventually(t, func() error { // the informers follow
			_, err := asker.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
			if err == nil {
				s.forget(t, "w1")
			}
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_INTERNAL, "%v, want INTERNAL", err)
		})
		s.refused(t, asker, m, worker(t), attestv1.Reason_REASON_INTERNAL)
		s.nothingOf(t, m)
		s.SetMeasurementSalt(t, s.MeasurementSalt)
		membertest.Eventually(t, func() error {
			_, err := asker.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
			return err
		})
		s.forget(t, "w1")
	})
	t.Run("who may write cannot be written", func(t *testing.T) {
		m := s.machine(t)
		s.revoke(t, "w1") // a ticket under another name does not write it
		role := &rbacv1.Role{}
		if err := s.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "muster:joinservice"}, role); err != nil {
			t.Fatal(err)
		}
		rules := role.Rules
		setRules := func(r []rbacv1.PolicyRule) {
			role.Rules = r
			if err := s.Client.Update(t.Context(), role); err != nil {
				t.Fatal(err)
			}
		}
		setRules([]rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "list", "watch"}}})
		asker := s.dial(t, m.Attester(attest.PurposeMachine))
		membertest.Eventually(t, func() error { // the API server's authorizer has a cache of its own
			_, err := asker.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
			if err == nil {
				s.forget(t, "w1")
			}
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_API_UNAVAILABLE, "%v, want API_UNAVAILABLE", err)
		})
		s.refused(t, asker, m, worker(t), attestv1.Reason_REASON_API_UNAVAILABLE)
		if n := s.Node(t, "w1"); n == nil || n.Spec.MachineID != m.ID().String() {
			t.Errorf("the name is not held for its machine: %+v", n)
		}
		setRules(rules)
		membertest.Eventually(t, func() error {
			_, err := asker.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
			return err
		})
	})
}

// full is a device of the kernel that is always full.
const full = "/dev/full"

// J3, also for a crash in between: without its record there is no ticket, and no part of it.
func TestWithoutAnAuditRecordNothingIsIssued(t *testing.T) {
	s := setUp(t, auditAt(full))
	m := s.machine(t)
	s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t), attestv1.Reason_REASON_AUDIT_UNAVAILABLE)
	s.nothingOf(t, m)
	if left := s.CSRs(t); len(left) > 0 {
		t.Errorf("certificate requests %v", left)
	}
}
