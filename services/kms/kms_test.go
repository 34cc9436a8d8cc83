package kms_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/kms"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

const namespace = "muster-system"

var shared *membertest.Cluster

func TestMain(m *testing.M) {
	kubetest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		shared, err = membertest.Start(ctx, "../../deploy/charts/testdata/rendered.yaml")
		if err != nil {
			return nil, err
		}
		return shared.Stop, nil
	})
}

// fixture is a cluster with two control planes and a key service on the second.
type fixture struct {
	*membertest.Cluster
	ca       *attesttest.CA
	cp1, cp2 *attesttest.Machine
	w1       *attesttest.Machine // a worker, which the policy does not list
	rootDir  string
	audit    *membertest.Buffer
	kms      *membertest.Service
	pod      *corev1.Pod
}

func setUp(t *testing.T) *fixture {
	t.Helper()
	shared.Reset(t)
	s := &fixture{Cluster: shared, ca: attesttest.NewCA(t), rootDir: t.TempDir(), audit: &membertest.Buffer{}}
	s.cp1 = attesttest.NewMachine(t, s.ca, attesttest.Options{})
	s.cp2 = attesttest.NewMachine(t, s.ca, attesttest.Options{})
	for name, m := range map[string]*attesttest.Machine{"cp1": s.cp1, "cp2": s.cp2} {
		m.LockTo(s.ID)
		s.Enroll(t, name, v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleControlPlane})
	}
	s.w1 = attesttest.NewMachine(t, s.ca, attesttest.Options{})
	s.w1.LockTo(s.ID)
	s.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: s.w1.ID().String(), Role: v1alpha1.RoleWorker})
	s.setPolicy(t, 1, s.cp1, s.cp2)
	s.mount(t, s.Root[:], s.Salt[:])
	api, err := s.As(t.Context(), namespace, "kms")
	if err != nil {
		t.Fatal(err)
	}
	if s.pod, err = s.Pod(t.Context(), namespace, "joinservice", "cp1"); err != nil {
		t.Fatal(err)
	}
	s.kms = membertest.Serve(t, func(ctx context.Context, rpcs, probes net.Listener, stderr io.Writer) error {
		return kms.Run(ctx, kms.Options{
			Listener: rpcs, Metrics: probes, Attester: s.cp2.Attester(attest.PurposeKMS), Owner: attest.OwnerKeys{s.Public}, RootDir: s.rootDir, API: api,
			Audit: audit.NewStream(s.audit), Log: slog.New(slog.NewJSONHandler(stderr, nil)),
		})
	})
	return s
}

// setPolicy puts a policy in force that accepts all the machines and lists these as control planes.
func (s *fixture) setPolicy(t *testing.T, serial uint64, control ...*attesttest.Machine) {
	t.Helper()
	s.SetPolicy(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{s.cp1}, attesttest.ControlPlanes(control...), func(p *attestv1.Policy) { p.Serial = serial }))
}

// mount writes the Secret as a kubelet does: into a new folder, then a link is swapped.
func (s *fixture) mount(t *testing.T, root, salt []byte) {
	t.Helper()
	dir, err := os.MkdirTemp(s.rootDir, "..data_")
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"root": root, "salt": salt} {
		if b == nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	next := filepath.Join(s.rootDir, "..data_tmp")
	if err := errors.Join(os.Symlink(filepath.Base(dir), next), os.Rename(next, filepath.Join(s.rootDir, "..data"))); err != nil {
		t.Fatal(err)
	}
}

func (s *fixture) token(t *testing.T, account, audience string, pod *corev1.Pod) string {
	t.Helper()
	token, err := s.Token(t.Context(), namespace, account, audience, pod)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// dial returns a client that attests with a.
func (s *fixture) dial(t *testing.T, a attest.Attester) kmsv1connect.KeyServiceClient {
	t.Helper()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: a, Verifier: attesttest.Verifier(t, s.ca), PeerPurpose: attest.PurposeKMS,
		Appraiser: attesttest.ParsedPolicy(t, s.ca, []*attesttest.Machine{s.cp2}).For(attest.LockedTo(s.ID)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = transport.Close() })
	return kmsv1connect.NewKeyServiceClient(rpc.HTTPClient(transport), "https://"+s.kms.Addr, rpc.ClientOptions()...)
}

// observations returns the key service's own.
func (s *fixture) observations() refusaltest.Service { return s.kms.Observations(s.audit.Bytes) }

// keyRefused returns the places of a call of cp1 that got no disk key.
func (s *fixture) keyRefused() refusaltest.Places {
	machine := s.cp1.ID().String()
	return refusaltest.Places{
		Metric: []string{"muster_kms_calls_total", "purpose", "disk"},
		Log:    []string{"msg", "key refused", "machine", machine},
		Audit:  []string{"event", "key refused", "machine", machine},
	}
}

func with(ctx context.Context, token string) context.Context {
	ctx, call := connect.NewClientContext(ctx)
	if token != "" {
		call.RequestHeader().Set("Authorization", "Bearer "+token)
	}
	return ctx
}

const disk = "5f0c95b6-2a3d-4c7e-9f10-0123456789ab"

// asks returns a request for the key of a disk, with its salt.
func asks(disk string) *kmsv1.DeriveDiskKeyRequest {
	salt := keys.DiskSalt{3}
	return &kmsv1.DeriveDiskKeyRequest{DiskId: disk, DiskSalt: salt[:], RootVersion: 1}
}

func (s *fixture) want(t *testing.T) []byte {
	t.Helper()
	id, err := keys.ParseDiskID(disk)
	if err != nil {
		t.Fatal(err)
	}
	key, err := keys.NewRoot(s.Root, s.Salt).Disk(id, keys.DiskSalt{3})
	if err != nil {
		t.Fatal(err)
	}
	return key.Expose()
}

// K4, and the version of the root that a key is derived from.
func TestAKeyFollowsFromItsDisksSaltAndAVersionOfTheRoot(t *testing.T) {
	s := setUp(t)
	client := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice))
	token := s.token(t, "joinservice", kms.Audience, s.pod)
	for name, tt := range map[string]struct {
		change func(*kmsv1.DeriveDiskKeyRequest)
		want   attestv1.Reason
	}{
		"no salt":                     {func(r *kmsv1.DeriveDiskKeyRequest) { r.DiskSalt = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a salt of zeroes":            {func(r *kmsv1.DeriveDiskKeyRequest) { r.DiskSalt = make([]byte, 32) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a short salt":                {func(r *kmsv1.DeriveDiskKeyRequest) { r.DiskSalt = r.GetDiskSalt()[:31] }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a long salt":                 {func(r *kmsv1.DeriveDiskKeyRequest) { r.DiskSalt = append(r.GetDiskSalt(), 1) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no version":                  {func(r *kmsv1.DeriveDiskKeyRequest) { r.RootVersion = 0 }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a version that is not there": {func(r *kmsv1.DeriveDiskKeyRequest) { r.RootVersion = 2 }, attestv1.Reason_REASON_ROOT_SEALED},
	} {
		r := asks(disk)
		tt.change(r)
		if resp, err := client.DeriveDiskKey(with(t.Context(), token), r); rpc.ReasonFrom(err) != tt.want {
			t.Errorf("%s: %v, %v, want %s", name, resp, err, attest.ReasonName(tt.want))
		}
	}
	if _, err := client.DeriveClusterId(with(t.Context(), token), &kmsv1.DeriveClusterIdRequest{MeasurementSalt: s.MeasurementSalt[:]}); rpc.ReasonFrom(err) != attestv1.Reason_REASON_REQUEST_INVALID {
		t.Errorf("a cluster ID of no version: %v", err)
	}
	// Version 2 is in the same folder as the first.
	for name, b := range map[string][]byte{"root-2": bytes.Repeat([]byte{2}, 32), "salt-2": s.Salt[:]} {
		if err := os.WriteFile(filepath.Join(s.rootDir, "..data", name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := asks(disk)
	r.RootVersion = 2
	second, err := client.DeriveDiskKey(with(t.Context(), token), r)
	if err != nil || second.GetRootVersion() != 2 || bytes.Equal(second.GetKey(), s.want(t)) {
		t.Errorf("%v, %v", second, err)
	}
	if first, err := client.DeriveDiskKey(with(t.Context(), token), asks(disk)); err != nil || first.GetRootVersion() != 1 || !bytes.Equal(first.GetKey(), s.want(t)) {
		t.Errorf("%v, %v", first, err)
	}
}

func TestAnAttestedJoinserviceGetsKeys(t *testing.T) {
	s := setUp(t)
	client := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice))
	token := s.token(t, "joinservice", kms.Audience, s.pod)
	resp, err := client.DeriveDiskKey(with(t.Context(), token), asks(disk))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(resp.GetKey(), s.want(t)) {
		t.Error("another key than package keys derives")
	}
	id, err := client.DeriveClusterId(with(t.Context(), token), &kmsv1.DeriveClusterIdRequest{MeasurementSalt: s.MeasurementSalt[:], RootVersion: 1})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(id.GetClusterId(), s.ID[:]) {
		t.Error("another cluster ID than package keys derives")
	}
	for _, purpose := range []string{"disk", "cluster-id"} {
		if n := s.kms.Metric(t, "muster_kms_calls_total", "purpose", purpose, "reason", "ACCEPTED"); n != 1 {
			t.Errorf("metric for %s is %v, want 1", purpose, n)
		}
	}
	if !refusaltest.HasLine(s.audit.Bytes(), "event", "key derived", "disk", disk, "machine", s.cp1.ID().String(), "node", "cp1", "reason", "ACCEPTED") {
		t.Errorf("no audit record in %s", s.audit)
	}
	for name, text := range map[string][]byte{"log": s.kms.Log.Bytes(), "audit log": s.audit.Bytes()} {
		for _, secret := range [][]byte{s.want(t), s.Root[:], []byte(token)} {
			if bytes.Contains(text, secret) || bytes.Contains(text, fmt.Appendf(nil, "%x", secret)) {
				t.Errorf("a secret is in the %s", name)
			}
		}
	}
}

// Each refusal has its reason in error detail, metric, log and audit record (R1). The same fixture serves its machine when
// only the offending input is repaired (K2).
func TestWhoGetsNoKey(t *testing.T) {
	s := setUp(t)
	good := s.token(t, "joinservice", kms.Audience, s.pod)
	other, err := s.Pod(t.Context(), namespace, "joinservice", "cp2")
	if err != nil {
		t.Fatal(err)
	}
	unenrolled, err := s.Pod(t.Context(), namespace, "joinservice", "unknown")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "other"}}); err != nil {
		t.Fatal(err)
	}
	otherAccount, err := s.Pod(t.Context(), namespace, "other", "cp1")
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		token  string
		disk   string
		root   []byte
		salt   []byte
		reason attestv1.Reason
	}{
		"no token":                                      {token: "", reason: attestv1.Reason_REASON_WORKLOAD_IDENTITY},
		"a token that was not issued":                   {token: "eyJhbGciOiJub25lIn0.e30.", reason: attestv1.Reason_REASON_WORKLOAD_IDENTITY},
		"a token for the API server":                    {token: s.token(t, "joinservice", "", s.pod), reason: attestv1.Reason_REASON_WORKLOAD_IDENTITY},
		"a token of another service account":            {token: s.token(t, "other", kms.Audience, otherAccount), reason: attestv1.Reason_REASON_WORKLOAD_IDENTITY},
		"a token of no pod":                             {token: s.token(t, "joinservice", kms.Audience, nil), reason: attestv1.Reason_REASON_WORKLOAD_IDENTITY},
		"a token of a pod on another machine":           {token: s.token(t, "joinservice", kms.Audience, other), reason: attestv1.Reason_REASON_WORKLOAD_NODE},
		"a token of a pod on a node without enrollment": {token: s.token(t, "joinservice", kms.Audience, unenrolled), reason: attestv1.Reason_REASON_WORKLOAD_NODE},
		"no disk":                               {token: good, disk: "-", reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"a purpose smuggled into the disk's ID": {token: good, disk: "../measurement-secret/000000000000000", reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"a disk in upper case":                  {token: good, disk: "5F0C95B6-2A3D-4C7E-9F10-0123456789AB", reason: attestv1.Reason_REASON_REQUEST_INVALID},
		"no root secret":                        {token: good, root: []byte{}, reason: attestv1.Reason_REASON_ROOT_SEALED},
		"a root secret of 31 bytes":             {token: good, root: make([]byte, 31), reason: attestv1.Reason_REASON_ROOT_SEALED},
		"a root secret of 33 bytes":             {token: good, root: bytes.Repeat([]byte{1}, 33), reason: attestv1.Reason_REASON_ROOT_SEALED},
		"a root secret of zeroes":               {token: good, root: make([]byte, 32), reason: attestv1.Reason_REASON_ROOT_SEALED},
		"a salt of 16 bytes":                    {token: good, salt: make([]byte, 16), reason: attestv1.Reason_REASON_ROOT_SEALED},
	} {
		t.Run(name, func(t *testing.T) {
			client := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice))
			id := disk
			if tt.disk != "" {
				id = tt.disk
			}
			if tt.root != nil || tt.salt != nil {
				root, salt := tt.root, tt.salt
				if root == nil {
					root = s.Root[:]
				}
				if salt == nil {
					salt = s.Salt[:]
				}
				s.mount(t, root, salt)
			}
			refusaltest.Refused(t, s.observations(), tt.reason, s.keyRefused(), func() error {
				_, err := client.DeriveDiskKey(with(t.Context(), tt.token), asks(id))
				return err
			})
			// Repaired, and without a restart.
			s.mount(t, s.Root[:], s.Salt[:])
			resp, err := client.DeriveDiskKey(with(t.Context(), good), asks(disk))
			if err != nil || !bytes.Equal(resp.GetKey(), s.want(t)) {
				t.Errorf("repaired: %v", err)
			}
		})
	}
}

// A peer that is refused in the exchange never reaches the RPC (K2).
func TestOnlyJoinservicesOfThisClusterGetASession(t *testing.T) {
	s := setUp(t)
	token := s.token(t, "joinservice", kms.Audience, s.pod)
	unlocked := attesttest.NewMachine(t, s.ca, attesttest.Options{})
	elsewhere := attesttest.NewMachine(t, s.ca, attesttest.Options{})
	elsewhere.LockTo([32]byte{0xee})
	tampered := attesttest.NewMachine(t, s.ca, attesttest.Options{Image: "tampered"})
	tampered.LockTo(s.ID)
	foreign := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	foreign.LockTo(s.ID)
	for name, tt := range map[string]struct {
		attester attest.Attester
		reason   attestv1.Reason
	}{
		"a machine's own evidence":          {s.cp1.Attester(attest.PurposeMachine), attestv1.Reason_REASON_BINDING_MISMATCH},
		"another key service's evidence":    {s.cp1.Attester(attest.PurposeKMS), attestv1.Reason_REASON_BINDING_MISMATCH},
		"public evidence":                   {s.cp1.Attester(attest.PurposePublic), attestv1.Reason_REASON_BINDING_MISMATCH},
		"no evidence":                       {atls.NoAttester, attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST},
		"a machine that is not locked":      {unlocked.Attester(attest.PurposeJoinservice), attestv1.Reason_REASON_LOCK_FOREIGN},
		"a machine of another cluster":      {elsewhere.Attester(attest.PurposeJoinservice), attestv1.Reason_REASON_LOCK_FOREIGN},
		"a machine that booted another way": {tampered.Attester(attest.PurposeJoinservice), attestv1.Reason_REASON_POLICY_REFUSED},
		"a worker of this cluster":          {s.w1.Attester(attest.PurposeJoinservice), attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"a machine that no root certifies":  {foreign.Attester(attest.PurposeJoinservice), attestv1.Reason_REASON_EK_UNTRUSTED},
	} {
		t.Run(name, func(t *testing.T) {
			client := s.dial(t, tt.attester)
			refusaltest.Refused(t, s.observations(), tt.reason, refusaltest.Connection(), func() error {
				_, err := client.DeriveDiskKey(with(t.Context(), token), asks(disk))
				return err
			})
		})
	}
	t.Run("a plain client", func(t *testing.T) {
		refusaltest.EveryProcedure(t, s.observations(), refusaltest.Plain(t), "https://"+s.kms.Addr, attestv1.Reason_REASON_SESSION_REQUIRED, kmsv1connect.KeyServiceName)
	})
	t.Run("only the offending input was wrong", func(t *testing.T) {
		if _, err := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice)).DeriveDiskKey(with(t.Context(), token), asks(disk)); err != nil {
			t.Error(err)
		}
	})
}

// Invariant K2.
func TestABanTakesEffectOnAnOpenSession(t *testing.T) {
	s := setUp(t)
	client := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice))
	ctx := with(t.Context(), s.token(t, "joinservice", kms.Audience, s.pod))
	if _, err := client.DeriveDiskKey(ctx, asks(disk)); err != nil {
		t.Fatal(err)
	}
	ban := func(banned bool) {
		n := s.Node(t, "cp1")
		n.Spec.Banned = banned
		if err := s.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	ban(true)
	membertest.Eventually(t, func() error {
		_, err := client.DeriveDiskKey(ctx, asks(disk))
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_BANNED, "%v, want BANNED", err)
	})
	refusaltest.Refused(t, s.observations(), attestv1.Reason_REASON_BANNED, s.keyRefused(), func() error {
		_, err := client.DeriveDiskKey(ctx, asks(disk))
		return err
	})
	ban(false)
	membertest.Eventually(t, func() error {
		_, err := client.DeriveDiskKey(ctx, asks(disk))
		return err
	})
}

// Invariant A3.
func TestWithoutAPolicyNobodyIsServed(t *testing.T) {
	s := setUp(t)
	if err := s.Client.DeleteAllOf(t.Context(), &v1alpha1.AttestationPolicy{}); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(s.kms.Ready(t) != nil, "still ready")
	})
	ctx := with(t.Context(), s.token(t, "joinservice", kms.Audience, s.pod))
	client := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice))
	err := refusaltest.Refused(t, s.observations(), attestv1.Reason_REASON_NOT_READY, refusaltest.Connection(), func() error {
		_, err := client.DeriveDiskKey(ctx, asks(disk))
		return err
	})
	if rpc.RetryAfterFrom(err) == 0 {
		t.Errorf("%v does not say when to try again", err)
	}
	if s.kms.Metric(t, "muster_policy_generation") != 0 {
		t.Error("the metric says that a policy is in force")
	}
}

// A7: a control plane that the owner's policy no longer lists gets no key, also on an existing session.
func TestAControlPlaneThatIsNoLongerListedGetsNoKey(t *testing.T) {
	s := setUp(t)
	client := s.dial(t, s.cp1.Attester(attest.PurposeJoinservice))
	token := s.token(t, "joinservice", kms.Audience, s.pod)
	ask := func() error {
		_, err := client.DeriveDiskKey(with(t.Context(), token), asks(disk))
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	s.setPolicy(t, 2, s.cp2)
	membertest.Eventually(t, func() error {
		n := s.kms.Metric(t, "muster_policy_serial")
		return membertest.Want(n == 2, "serial %v is in force", n)
	})
	refusaltest.Refused(t, s.observations(), attestv1.Reason_REASON_SERVER_NOT_LISTED, s.keyRefused(), ask)
	s.setPolicy(t, 3, s.cp1, s.cp2)
	membertest.Eventually(t, ask)
}

// A worker is an accepted machine too, but runs no joinservice (K2).
func TestAWorkersTokenIsNotEnough(t *testing.T) {
	s := setUp(t)
	m := s.w1
	s.setPolicy(t, 2, s.cp1, s.cp2, m) // otherwise it gets no session
	pod, err := s.Pod(t.Context(), namespace, "joinservice", "w1")
	if err != nil {
		t.Fatal(err)
	}
	ask := func(a attest.Attester, token string) error {
		_, err := s.dial(t, a).DeriveDiskKey(with(t.Context(), token), asks(disk))
		return err
	}
	token := s.token(t, "joinservice", kms.Audience, pod)
	membertest.Eventually(t, func() error { // the informer follows
		err := ask(m.Attester(attest.PurposeJoinservice), token)
		return membertest.Want(strings.Contains(s.kms.Log.String(), "is no control plane") && rpc.ReasonFrom(err) == attestv1.Reason_REASON_WORKLOAD_NODE, "%v, want WORKLOAD_NODE for want of the role", err)
	})
	if err := ask(s.cp1.Attester(attest.PurposeJoinservice), s.token(t, "joinservice", kms.Audience, s.pod)); err != nil {
		t.Errorf("the control plane's: %v", err)
	}
}
