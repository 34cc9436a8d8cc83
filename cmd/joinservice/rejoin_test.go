package main

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// encrypted changes a request to that of a machine whose state disk is encrypted.
func encrypted(w *requestOptions) { w.mode = joinv1.DiskMode_DISK_MODE_LUKS }

// rebooted returns a machine that has joined as w1 with disk1, and has rebooted since.
func (s *fixture) rebooted(t *testing.T) *attesttest.Machine {
	t.Helper()
	m := s.machine(t)
	s.ticketFor(t, m, worker(t, encrypted))
	m.LockTo(s.ID)
	m.Reboot()
	return m
}

// again returns the request of w1 after a reboot.
func again(changes ...func(*joinv1.IssueRejoinTicketRequest)) *joinv1.IssueRejoinTicketRequest {
	r := &joinv1.IssueRejoinTicketRequest{NodeName: "w1", Role: joinv1.Role_ROLE_WORKER, DiskId: disk1, BootSecret: oneSecret}
	for _, c := range changes {
		c(r)
	}
	return r
}

// rejoin asks over a separate connection.
func (s *fixture) rejoin(t *testing.T, m *attesttest.Machine, r *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
	t.Helper()
	return s.dial(t, m.Attester(attest.PurposeMachine)).IssueRejoinTicket(t.Context(), r)
}

// rejoined is [fixture.rejoin] of a machine that should get its key; a refusal because of a slow machine is repeated.
func (s *fixture) rejoined(t *testing.T, m *attesttest.Machine, r *joinv1.IssueRejoinTicketRequest) (resp *joinv1.IssueRejoinTicketResponse, err error) {
	t.Helper()
	err = patiently(t, func() (err error) { resp, err = s.rejoin(t, m, r); return err })
	return resp, err
}

// notAgain asks, and compares error detail, metric, log and audit record.
func (s *fixture) notAgain(t *testing.T, m *attesttest.Machine, r *joinv1.IssueRejoinTicketRequest, want attestv1.Reason) error {
	t.Helper()
	about := []string{"event", "rejoin refused", "machine", m.ID().String()}
	places := refusaltest.Places{Metric: []string{"muster_rejoin_tickets_total"}, Log: about, Audit: about}
	if s.audit == full {
		places.Audit = nil
	}
	return refusaltest.Refused(t, s.observations(t), want, places, func() error {
		_, err := s.rejoin(t, m, r)
		return err
	})
}

func TestARebootedMachineGetsTheKeyOfItsDisk(t *testing.T) {
	s := setUp(t)
	m := s.rebooted(t)
	before, filed := s.Node(t, "w1"), s.CSRs(t)
	resp, err := s.rejoined(t, m, again())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(resp.GetDiskKey(), s.DiskKey(t, disk1)) || !bytes.Equal(resp.GetClusterId(), s.ID[:]) || len(resp.GetTicketId()) != 16 {
		t.Errorf("ticket %v", resp)
	}
	after := s.Node(t, "w1")
	if b := after.Status.Boot; b == nil || b.ResetCount != before.Status.Boot.ResetCount+1 || b.Address != "127.0.0.1" { // J11
		t.Errorf("recorded: %+v, before: %+v", b, before.Status.Boot)
	}
	after.Status.Boot, after.Status.ResetCount = before.Status.Boot, before.Status.ResetCount
	if !reflect.DeepEqual(after.Spec, before.Spec) || !reflect.DeepEqual(after.Status, before.Status) {
		t.Errorf("its enrollment changed: %+v", after)
	}
	s.filedNothing(t, filed)
	id := hex.EncodeToString(resp.GetTicketId())
	if !s.recorded(t, func(r audit.Record) bool {
		return r.Event == "rejoin ticket issued" && r.Ticket == id && r.Machine == m.ID().String() && r.Node == "w1" && r.Role == "worker" && r.Disk == disk1 && r.Evidence != "" && r.PolicySerial == 1
	}) {
		t.Errorf("no record of the ticket in %+v", s.records(t)) // J3
	}
	key := []byte(hex.EncodeToString(resp.GetDiskKey()))
	if bytes.Contains(s.auditText(t), key) || bytes.Contains(s.join.Log.Bytes(), key) { // K3
		t.Error("the key is on a log")
	}
	second, err := s.rejoined(t, m, again())
	if err != nil || !bytes.Equal(second.GetDiskKey(), resp.GetDiskKey()) || bytes.Equal(second.GetTicketId(), resp.GetTicketId()) {
		t.Errorf("asked once more: %v, %v", second, err)
	}
	if n := s.join.Metric(t, "muster_rejoin_tickets_total", "role", "worker", "reason", "ACCEPTED"); n != 2 {
		t.Errorf("%v rejoins are counted", n)
	}
}

// The first machine was enrolled by its owner, who knows its disk from the result of init.
func TestTheFirstMachineRejoinsToo(t *testing.T) {
	s := setUp(t)
	m := s.controlMachine(t)
	s.Enroll(t, "first", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane, DiskID: disk3})
	s.GiveDisk(t, disk3, m.ID())
	resp, err := s.rejoined(t, m, again(func(r *joinv1.IssueRejoinTicketRequest) {
		r.NodeName, r.Role, r.DiskId = "first", joinv1.Role_ROLE_CONTROL_PLANE, disk3
	}))
	if err != nil || !bytes.Equal(resp.GetDiskKey(), s.DiskKey(t, disk3)) {
		t.Errorf("%v, %v", resp, err)
	}
	// B8: the files by which a control plane recognizes its cluster, and no private key.
	authorities := map[string]string{}
	for _, f := range resp.GetAuthorities() {
		authorities[f.GetPath()] = string(f.GetContent())
	}
	want := map[string]string{}
	for _, name := range []string{"ca.crt", "etcd/ca.crt", "front-proxy-ca.crt", "sa.pub"} {
		want[name] = string(s.pkiFile(name))
	}
	if !maps.Equal(authorities, want) {
		t.Errorf("authorities %q, want %q", authorities, want)
	}
}

// B8: the data with which a machine compares its disk. Without the list, it would not be known what must run there.
func TestARebootedMachineIsToldWhatItIsToBe(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	ticket := s.ticketFor(t, m, worker(t, encrypted))
	m.LockTo(s.ID)
	m.Reboot()
	resp, err := s.rejoined(t, m, again())
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.GetComponents()) == 0 || !slices.EqualFunc(resp.GetComponents(), ticket.GetComponents(), func(a, b *initv1.Component) bool { return proto.Equal(a, b) }) || !slices.Equal(resp.GetImages(), ticket.GetImages()) || len(resp.GetImages()) == 0 {
		t.Errorf("components %v and images %v, the ticket had %v and %v", resp.GetComponents(), resp.GetImages(), ticket.GetComponents(), ticket.GetImages())
	}
	if resp.GetControlPlaneEndpoint() != ticket.GetControlPlaneEndpoint() || resp.GetControlPlaneEndpoint() == "" {
		t.Errorf("endpoint %q, the ticket had %q", resp.GetControlPlaneEndpoint(), ticket.GetControlPlaneEndpoint())
	}
	if a := resp.GetAuthorities(); len(a) != 1 || a[0].GetPath() != "ca.crt" || !bytes.Equal(a[0].GetContent(), s.CA()) {
		t.Errorf("authorities %v", a)
	}
}

// J2: each request succeeds when only the offending input is repaired.
func TestRefusedRejoins(t *testing.T) {
	s := setUp(t, recordsSoon)
	neighbour := s.machine(t)
	s.ticketFor(t, neighbour, worker(t, named("w2", disk2, "192.168.77.20"), encrypted))
	plain := s.machine(t)
	s.ticketFor(t, plain, worker(t, named("w3", disk3, "192.168.77.21")))
	fresh := s.machine(t)
	s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: fresh.ID().String(), Role: v1alpha1.RoleControlPlane})
	unsalted := s.machine(t)
	s.Enroll(t, "w4", v1alpha1.AttestedNodeSpec{MachineID: unsalted.ID().String(), Role: v1alpha1.RoleWorker, DiskID: diskNumber(8)})
	unlisted := s.machine(t)
	s.Enroll(t, "cp3", v1alpha1.AttestedNodeSpec{MachineID: unlisted.ID().String(), Role: v1alpha1.RoleControlPlane, DiskID: diskNumber(7)})
	s.GiveDisk(t, diskNumber(7), unlisted.ID())
	ofUnlisted := func(r *joinv1.IssueRejoinTicketRequest) {
		r.NodeName, r.Role, r.DiskId = "cp3", joinv1.Role_ROLE_CONTROL_PLANE, diskNumber(7)
	}
	m, unenrolled := s.rebooted(t), s.machine(t)

	for name, tt := range map[string]struct {
		machine *attesttest.Machine // nil: w1's
		change  func(*joinv1.IssueRejoinTicketRequest)
		want    attestv1.Reason
	}{
		"an unknown machine":                       {unenrolled, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "w9" }, attestv1.Reason_REASON_NOT_ENROLLED},
		"a machine with the name of another":       {unenrolled, func(*joinv1.IssueRejoinTicketRequest) {}, attestv1.Reason_REASON_NAME_TAKEN},
		"an enrolled machine under another name":   {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "w9" }, attestv1.Reason_REASON_NAME_MISMATCH},
		"an enrolled machine with another's name":  {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "w2" }, attestv1.Reason_REASON_NAME_MISMATCH},
		"a worker that was a control plane":        {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.Role = joinv1.Role_ROLE_CONTROL_PLANE }, attestv1.Reason_REASON_ROLE_REFUSED},
		"another disk":                             {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.DiskId = diskNumber(9) }, attestv1.Reason_REASON_DISK_MISMATCH},
		"the disk of another machine":              {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.DiskId = disk2 }, attestv1.Reason_REASON_DISK_MISMATCH},
		"a disk that was moved to another machine": {neighbour, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "w2" }, attestv1.Reason_REASON_DISK_MISMATCH},
		"a plain disk, which no key opens":         {plain, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName, r.DiskId = "w3", disk3 }, attestv1.Reason_REASON_DISK_MISMATCH},
		"a machine that has not joined yet": {fresh, func(r *joinv1.IssueRejoinTicketRequest) {
			r.NodeName, r.Role = "cp2", joinv1.Role_ROLE_CONTROL_PLANE
		}, attestv1.Reason_REASON_DISK_MISMATCH},
		"a disk without a salt": {unsalted, func(r *joinv1.IssueRejoinTicketRequest) {
			r.NodeName, r.DiskId = "w4", diskNumber(8)
		}, attestv1.Reason_REASON_DISK_ERASED},
		"a control plane that the policy does not list": {unlisted, ofUnlisted, attestv1.Reason_REASON_SERVER_NOT_LISTED}, // J6, A7
		"no name":              {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a name with a path":   {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "../w1" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no role":              {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.Role = 0 }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an unknown role":      {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.Role = 77 }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no disk":              {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.DiskId = "" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a disk in braces":     {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.DiskId = "{" + disk1 + "}" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no boot secret":       {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.BootSecret = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an empty boot secret": {nil, func(r *joinv1.IssueRejoinTicketRequest) { r.BootSecret = make([]byte, 32) }, attestv1.Reason_REASON_REQUEST_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			asks := tt.machine
			if asks == nil {
				asks = m
			}
			err := s.notAgain(t, asks, again(tt.change), tt.want)
			if bytes.Contains([]byte(err.Error()), []byte(m.ID().String())) { // R1
				t.Errorf("the caller learns more than the reason: %v", err)
			}
			if _, err := s.rejoined(t, m, again()); err != nil {
				t.Errorf("repaired: %v", err)
			}
		})
	}
	// The owner can see which machines wait.
	membertest.Eventually(t, func() error {
		w := s.waiting(t)
		if _, listed := w[m.ID().String()]; listed {
			return membertest.Want(false, "w1 has its key, and is listed: %+v", w)
		}
		e, listed := w[unenrolled.ID().String()]
		return membertest.Want(listed && (e.Reason == "NAME_TAKEN" || e.Reason == "NOT_ENROLLED"), "the unenrolled machine is listed as %+v", e)
	})
	s.listed = append(s.listed, unlisted)
	s.inForce(t, s.policy(t, func(p *attestv1.Policy) { p.Serial = 2 }))
	if resp, err := s.rejoined(t, unlisted, again(ofUnlisted)); err != nil || !bytes.Equal(resp.GetDiskKey(), s.DiskKey(t, diskNumber(7))) {
		t.Errorf("a control plane that the policy lists now: %v, %v", resp, err)
	}
}

// J2: a disk is opened only if exactly one enrollment assigns it to the machine; that the machine had it before is not
// sufficient.
func TestADiskThatNoEnrollmentOrTwoNameIsNotOpened(t *testing.T) {
	s := setUp(t)
	unnamed, twice, other := s.machine(t), s.machine(t), s.machine(t)
	s.GiveDisk(t, diskNumber(7), unnamed.ID())
	s.GiveDisk(t, diskNumber(6), twice.ID())
	s.Enroll(t, "w4", v1alpha1.AttestedNodeSpec{MachineID: unnamed.ID().String(), Role: v1alpha1.RoleWorker})
	for name, m := range map[string]*attesttest.Machine{"w5": twice, "w6": other} { // a mistake of the owner
		s.Enroll(t, name, v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleWorker, DiskID: diskNumber(6), DiskMode: v1alpha1.DiskModeLUKS})
	}
	_ = s.notAgain(t, unnamed, again(func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName, r.DiskId = "w4", diskNumber(7) }), attestv1.Reason_REASON_DISK_MISMATCH)
	second := again(func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName, r.DiskId = "w5", diskNumber(6) })
	membertest.Eventually(t, func() error { // joinservice has seen both enrollments
		_, err := s.rejoin(t, twice, second)
		return membertest.Want(err != nil, "it has seen one of the two")
	})
	_ = s.notAgain(t, twice, second, attestv1.Reason_REASON_DISK_MISMATCH)
}

// The machine's state since its join is appraised as at the join, by the policy in force.
func TestARebootedMachineIsJudgedAnew(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil func(t *testing.T, s *fixture, m *attesttest.Machine)
		want  attestv1.Reason
		asked bool // the request reaches the RPC; otherwise it is refused in the exchange
	}{
		"one that boots something else": {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.BootImage("other") }, attestv1.Reason_REASON_POLICY_REFUSED, false},
		"one of another cluster":        {func(_ *testing.T, _ *fixture, m *attesttest.Machine) { m.LockTo([32]byte{1}) }, attestv1.Reason_REASON_LOCK_FOREIGN, false},
		"one that runs already":         {func(_ *testing.T, s *fixture, m *attesttest.Machine) { m.LockTo(s.ID) }, attestv1.Reason_REASON_LOCK_FOREIGN, true},
		"one whose memory was put back": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.Clock += time.Hour.Milliseconds() })
		}, attestv1.Reason_REASON_CLOCK_WENT_BACK, true},
		"one whose TPM was cleared": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.ResetCount += 1000 })
		}, attestv1.Reason_REASON_MACHINE_CLONED, true},
		"one whose TPM was cleared before boots were recorded": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) {
				n := *st.ResetCount + 1000
				st.ResetCount, st.Boot = &n, nil
			})
		}, attestv1.Reason_REASON_CLOCK_WENT_BACK, true},
		"one that was banned": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			n := s.Node(t, "w1")
			n.Spec.Banned = true
			if err := s.Client.Update(t.Context(), n); err != nil {
				t.Error(err)
			}
		}, attestv1.Reason_REASON_BANNED, false},
		"one that was forgotten": {func(t *testing.T, s *fixture, _ *attesttest.Machine) { s.forget(t, "w1") }, attestv1.Reason_REASON_NOT_ENROLLED, true},
		"one whose role the policy lists no more": {func(t *testing.T, s *fixture, _ *attesttest.Machine) {
			s.inForce(t, s.policy(t, func(p *attestv1.Policy) { p.Serial, p.Roles = 2, []string{"control-plane"} }))
		}, attestv1.Reason_REASON_ROLE_REFUSED, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t)
			m := s.rebooted(t)
			if _, err := s.rejoined(t, m, again()); err != nil {
				t.Fatal(err)
			}
			tt.spoil(t, s, m)
			ask := func() error {
				_, err := s.rejoin(t, m, again())
				return err
			}
			if tt.asked {
				membertest.Eventually(t, func() error { // the informers follow
					err := ask()
					return membertest.Want(rpc.ReasonFrom(err) == tt.want, "%v, want %s", err, attest.ReasonName(tt.want))
				})
				_ = s.notAgain(t, m, again(), tt.want)
				return
			}
			refusaltest.Until(t, s.observations(t), tt.want, refusaltest.Connection(), inExchange(tt.want, ask)) // the informers follow
			_ = refusaltest.Refused(t, s.observations(t), tt.want, refusaltest.Connection(), ask)
		})
	}
}

func TestFaultsOfOursGiveNoRejoinTicket(t *testing.T) {
	s := setUp(t)
	m := s.rebooted(t)
	path := filepath.Join(s.rootDir, "root")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	err := s.notAgain(t, m, again(), attestv1.Reason_REASON_ROOT_SEALED)
	if rpc.RetryAfterFrom(err) == 0 {
		t.Errorf("%v has no hint when to try again", err)
	}
	if err := os.WriteFile(path, s.Root[:], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.rejoined(t, m, again()); err != nil {
		t.Error(err)
	}
}

// J3: no key is sent without its record.
func TestWithoutAnAuditRecordNoDiskIsOpened(t *testing.T) {
	s := setUp(t, auditAt(full))
	m := s.machine(t)
	s.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk1})
	s.GiveDisk(t, disk1, m.ID())
	membertest.Eventually(t, func() error {
		_, err := s.rejoin(t, m, again())
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_AUDIT_UNAVAILABLE, "%v", err)
	})
	_ = s.notAgain(t, m, again(), attestv1.Reason_REASON_AUDIT_UNAVAILABLE)
}

// A machine that returned its ticket keeps name and disk until its certificates have expired, and so its key.
func TestAMachineWhoseTicketWasReturnedOpensItsDisk(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	ticket := s.ticketFor(t, m, worker(t, encrypted))
	s.returned(t, m, ticket)
	resp, err := s.rejoined(t, m, again())
	if err != nil || !bytes.Equal(resp.GetDiskKey(), ticket.GetDiskKey()) {
		t.Errorf("%v", err)
	}
	if at := s.Node(t, "w1").Status.ReleasedAt; at == nil {
		t.Error("it is not released any more")
	}
}

// inExchange returns ask's refusal only if the attestation exchange was refused. If the informers see a change after the
// exchange and before the call, the call is refused instead, which is reported in other places.
func inExchange(want attestv1.Reason, ask func() error) func() error {
	return func() error {
		err := ask()
		if attest.ReasonOf(err) != want {
			return fmt.Errorf("not in the exchange: %s", err) //nolint:errorlint // its reason must not be found
		}
		return err
	}
}
