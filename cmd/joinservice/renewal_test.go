package main

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// filed is a request that a kubelet files itself.
type filed struct {
	user     string
	signer   string
	usages   []certificatesv1.KeyUsage
	template *x509.CertificateRequest
}

func renewal(node string) *filed {
	return &filed{
		user: "system:node:" + node, signer: certificatesv1.KubeAPIServerClientKubeletSignerName,
		usages:   []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		template: &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}},
	}
}

func serving(node string, addresses ...string) *filed {
	f := renewal(node)
	f.signer, f.usages[1] = certificatesv1.KubeletServingSignerName, certificatesv1.UsageServerAuth
	f.template.DNSNames = []string{node}
	for _, a := range addresses {
		f.template.IPAddresses = append(f.template.IPAddresses, net.ParseIP(a).To4())
	}
	return f
}

// file creates the request as its node and returns its name.
func (s *fixture) file(t *testing.T, f *filed) string {
	t.Helper()
	cfg, err := s.AsUser(f.user, "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	api, err := client.New(cfg, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	o := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr(t, f.template, newKey(t))}),
			SignerName: f.signer, Usages: f.usages,
		},
	}
	membertest.Eventually(t, func() error { return api.Create(t.Context(), o) }) // when the admission policy knows the node
	return o.Name
}

func (s *fixture) decided(t *testing.T, name string, want certificatesv1.RequestConditionType, reason string) {
	t.Helper()
	membertest.Eventually(t, func() error {
		o := &certificatesv1.CertificateSigningRequest{}
		if err := s.Client.Get(t.Context(), client.ObjectKey{Name: name}, o); apierrors.IsNotFound(err) && want == certificatesv1.CertificateDenied {
			// A minute after its denial it is deleted.
			return membertest.Want(s.recorded(t, func(r audit.Record) bool {
				return r.Event == "certificate denied" && r.Request == name && r.Reason == reason
			}), "%s is gone, and joinservice has not recorded its denial for %s", name, reason)
		} else if err != nil {
			return err
		}
		if want == certificatesv1.CertificateApproved && len(o.Status.Certificate) == 0 {
			return errors.New("not signed")
		}
		for _, c := range o.Status.Conditions {
			if c.Type == want && c.Reason == reason {
				return nil
			}
		}
		return membertest.Want(false, "conditions %+v, want %s %s", o.Status.Conditions, want, reason)
	})
}

func TestKubeletsRequestsAreApprovedOnlyIfTheyFitTheEnrollment(t *testing.T) {
	s := setUp(t)
	s.ticketFor(t, s.machine(t), worker(t))
	for name, f := range map[string]*filed{
		"a client certificate":  renewal("w1"),
		"a serving certificate": serving("w1", "192.168.77.12"),
	} {
		t.Run(name+" is renewed", func(t *testing.T) {
			request := s.file(t, f)
			s.decided(t, request, certificatesv1.CertificateApproved, "AttestedMachine")
			if !s.recorded(t, func(r audit.Record) bool {
				return r.Event == "certificate approved" && r.Request == request && r.Node == "w1"
			}) {
				t.Error("no audit record")
			}
		})
	}
	bothAddresses, foreignName, usages, noAddress := serving("w1", "192.168.77.12", "192.168.77.99"), serving("w1", "192.168.77.12"), renewal("w1"), serving("w1")
	foreignName.template.DNSNames = []string{"w1", "kubernetes"}
	usages.usages = append(usages.usages, certificatesv1.UsageCertSign)
	for name, tt := range map[string]struct {
		f      *filed
		reason attestv1.Reason
	}{
		"an address beside the enrolled ones": {bothAddresses, attestv1.Reason_REASON_ADDRESS_REFUSED},
		"another node's address":              {serving("w1", "192.168.77.11"), attestv1.Reason_REASON_ADDRESS_REFUSED},
		"a further DNS name":                  {foreignName, attestv1.Reason_REASON_CSR_INVALID},
		"a further usage":                     {usages, attestv1.Reason_REASON_CSR_INVALID},
		"no address":                          {noAddress, attestv1.Reason_REASON_CSR_INVALID},
	} {
		t.Run(name+" is denied", func(t *testing.T) {
			places := refusaltest.Places{Metric: []string{"muster_node_certificate_requests_total"}, Log: []string{"event", "certificate denied", "node", "w1"}, Audit: []string{"event", "certificate denied", "node", "w1"}}
			refusaltest.Reported(t, s.observations(t), tt.reason, places, func() {
				s.decided(t, s.file(t, tt.f), certificatesv1.CertificateDenied, attest.ReasonName(tt.reason))
			})
		})
	}
}

// waits waits until joinservice has checked the request and left it open for that reason.
func (s *fixture) waits(t *testing.T, request, reason string) {
	t.Helper()
	membertest.Eventually(t, func() error {
		return membertest.Want(s.join.Logged("msg", "a kubelet's certificate request waits", "request", request, "reason", reason), "request %s does not wait for %s", request, reason)
	})
	o := &certificatesv1.CertificateSigningRequest{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Name: request}, o); err != nil {
		t.Fatal(err)
	}
	if len(o.Status.Conditions) > 0 {
		t.Errorf("request %s is decided: %+v", request, o.Status.Conditions)
	}
}

// emitted waits for an Event of the node's enrollment with that reason.
func (s *fixture) emitted(t *testing.T, node, what, reason string) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n, l := s.Node(t, node), &corev1.EventList{}
		if err := s.Client.List(t.Context(), l, client.InNamespace(metav1.NamespaceDefault)); err != nil {
			return err
		}
		for _, e := range l.Items {
			if e.InvolvedObject.UID == n.UID && e.Reason == what && strings.Contains(e.Message, reason) {
				return nil
			}
		}
		return membertest.Want(false, "no event %s of %s says %s", what, node, reason)
	})
}

// reattest attests as a node does: locked to its cluster, on a separate connection.
func (s *fixture) reattest(t *testing.T, m *attesttest.Machine) (*joinv1.ReattestResponse, error) {
	t.Helper()
	return s.dial(t, m.Attester(attest.PurposeMachine)).Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: oneSecret})
}

// reattested is [fixture.reattest] of a machine that should be accepted; a refusal because of a slow machine is repeated.
func (s *fixture) reattested(t *testing.T, m *attesttest.Machine) (resp *joinv1.ReattestResponse, err error) {
	t.Helper()
	err = patiently(t, func() (err error) { resp, err = s.reattest(t, m); return err })
	return resp, err
}

// node returns a machine that has become node w1.
func (s *fixture) node(t *testing.T) *attesttest.Machine {
	t.Helper()
	m := s.machine(t)
	s.ticketFor(t, m, worker(t))
	m.LockTo(s.ID)
	return m
}

func (s *fixture) setStatus(t *testing.T, node string, change func(*v1alpha1.AttestedNodeStatus)) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := s.Node(t, node)
		change(&n.Status)
		return s.Client.Status().Update(t.Context(), n)
	})
}

// J7: an attacker who has stolen a node's key, but not its machine, renews nothing when the verdict is old.
func TestAKeyWithoutItsMachineRenewsNothing(t *testing.T) {
	for name, age := range map[string]func(*v1alpha1.AttestedNodeStatus){
		"an old verdict":            func(st *v1alpha1.AttestedNodeStatus) { st.LastVerdict.Time.Time = time.Now().Add(-16 * time.Minute) },
		"one from the future":       func(st *v1alpha1.AttestedNodeStatus) { st.LastVerdict.Time.Time = time.Now().Add(time.Hour) },
		"the owner's program's one": func(st *v1alpha1.AttestedNodeStatus) { st.PolicyGeneration = 0 },
		"none":                      func(st *v1alpha1.AttestedNodeStatus) { *st = v1alpha1.AttestedNodeStatus{Ticket: st.Ticket} },
	} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t)
			m := s.node(t)
			s.setStatus(t, "w1", age)
			var client, server string
			// A request that waits is not decided, so there is no audit record.
			places := refusaltest.Places{Metric: []string{"muster_node_certificate_requests_total"}, Log: []string{"msg", "a kubelet's certificate request waits"}}
			refusaltest.Reported(t, s.observations(t), attestv1.Reason_REASON_VERDICT_OLD, places, func() {
				client, server = s.file(t, renewal("w1")), s.file(t, serving("w1", "192.168.77.12"))
				s.waits(t, client, "VERDICT_OLD")
				s.waits(t, server, "VERDICT_OLD")
			})
			s.emitted(t, "w1", "RenewalWaits", "VERDICT_OLD")
			if n := s.join.Metric(t, "muster_node_certificate_requests_total", "reason", "VERDICT_OLD"); n != 2 {
				t.Errorf("the metric is %v, want 2", n)
			}
			resp, err := s.reattested(t, m)
			if err != nil {
				t.Fatal(err)
			}
			if got := resp.GetInterval().AsDuration(); got != 5*time.Minute || resp.GetPolicySerial() != 1 {
				t.Errorf("come again in %s, serial %d", got, resp.GetPolicySerial())
			}
			s.decided(t, client, certificatesv1.CertificateApproved, "AttestedMachine")
			s.decided(t, server, certificatesv1.CertificateApproved, "AttestedMachine")
			digest := s.Node(t, "w1").Status.EvidenceDigest
			if !s.recorded(t, func(r audit.Record) bool {
				return r.Event == "certificate approved" && r.Request == client && r.Machine == m.ID().String() && r.Evidence == digest
			}) {
				t.Error("no audit record that names the evidence")
			}
		})
	}
}

// The first machine's kubelet files its requests before there is an enrollment. Its owner's verdict is not sufficient: it
// attests to the cluster like every other node.
func TestTheFirstMachinesRequestsWaitUntilItAttests(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	m.LockTo(s.ID)
	request := s.file(t, serving("first", "192.168.77.40"))
	s.waits(t, request, "NOT_ENROLLED")
	s.Enroll(t, "first", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane, Addresses: []string{"192.168.77.40"}})
	s.waits(t, request, "VERDICT_OLD")
	membertest.Eventually(t, func() error { _, err := s.reattest(t, m); return err })
	s.decided(t, request, certificatesv1.CertificateApproved, "AttestedMachine")
}

func TestReattestationRecordsWhatTheMachineIsNow(t *testing.T) {
	s := setUp(t)
	m := s.node(t)
	was := s.Node(t, "w1").Status
	m.SetCounters(9, 0, time.Hour)
	generation := s.policy(t, func(p *attestv1.Policy) { p.Serial = 7 })
	s.inForce(t, generation)
	resp, err := s.reattested(t, m)
	if err != nil || resp.GetPolicySerial() != 7 {
		t.Fatalf("%v, %v", resp, err)
	}
	st := s.Node(t, "w1").Status
	if !st.LastVerdict.Accepted || st.PolicyGeneration != generation || st.PolicySerial != 7 || st.EvidenceDigest == was.EvidenceDigest || *st.ResetCount != 9 || st.PCRs["15"] == was.PCRs["15"] {
		t.Errorf("status %+v", st)
	}
	// With it `muster verify NODE` challenges the machine: by the ticket's evidence, and by each later one.
	for _, st := range []v1alpha1.AttestedNodeStatus{was, st} {
		ek, err := base64.StdEncoding.DecodeString(st.EKPublic)
		if err != nil || attest.MachineIDOf(ek) != m.ID() || st.AKName == "" {
			t.Errorf("the endorsement key is recorded as %q: %v", st.EKPublic, err)
		}
	}
	if st.Ticket == nil || *st.Ticket != *was.Ticket {
		t.Errorf("its ticket changed from %+v to %+v", was.Ticket, st.Ticket)
	}
}

func TestReattestationIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil  func(t *testing.T, s *fixture, m *attesttest.Machine)
		reason attestv1.Reason
		// asked is whether the request reached the RPC; others are refused in the exchange.
		asked bool
		// verdict is the reason of the resulting verdict; empty for the good one.
		verdict string
	}{
		"of a machine that booted something else": {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.SetPCR(12, make32(9)) }, attestv1.Reason_REASON_POLICY_REFUSED, false, "POLICY_REFUSED"},
		"of a machine of another cluster": {func(_ *testing.T, _ *fixture, m *attesttest.Machine) {
			m.Reboot()
			m.LockTo([32]byte{1})
		}, attestv1.Reason_REASON_LOCK_FOREIGN, false, "LOCK_FOREIGN"},
		"of a machine that is not locked": {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.Reboot() }, attestv1.Reason_REASON_LOCK_FOREIGN, true, ""},
		"of a machine whose memory was put back": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.Clock += time.Hour.Milliseconds() })
		}, attestv1.Reason_REASON_CLOCK_WENT_BACK, true, "CLOCK_WENT_BACK"},
		"of a machine that a copy has outrun": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.ResetCount += 1000 })
		}, attestv1.Reason_REASON_MACHINE_CLONED, true, ""},
		"of a banned machine": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			n := s.Node(t, "w1")
			n.Spec.Banned = true
			if err := s.Client.Update(t.Context(), n); err != nil {
				t.Error(err)
			}
		}, attestv1.Reason_REASON_BANNED, false, ""},
		"of a machine that was forgotten": {func(t *testing.T, s *fixture, _ *attesttest.Machine) { s.forget(t, "w1") }, attestv1.Reason_REASON_NOT_ENROLLED, true, "-"},
	} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t)
			m := s.node(t)
			if _, err := s.reattested(t, m); err != nil {
				t.Fatal(err)
			}
			tt.spoil(t, s, m)
			ask := func() error {
				_, err := s.reattest(t, m)
				return err
			}
			places, refused := refusaltest.Connection(), inExchange(tt.reason, ask)
			if tt.asked {
				about := []string{"event", "verdict refused", "machine", m.ID().String()}
				places, refused = refusaltest.Places{Metric: []string{"muster_rpc_requests_total"}, Log: about, Audit: about}, ask
			}
			refusaltest.Until(t, s.observations(t), tt.reason, places, refused) // the informers follow
			_ = refusaltest.Refused(t, s.observations(t), tt.reason, places, ask)
			if tt.verdict == "-" {
				return
			}
			membertest.Eventually(t, func() error {
				v := s.Node(t, "w1").Status.LastVerdict
				return membertest.Want(v != nil && v.Accepted == (tt.verdict == "") && (v.Accepted && v.Message == "" || v.Reason == tt.verdict && strings.HasPrefix(v.Message, tt.verdict+": ")), "last verdict %+v", v)
			})
			if tt.verdict != "" {
				s.decided(t, s.file(t, renewal("w1")), certificatesv1.CertificateDenied, "POLICY_REFUSED")
				s.emitted(t, "w1", "RenewalDenied", "POLICY_REFUSED")
			}
		})
	}
}
