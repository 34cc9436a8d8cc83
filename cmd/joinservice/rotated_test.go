package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// rotatedPublic is an elliptic public key, and rotatedID the ID of its key.
var (
	rotatedPublic = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEFcj9vGSJtSdC69SACXutjPPTqXVC\nj+DPac7QbLwTOBhNU9JxMlKxxmxj2Hu11L42tzfUJ1nnjSt1bO80QE+xQw==\n-----END PUBLIC KEY-----\n"
	rotatedID     = idOf(rotatedPublic)
	rotatedKey    = []byte("the new key, a secret")
)

func idOf(public string) string {
	block, _ := pem.Decode([]byte(public))
	sum := sha256.Sum256(block.Bytes)
	return hex.EncodeToString(sum[:])
}

// rotates gives cp1 the new key of a rotation.
func (s *fixture) rotates(t *testing.T) {
	t.Helper()
	dir := filepath.Join(s.pki, "muster-rotation")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "service-account-key."+rotatedID), rotatedKey, 0o600); err != nil {
		t.Fatal(err)
	}
}

// member enrolls a machine that is a node of the role.
func (s *fixture) member(t *testing.T, name string, m *attesttest.Machine, role v1alpha1.Role) {
	t.Helper()
	m.LockTo(s.ID)
	s.Enroll(t, name, v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: role})
	s.setStatus(t, name, func(st *v1alpha1.AttestedNodeStatus) {
		st.LastVerdict = &v1alpha1.Verdict{Accepted: true, Time: metav1.NewTime(time.Now().Add(-time.Hour))}
	})
}

func (s *fixture) setBanned(t *testing.T, node string, is bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := s.Node(t, node)
		n.Spec.Banned = is
		return s.Client.Update(t.Context(), n)
	})
}

func rotatedRequest(changes ...func(*joinv1.GetRotatedKeyRequest)) *joinv1.GetRotatedKeyRequest {
	r := &joinv1.GetRotatedKeyRequest{NodeName: "cp2", BootSecret: oneSecret, Key: string(clusterinfo.ServiceAccountKey), Id: rotatedID}
	for _, c := range changes {
		c(r)
	}
	return r
}

func TestAListedControlPlaneGetsTheNewKey(t *testing.T) {
	s := setUp(t)
	s.rotates(t)
	m := s.planned[0]
	s.member(t, "cp2", m, v1alpha1.RoleControlPlane)
	var resp *joinv1.GetRotatedKeyResponse
	if err := patiently(t, func() (err error) {
		resp, err = s.dial(t, m.Attester(attest.PurposeMachine)).GetRotatedKey(t.Context(), rotatedRequest())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(resp.GetContent(), rotatedKey) {
		t.Errorf("content %q", resp.GetContent())
	}
	if !s.recorded(t, func(r audit.Record) bool { // J3
		return r.Event == "rotated key passed on" && r.Machine == m.ID().String() && r.Node == "cp2" && r.Evidence != "" && r.PolicySerial == 1 && r.Purpose == "service-account-key"
	}) {
		t.Errorf("no record in %+v", s.records(t))
	}
	if bytes.Contains(s.auditText(t), rotatedKey) || bytes.Contains(s.join.Log.Bytes(), rotatedKey) { // K3
		t.Error("the key is on a log")
	}
}

// Each request succeeds when only the offending input is repaired (J6).
func TestRefusedRequestsForARotatedKey(t *testing.T) {
	s := setUp(t)
	s.rotates(t)
	if err := os.WriteFile(filepath.Join(s.pki, "muster-rotation", "service-account-key.short"), rotatedKey, 0o600); err != nil {
		t.Fatal(err)
	}
	listed, unlisted, worker, stranger := s.planned[0], s.machine(t), s.planned[1], s.planned[2]
	s.member(t, "cp2", listed, v1alpha1.RoleControlPlane)
	s.member(t, "cp3", unlisted, v1alpha1.RoleControlPlane)
	s.member(t, "w1", worker, v1alpha1.RoleWorker)
	stranger.LockTo(s.ID)
	named := func(name string) func(*joinv1.GetRotatedKeyRequest) {
		return func(r *joinv1.GetRotatedKeyRequest) { r.NodeName = name }
	}
	for name, tt := range map[string]struct {
		machine *attesttest.Machine
		wrong   func(*joinv1.GetRotatedKeyRequest)
		want    attestv1.Reason
	}{
		"a control plane that the policy does not list": {unlisted, named("cp3"), attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"a worker that the policy lists":                {worker, named("w1"), attestv1.Reason_REASON_ROLE_REFUSED},
		"a listed machine that is not enrolled":         {stranger, named("cp9"), attestv1.Reason_REASON_NOT_ENROLLED},
		"another control plane's name":                  {stranger, nil, attestv1.Reason_REASON_NAME_TAKEN},
		"a name of another form":                        {listed, named("../cp2"), attestv1.Reason_REASON_REQUEST_INVALID},
		"another file of the folder":                    {listed, func(r *joinv1.GetRotatedKeyRequest) { r.Key = "../sa" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an ID with a path":                             {listed, func(r *joinv1.GetRotatedKeyRequest) { r.Id = "../../sa.key" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an ID of another form":                         {listed, func(r *joinv1.GetRotatedKeyRequest) { r.Id = "short" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a key that is not here":                        {listed, func(r *joinv1.GetRotatedKeyRequest) { r.Id = strings.Repeat("cd", 32) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no boot secret":                                {listed, func(r *joinv1.GetRotatedKeyRequest) { r.BootSecret = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			req := rotatedRequest()
			if tt.wrong != nil {
				tt.wrong(req)
			}
			about := []string{"event", "rotated key refused", "machine", tt.machine.ID().String()}
			_ = refusaltest.Refused(t, s.observations(t), tt.want, refusaltest.Places{Metric: []string{"muster_rpc_requests_total"}, Log: about, Audit: about}, func() error {
				_, err := s.dial(t, tt.machine.Attester(attest.PurposeMachine)).GetRotatedKey(t.Context(), req)
				return err
			})
		})
	}
	s.setBanned(t, "cp2", true)
	membertest.Eventually(t, func() error {
		_, err := s.dial(t, listed.Attester(attest.PurposeMachine)).GetRotatedKey(t.Context(), rotatedRequest())
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_BANNED, "banned: %v", err)
	})
	s.setBanned(t, "cp2", false)
	membertest.Eventually(t, func() error {
		_, err := s.dial(t, listed.Attester(attest.PurposeMachine)).GetRotatedKey(t.Context(), rotatedRequest())
		return err
	})
}

// A control plane that joins while the others change a key could get files that they had before.
func TestNoControlPlaneJoinsWhileAKeyIsRotated(t *testing.T) {
	s := setUp(t)
	two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
	s.known(t, two)
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
		s.Upgrading(t, func(i *clusterinfo.Info) { i.Rotation = rotationIn(phase) })
		membertest.Eventually(t, func() error {
			_, err := two.ask(t)
			return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "%s: %v", phase, err)
		})
	}
	s.ticketFor(t, s.machine(t), worker(t, named("w4", "5f0c95b6-2a3d-4c7e-9f10-000000000004", "192.168.77.14")))
	s.Upgrading(t, func(i *clusterinfo.Info) { i.Rotation = rotationIn(clusterinfo.RotationSettled) })
	membertest.Eventually(t, func() error { _, err := two.ask(t); return err })
}

func rotationIn(phase clusterinfo.RotationPhase) *clusterinfo.Rotation {
	return &clusterinfo.Rotation{Key: clusterinfo.ServiceAccountKey, Phase: phase, ID: rotatedID, Public: rotatedPublic}
}

// B8: the joinservice's own control plane may not have the new key yet, and the machine that reboots may.
func TestAControlPlaneThatRebootsKeepsTheNewKey(t *testing.T) {
	s := setUp(t)
	m := s.controlMachine(t)
	s.Enroll(t, "first", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane, DiskID: disk3})
	s.GiveDisk(t, disk3, m.ID())
	const own = "content of sa.pub"
	both := own + "\n" + rotatedPublic
	for _, tt := range []struct {
		rotation        *clusterinfo.Rotation
		has, want, keep string
	}{
		{nil, own, own, ""},
		{&clusterinfo.Rotation{Key: clusterinfo.ServiceAccountKey, Phase: clusterinfo.RotationAccept}, own, own, ""},
		{rotationIn(clusterinfo.RotationAccept), own, own, rotatedPublic},
		{rotationIn(clusterinfo.RotationSettled), both, both, rotatedPublic},
		{rotationIn(clusterinfo.RotationFinish), both, rotatedPublic, both},
		{rotationIn(clusterinfo.RotationFinish), own, own, rotatedPublic}, // its ID is invented, or this control plane has lost the key
	} {
		if err := os.WriteFile(filepath.Join(s.pki, "sa.pub"), []byte(tt.has), 0o600); err != nil {
			t.Fatal(err)
		}
		s.Upgrading(t, func(i *clusterinfo.Info) { i.Rotation = tt.rotation })
		membertest.Eventually(t, func() error {
			resp, err := s.rejoined(t, m, again(func(r *joinv1.IssueRejoinTicketRequest) {
				r.NodeName, r.Role, r.DiskId = "first", joinv1.Role_ROLE_CONTROL_PLANE, disk3
			}))
			if err != nil {
				return err
			}
			for _, f := range resp.GetAuthorities() {
				want := string(s.pkiFile(f.GetPath()))
				if f.GetPath() == "sa.pub" {
					want = tt.want
				}
				if string(f.GetContent()) != want {
					return membertest.Want(false, "%+v: %s is %q", tt.rotation, f.GetPath(), f.GetContent())
				}
			}
			r := resp.GetRotation()
			if tt.rotation == nil {
				return membertest.Want(r == nil, "without a rotation it gets %v", r)
			}
			return membertest.Want(r.GetKey() == string(tt.rotation.Key) && r.GetId() == tt.rotation.ID && string(r.GetKeep()) == tt.keep, "%+v: it gets %v", tt.rotation, r)
		})
	}
}
