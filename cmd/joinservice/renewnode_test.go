package main

import (
	"bytes"
	"crypto/x509"
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// renewing is the request of a machine that was off for long, with the keys that stay on it.
type renewing struct {
	*joinv1.RenewNodeCertificatesRequest
	joinRequest *joinRequest
}

func renewingAs(t *testing.T, changes ...func(*requestOptions)) *renewing {
	t.Helper()
	w := worker(t, changes...)
	return &renewing{&joinv1.RenewNodeCertificatesRequest{KubeletClientCsr: w.GetKubeletClientCsr(), KubeletServingCsr: w.GetKubeletServingCsr(), BootSecret: w.GetBootSecret()}, w}
}

// renewNode asks over a separate connection.
func (s *fixture) renewNode(t *testing.T, m *attesttest.Machine, r *renewing) (*joinv1.RenewNodeCertificatesResponse, error) {
	t.Helper()
	return s.dial(t, m.Attester(attest.PurposeMachine)).RenewNodeCertificates(t.Context(), r.RenewNodeCertificatesRequest)
}

// renewedNode is [fixture.renewNode] of a machine that should get its certificates; a refusal because of a slow machine is
// repeated.
func (s *fixture) renewedNode(t *testing.T, m *attesttest.Machine, r *renewing) (resp *joinv1.RenewNodeCertificatesResponse, err error) {
	t.Helper()
	err = patiently(t, func() (err error) { resp, err = s.renewNode(t, m, r); return err })
	return resp, err
}

// notRenewed asks, and compares error detail, metric, log and audit record.
func (s *fixture) notRenewed(t *testing.T, m *attesttest.Machine, r *renewing, want attestv1.Reason) {
	t.Helper()
	about := []string{"event", "renewal refused", "machine", m.ID().String()}
	_ = refusaltest.Refused(t, s.observations(t), want, refusaltest.Places{Metric: []string{"muster_rpc_requests_total"}, Log: about, Audit: about}, func() error {
		_, err := s.renewNode(t, m, r)
		return err
	})
}

// booted returns w1's machine after a reboot, when its bootstrapper has locked it again.
func (s *fixture) booted(t *testing.T) *attesttest.Machine {
	t.Helper()
	m := s.node(t)
	m.Reboot()
	m.LockTo(s.ID)
	return m
}

// The machine has no credentials that the API server would accept; it gets new ones only by its evidence.
func TestAMachineWhoseCertificatesEndedGetsNewOnes(t *testing.T) {
	s := setUp(t, recordsSoon)
	m := s.booted(t)
	s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.LastVerdict.Time.Time = time.Now().Add(-100 * time.Hour) })
	// Control planes may differ then: whichever authority has signed, the machine gets it with the certificates.
	s.rotatesAuthority(t, clusterinfo.RotationAccept)
	membertest.Eventually(t, func() error { // joinservice has seen that
		resp, err := s.dial(t, m.Attester(attest.PurposeMachine)).Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: oneSecret})
		return errors.Join(err, membertest.Want(len(resp.GetCaCertificate()) == 0, "it sends authorities"))
	})
	r, before := renewingAs(t), time.Now()
	resp, err := s.renewedNode(t, m, r)
	if err != nil {
		t.Fatal(err)
	}
	after := time.Now()
	if got := resp.GetCaCertificate(); !bytes.Equal(got, s.CA()) {
		t.Errorf("it sends the authorities %s", got)
	}
	cert, serving := leaf(t, resp.GetKubeletClientCertificate()), leaf(t, resp.GetKubeletServingCertificate())
	for c, use := range map[*x509.Certificate]x509.ExtKeyUsage{cert: x509.ExtKeyUsageClientAuth, serving: x509.ExtKeyUsageServerAuth} {
		if c.NotAfter.After(after.Add(24*time.Hour)) || c.NotAfter.Before(before.Add(23*time.Hour)) || !slices.Equal(c.ExtKeyUsage, []x509.ExtKeyUsage{use}) || c.Subject.CommonName != "system:node:w1" {
			t.Errorf("%s for %v, until %s", c.Subject, c.ExtKeyUsage, c.NotAfter)
		}
	}
	if !r.joinRequest.client.PublicKey.Equal(cert.PublicKey) || !r.joinRequest.serving.PublicKey.Equal(serving.PublicKey) {
		t.Error("they are for other keys")
	}
	for _, event := range []string{"renewal decided", "certificates renewed"} { // J3
		if !s.recorded(t, func(rec audit.Record) bool {
			issued := event == "renewal decided" || slices.Equal(rec.Serials, []string{cert.SerialNumber.Text(16), serving.SerialNumber.Text(16)})
			return rec.Event == event && rec.Machine == m.ID().String() && rec.Node == "w1" && rec.Evidence != "" && rec.PolicySerial == 1 && issued
		}) {
			t.Errorf("no record %q in %+v", event, s.records(t))
		}
	}
	// J7: the verdict of this session is recorded.
	if v := s.Node(t, "w1").Status.LastVerdict; v == nil || !v.Accepted || v.Time.Time.Before(before.Truncate(time.Second)) {
		t.Errorf("verdict %+v", v)
	}
	s.settled(t, s.file(t, renewal("w1")))
	again := s.asNode(t, r.joinRequest, &joinv1.IssueJoinTicketResponse{CaCertificate: s.Admin.CAData, KubeletClientCertificate: resp.GetKubeletClientCertificate()})
	membertest.Eventually(t, func() error {
		return again.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	})
	if err := s.Client.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err != nil {
		t.Error(err)
	}
	membertest.Eventually(t, func() error { // the value of its ticket is recorded before
		end := s.expiries(t, "w1").ClientExpiresAt
		return membertest.Want(end.Time.Equal(cert.NotAfter), "status says %s, and it ends at %s", end, cert.NotAfter)
	})
}

// rotatesAuthority writes into the cluster's description that its authority is being rotated.
func (s *fixture) rotatesAuthority(t *testing.T, phase clusterinfo.RotationPhase) {
	t.Helper()
	m := &corev1.ConfigMap{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Namespace: clusterinfo.Namespace, Name: clusterinfo.ConfigMap}, m); err != nil {
		t.Fatal(err)
	}
	info, err := clusterinfo.Parse([]byte(m.Data[clusterinfo.Key]))
	if err != nil {
		t.Fatal(err)
	}
	info.Rotation = &clusterinfo.Rotation{Key: clusterinfo.ClusterCA, Phase: phase, Since: time.Now().UTC()}
	text, err := info.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	m.Data[clusterinfo.Key] = string(text)
	if err := s.Client.Update(t.Context(), m); err != nil {
		t.Fatal(err)
	}
}

// settled waits until a kubelet's request has its certificate.
func (s *fixture) settled(t *testing.T, request string) {
	t.Helper()
	s.decided(t, request, "Approved", "AttestedMachine")
}

// Each request succeeds when only the offending input is repaired.
func TestRefusedRenewalsOfNodes(t *testing.T) {
	s := setUp(t)
	m, neighbour, unenrolled, fresh := s.booted(t), s.machine(t), s.machine(t), s.machine(t)
	s.ticketFor(t, neighbour, worker(t, named("w2", diskNumber(2), "192.168.77.20")))
	unenrolled.LockTo(s.ID)
	s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: fresh.ID().String(), Role: v1alpha1.RoleControlPlane, Addresses: []string{"192.168.77.12"}})
	fresh.LockTo(s.ID)
	as := func(name string, addresses ...string) func(*testing.T) *renewing {
		return func(t *testing.T) *renewing { t.Helper(); return renewingAs(t, named(name, disk1, addresses...)) }
	}
	for name, tt := range map[string]struct {
		machine *attesttest.Machine // nil: w1's
		ask     func(*testing.T) *renewing
		want    attestv1.Reason
	}{
		"an unknown machine":                      {unenrolled, as("w9", "192.168.77.12"), attestv1.Reason_REASON_NOT_ENROLLED},
		"a machine with the name of another":      {unenrolled, as("w1", "192.168.77.12"), attestv1.Reason_REASON_NAME_TAKEN},
		"an enrolled machine under another name":  {nil, as("w9", "192.168.77.12"), attestv1.Reason_REASON_NAME_MISMATCH},
		"an enrolled machine with another's name": {nil, as("w2", "192.168.77.20"), attestv1.Reason_REASON_NAME_MISMATCH},
		"a control plane's name":                  {nil, as("cp1", "192.168.77.11"), attestv1.Reason_REASON_NAME_MISMATCH},
		"a machine that has not joined yet":       {fresh, as("cp2", "192.168.77.12"), attestv1.Reason_REASON_NOT_ENROLLED},
		"the address of another":                  {nil, as("w1", "192.168.77.20"), attestv1.Reason_REASON_ADDRESS_REFUSED},
		"one address more":                        {nil, as("w1", "192.168.77.12", "192.168.77.99"), attestv1.Reason_REASON_ADDRESS_REFUSED},
		"two names": {nil, func(t *testing.T) *renewing {
			t.Helper()
			r := renewingAs(t)
			r.KubeletServingCsr = worker(t, named("w2", disk1, "192.168.77.12")).GetKubeletServingCsr()
			return r
		}, attestv1.Reason_REASON_CSR_INVALID},
		"an administrator's group": {nil, func(t *testing.T) *renewing {
			t.Helper()
			return renewingAs(t, func(w *requestOptions) {
				w.template = func(client, _ *x509.CertificateRequest) { client.Subject.Organization = []string{"system:masters"} }
			})
		}, attestv1.Reason_REASON_CSR_INVALID},
		"no request": {nil, func(*testing.T) *renewing {
			return &renewing{RenewNodeCertificatesRequest: &joinv1.RenewNodeCertificatesRequest{}}
		}, attestv1.Reason_REASON_CSR_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			asks := tt.machine
			if asks == nil {
				asks = m
			}
			before := s.CSRs(t)
			s.notRenewed(t, asks, tt.ask(t), tt.want)
			s.filedNothing(t, before)
			if _, err := s.renewedNode(t, m, renewingAs(t)); err != nil {
				t.Errorf("repaired: %v", err)
			}
		})
	}
}

// The present state of the machine and of its enrollment counts.
func TestARenewalIsJudgedAnew(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil func(t *testing.T, s *fixture, m *attesttest.Machine)
		want  attestv1.Reason
		asked bool // the request reaches the RPC; otherwise it is refused in the exchange
	}{
		"one that boots something else": {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.BootImage("other") }, attestv1.Reason_REASON_POLICY_REFUSED, false},
		"one that is not locked":        {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.Reboot() }, attestv1.Reason_REASON_LOCK_FOREIGN, true},
		"one of another cluster":        {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.Reboot(); m.LockTo([32]byte{1}) }, attestv1.Reason_REASON_LOCK_FOREIGN, false},
		"one whose memory was put back": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			t.Helper()
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.Clock += time.Hour.Milliseconds() })
		}, attestv1.Reason_REASON_CLOCK_WENT_BACK, true},
		"one that a copy has outrun": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			t.Helper()
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.ResetCount += 1000 })
		}, attestv1.Reason_REASON_MACHINE_CLONED, true},
		"one that was banned": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			t.Helper()
			n := s.Node(t, "w1")
			n.Spec.Banned = true
			if err := s.Client.Update(t.Context(), n); err != nil {
				t.Error(err)
			}
		}, attestv1.Reason_REASON_BANNED, false},
		"one that was forgotten": {func(t *testing.T, s *fixture, _ *attesttest.Machine) { t.Helper(); s.forget(t, "w1") }, attestv1.Reason_REASON_NOT_ENROLLED, true},
		"one that was released": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			t.Helper()
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { now := metav1.Now(); st.ReleasedAt = &now })
		}, attestv1.Reason_REASON_NOT_ENROLLED, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t)
			m := s.booted(t)
			if _, err := s.renewedNode(t, m, renewingAs(t)); err != nil {
				t.Fatal(err)
			}
			tt.spoil(t, s, m)
			ask := func() error {
				_, err := s.renewNode(t, m, renewingAs(t))
				return err
			}
			if tt.asked {
				membertest.Eventually(t, func() error { // the informers follow
					err := ask()
					return membertest.Want(rpc.ReasonFrom(err) == tt.want, "%v, want %s", err, attest.ReasonName(tt.want))
				})
				s.notRenewed(t, m, renewingAs(t), tt.want)
				return
			}
			refusaltest.Until(t, s.observations(t), tt.want, refusaltest.Connection(), inExchange(tt.want, ask)) // the informers follow
			_ = refusaltest.Refused(t, s.observations(t), tt.want, refusaltest.Connection(), ask)
		})
	}
}

// J4: if older certificates of the name are revoked, the new one is allowed.
func TestARenewedCertificateIsAllowedWhereOlderOnesAreRevoked(t *testing.T) {
	s := setUp(t)
	m := s.booted(t)
	s.revoke(t, "w1")
	resp, err := s.renewedNode(t, m, renewingAs(t))
	if err != nil {
		t.Fatal(err)
	}
	if r := s.Access(t).Entry("w1").Revoked; r == nil || !r.Allows(nodeaccess.ID(leaf(t, resp.GetKubeletClientCertificate()))) {
		t.Errorf("revoked: %+v", r)
	}
}

// J3: no certificate is sent without its record.
func TestWithoutAnAuditRecordNoCertificateIsRenewed(t *testing.T) {
	s := setUp(t, auditAt(full))
	m := s.machine(t)
	s.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk1, Addresses: []string{"192.168.77.12"}})
	m.LockTo(s.ID)
	membertest.Eventually(t, func() error { // when it has a verdict, as after its join
		_, err := s.reattest(t, m)
		return err
	})
	before := s.CSRs(t)
	_, err := s.renewNode(t, m, renewingAs(t))
	if rpc.ReasonFrom(err) != attestv1.Reason_REASON_AUDIT_UNAVAILABLE {
		t.Errorf("%v", err)
	}
	s.filedNothing(t, before)
}
