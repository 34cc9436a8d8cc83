package joinservice

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/services/joinservice/token"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

const disk1 = "5f0c95b6-2a3d-4c7e-9f10-000000000001"

// lone is a joinservice without a reachable kms, so that an otherwise valid request for a key fails there, and one
// machine's connection to it. The test sets the clock by which the service measures the age of evidence and rates.
type lone struct {
	joinv1connect.JoinServiceClient
	machine, cp1 *attesttest.Machine // cp1 has the service
	ca           *attesttest.CA
	url          string
	log          *audit.Log
	done         string // path of its file
	pki          string // a folder with the cluster's authorities
	began        time.Time
	ahead        atomic.Int64
	logs         atomic.Pointer[func(line []byte)] // if not nil, it sees each line before it is in the log
	observations refusaltest.Service
}

// newLone serves until the test ends. If frozen is true, its clock stands still.
func newLone(t *testing.T, frozen bool, lock func(m *attesttest.Machine), kms ...func(ca *attesttest.CA, cp1 *attesttest.Machine) (url, token string)) *lone {
	t.Helper()
	shared.Reset(t)
	ca := attesttest.NewCA(t)
	cp1 := attesttest.NewMachine(t, ca, attesttest.Options{})
	l := &lone{machine: attesttest.NewMachine(t, ca, attesttest.Options{}), cp1: cp1, ca: ca, began: time.Now()}
	cp1.LockTo(shared.ID)
	lock(l.machine)
	shared.SetPolicy(t, attesttest.Policy(t, ca, []*attesttest.Machine{cp1}, attesttest.ControlPlanes(cp1)))
	shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: l.machine.ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk1, Addresses: []string{"192.168.77.12"}})
	shared.GiveDisk(t, disk1, l.machine.ID())
	api, err := shared.As(t.Context(), clusterinfo.Namespace, "joinservice")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	log, err := audit.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	l.log, l.done, l.pki = log, path, t.TempDir()
	if err := os.WriteFile(filepath.Join(l.pki, "ca.crt"), shared.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	url, tokenFile := "https://127.0.0.1:1", filepath.Join(filepath.Dir(path), "token") // nothing listens there
	for _, serve := range kms {
		url, tokenFile = serve(ca, cp1)
	}
	service := membertest.Serve(t, func(ctx context.Context, rpcs, probes net.Listener, stderr io.Writer) error {
		return run(ctx, Options{
			Listener: rpcs, Metrics: probes, Attester: cp1.Attester(attest.PurposeJoinservice), Owner: attest.OwnerKeys{shared.Public}, API: api,
			KMS: url, Token: tokenFile, keyTimeout: 5 * time.Minute, // a slow machine's
			VerdictMaxAge: 15 * time.Minute, CertificateLife: state.DefaultCertificateLife, VanishedAfter: time.Hour, ReleaseAfter: 25 * time.Hour,
			Credential: token.CredentialCertificate, PKI: l.pki, Audit: log, Log: slog.New(slog.NewJSONHandler(seen{stderr, l}, nil)),
		}, func() time.Time {
			if frozen {
				return l.began.Add(time.Duration(l.ahead.Load()))
			}
			return time.Now().Add(time.Duration(l.ahead.Load()))
		})
	})
	l.observations = service.Observations(func() []byte {
		b, err := os.ReadFile(audit.RefusedPath(path))
		if err != nil {
			t.Error(err)
		}
		return b
	})
	l.url = "https://" + service.Addr
	l.JoinServiceClient = l.client(t, l.machine.Attester(attest.PurposeMachine), "127.0.0.1")
	return l
}

// seen passes each line to the test.
type seen struct {
	io.Writer
	l *lone
}

func (s seen) Write(line []byte) (int, error) {
	if see := s.l.logs.Load(); see != nil {
		(*see)(line)
	}
	return s.Writer.Write(line)
}

// evidenceIsOld sets the clock so that evidence which was shown until now is too old.
func (l *lone) evidenceIsOld() {
	l.ahead.Store(int64(time.Since(l.began) + maxEvidenceAge + time.Second))
}

// client returns a client with an address of its own.
func (l *lone) client(t *testing.T, a attest.Attester, from string) joinv1connect.JoinServiceClient {
	t.Helper()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: a, Verifier: attesttest.Verifier(t, l.ca), PeerPurpose: attest.PurposeJoinservice, Appraiser: presented{},
		DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = transport.Close() })
	return joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), l.url, rpc.ClientOptions()...)
}

// places returns where a refusal of the machine is reported.
func (l *lone) places(event, metric string) refusaltest.Places {
	about := []string{"event", event, "machine", l.machine.ID().String()}
	return refusaltest.Places{Metric: []string{metric}, Log: about, Audit: about}
}

func (l *lone) rejoin(t *testing.T) error {
	_, err := l.IssueRejoinTicket(t.Context(), &joinv1.IssueRejoinTicketRequest{NodeName: "w1", Role: joinv1.Role_ROLE_WORKER, DiskId: disk1, BootSecret: bytes.Repeat([]byte{1}, 32)})
	return err
}

func (l *lone) reattest(t *testing.T) error {
	_, err := l.Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: bytes.Repeat([]byte{1}, 32)})
	return err
}

// A connection can stay open for long after the evidence was shown on it. That evidence is then of an earlier state of the
// machine, and gets neither a ticket, nor the key of a disk, nor a verdict.
func TestAConnectionOfBeforeGetsNeitherTicketNorKeyNorVerdict(t *testing.T) {
	l := newLone(t, true, func(*attesttest.Machine) {}) // its evidence gets old when the test says so
	ticket := func(t *testing.T) error {
		_, err := l.IssueJoinTicket(t.Context(), &joinv1.IssueJoinTicketRequest{NodeName: "w1", Role: joinv1.Role_ROLE_WORKER, DiskId: disk1, BootSecret: bytes.Repeat([]byte{1}, 32)})
		return err
	}
	wanted := ticketRequest(t)
	requests := &joinv1.RenewNodeCertificatesRequest{KubeletClientCsr: wanted.GetKubeletClientCsr(), KubeletServingCsr: wanted.GetKubeletServingCsr(), BootSecret: bytes.Repeat([]byte{1}, 32)}
	renew := func(t *testing.T) error {
		_, err := l.RenewNodeCertificates(t.Context(), requests)
		return err
	}
	for name, tt := range map[string]struct {
		ask    func(*testing.T) error
		event  string
		metric string
		passes attestv1.Reason // the result with new evidence
	}{
		"a ticket":            {ticket, "ticket refused", "muster_join_tickets_total", attestv1.Reason_REASON_REQUEST_INVALID},
		"the key of its disk": {l.rejoin, "rejoin refused", "muster_rejoin_tickets_total", attestv1.Reason_REASON_KMS_UNAVAILABLE},
		"a verdict":           {l.reattest, "verdict refused", "muster_rpc_requests_total", attestv1.Reason_REASON_LOCK_FOREIGN},
		"its certificates":    {renew, "renewal refused", "muster_rpc_requests_total", attestv1.Reason_REASON_LOCK_FOREIGN},
	} {
		t.Run(name, func(t *testing.T) {
			ask := func() error { return tt.ask(t) }
			l.ahead.Store(0)
			refusaltest.Refused(t, l.observations, tt.passes, l.places(tt.event, tt.metric), ask)
			l.evidenceIsOld()
			refusaltest.Refused(t, l.observations, attestv1.Reason_REASON_VERDICT_OLD, l.places(tt.event, tt.metric), ask)
			l.ahead.Store(0)
			refusaltest.Refused(t, l.observations, tt.passes, l.places(tt.event, tt.metric), ask)
		})
	}
}

// keyless is a key service that knows the cluster, but returns no key; it answers when the test lets it.
type keyless struct {
	kmsv1connect.UnimplementedKeyServiceHandler
	asked   chan<- struct{}
	answers <-chan struct{}
}

func (k keyless) DeriveDiskKey(context.Context, *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
	if k.asked != nil {
		k.asked <- struct{}{}
		<-k.answers
	}
	return nil, connect.NewError(connect.CodeUnimplemented, errors.New("there are no keys"))
}

func (keyless) DeriveClusterId(context.Context, *kmsv1.DeriveClusterIdRequest) (*kmsv1.DeriveClusterIdResponse, error) {
	return &kmsv1.DeriveClusterIdResponse{ClusterId: shared.ID[:]}, nil
}

// serveKeyless serves one from a control plane until the test ends, and returns its URL and the file of a token.
func serveKeyless(t *testing.T, k keyless) func(ca *attesttest.CA, cp1 *attesttest.Machine) (url, token string) {
	return func(ca *attesttest.CA, cp1 *attesttest.Machine) (url, token string) {
		t.Helper()
		token = filepath.Join(t.TempDir(), "token")
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		metrics, merr := rpc.NewMetrics(prometheus.NewRegistry())
		if err := errors.Join(err, merr, os.WriteFile(token, []byte("token"), 0o600)); err != nil {
			t.Fatal(err)
		}
		server, err := rpc.NewServer(rpc.Config{
			Listener: l, Health: rpc.NewHealth(), Metrics: metrics, Log: slog.New(slog.DiscardHandler),
			ATLS: atls.ServerConfig{
				Attester: cp1.Attester(attest.PurposeKMS), Verifier: attesttest.Verifier(t, ca), ClientPurpose: attest.PurposeJoinservice, RefuseUnattested: true, Limits: Limits,
				Generation: func() int64 { return 1 },
				Appraiser:  attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{cp1}).For(attest.LockedTo(shared.ID)),
			},
			Services: []rpc.Service{rpc.Serve(kmsv1connect.KeyServiceName, kmsv1connect.KeyServiceHandler(k), kmsv1connect.NewKeyServiceHandler)},
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		done := make(chan error, 1)
		go func() { done <- server.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		return "https://" + l.Addr().String(), token
	}
}

// waits is what a joinservice says when it checks whether a machine's earlier boot has ended.
const waits = "a machine connects in a later boot; checking whether the kubelet of its previous boot still renews the Lease"

// J2: while a joinservice checks whether a machine's earlier boot has ended, the evidence that the machine has shown gets
// old.
func TestEvidenceThatGrowsOldWhileABootIsLookedForGetsNothing(t *testing.T) {
	for name, ask := range map[string]func(t *testing.T, l *lone) error{
		"a ticket": func(t *testing.T, l *lone) error {
			_, err := l.IssueJoinTicket(t.Context(), ticketRequest(t))
			return err
		},
		"the key of its disk": func(t *testing.T, l *lone) error { return l.rejoin(t) },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLone(t, true, func(*attesttest.Machine) {}, serveKeyless(t, keyless{}))
			hasRun(t, `{"resetCount":0}`)
			see := func(line []byte) {
				if refusaltest.HasLine(line, "msg", waits) {
					l.evidenceIsOld()
				}
			}
			l.logs.Store(&see)
			if err := ask(t, l); rpc.ReasonFrom(err) != attestv1.Reason_REASON_VERDICT_OLD {
				t.Errorf("got %v, want VERDICT_OLD", err)
			}
			if !refusaltest.HasLine(l.observations.Log(), "msg", waits) {
				t.Error("it did not wait")
			}
		})
	}
}

// hasRun patches w1's status, and gives it a Lease. With resetCount 0, the Lease is checked.
func hasRun(t *testing.T, status string) {
	t.Helper()
	ran := client.RawPatch(types.MergePatchType, []byte(`{"status":`+status+`}`))
	if err := shared.Client.Status().Patch(t.Context(), shared.Node(t, "w1"), ran); err != nil {
		t.Fatal(err)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "w1"}}
	lease.Spec.RenewTime = new(metav1.NowMicro())
	if err := shared.Client.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = shared.Client.Delete(context.WithoutCancel(t.Context()), lease) })
}

// J6, J7: nor gets a machine anything that the owner removes from the policy meanwhile.
func TestAMachineThatIsRevokedWhileItsBootIsLookedForGetsNothing(t *testing.T) {
	for name, ask := range map[string]func(t *testing.T, l *lone) error{
		"certificates": func(t *testing.T, l *lone) error {
			w := ticketRequest(t)
			_, err := l.RenewNodeCertificates(t.Context(), &joinv1.RenewNodeCertificatesRequest{KubeletClientCsr: w.GetKubeletClientCsr(), KubeletServingCsr: w.GetKubeletServingCsr(), BootSecret: bytes.Repeat([]byte{1}, 32)})
			return err
		},
		"the new key of a rotation": func(t *testing.T, l *lone) error {
			_, err := l.GetRotatedKey(t.Context(), &joinv1.GetRotatedKeyRequest{NodeName: "w1", BootSecret: bytes.Repeat([]byte{1}, 32), Key: string(clusterinfo.ServiceAccountKey), Id: strings.Repeat("a", 64)})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLone(t, true, func(m *attesttest.Machine) { m.LockTo(shared.ID) })
			hasRun(t, `{"resetCount":0,"lastVerdict":{"accepted":true,"reason":"ACCEPTED","time":"2026-01-01T00:00:00Z"}}`)
			began, answer := make(chan struct{}, 1), make(chan error, 1)
			see := func(line []byte) {
				if refusaltest.HasLine(line, "msg", waits) {
					select {
					case began <- struct{}{}:
					default:
					}
				}
			}
			l.logs.Store(&see)
			go func() { answer <- ask(t, l) }()
			select {
			case <-began:
			case err := <-answer:
				t.Fatalf("it did not wait: %v", err)
			}
			shared.SetPolicy(t, attesttest.Policy(t, l.ca, []*attesttest.Machine{l.cp1}, attesttest.ControlPlanes(l.cp1), func(p *attestv1.Policy) {
				p.Serial++
				p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{l.machine.ID().String()}}
			}))
			if err := <-answer; rpc.ReasonFrom(err) != attestv1.Reason_REASON_EK_UNTRUSTED {
				t.Errorf("got %v, want EK_UNTRUSTED", err)
			}
		})
	}
}

// presented appraises a joinservice by the owner's policy that it presents.
type presented struct{}

func (presented) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	p, err := attest.OpenPolicy(attest.OwnerKeys{shared.Public}, c.SignedPolicy())
	if err != nil {
		return attest.Appraisal{}, err
	}
	return p.AppraiseServer(c, attest.LockedTo(shared.ID))
}
