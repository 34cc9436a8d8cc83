package joinservice

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/joinservice/kube"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A connection can be held open for long after what was shown on it: what it showed is then of a machine of
// before, which gets neither the key of a disk nor a verdict.
func TestAConnectionOfBeforeGetsNeitherKeyNorVerdict(t *testing.T) {
	const disk = "5f0c95b6-2a3d-4c7e-9f10-000000000001"
	shared.Reset(t)
	ca := attesttest.NewCA(t)
	cp1, w1 := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	cp1.LockTo(shared.ID)
	shared.SetPolicy(t, attesttest.Policy(t, ca, []*attesttest.Machine{cp1}))
	shared.Enrol(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: w1.ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk})
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
	var ahead atomic.Int64 // of the service's clock
	service := membertest.Serve(t, func(ctx context.Context, rpcs, probes net.Listener, stderr io.Writer) error {
		return run(ctx, Options{
			Listener: rpcs, Metrics: probes, Attester: cp1.Attester(attest.PurposeJoinservice), Owner: shared.Public, API: api,
			KMS: "https://127.0.0.1:1", Token: filepath.Join(filepath.Dir(path), "token"), // there is none, so what passes ends there
			VerdictMaxAge: 15 * time.Minute, CertificateLife: kube.DefaultCertificateLife, VanishedAfter: time.Hour, ReleaseAfter: 25 * time.Hour,
			Credential: kube.CredentialCertificate, PKI: "/nowhere", Audit: log, Log: slog.New(slog.NewJSONHandler(stderr, nil)),
		}, func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	})
	witnesses := service.Witnesses(func() []byte {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
		}
		return b
	})
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: w1.Attester(attest.PurposeMachine), Verifier: attesttest.Verifier(t, ca), PeerPurpose: attest.PurposeJoinservice,
		Appraiser: presented{},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = transport.Close() })
	client := joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), "https://"+service.Addr, rpc.ClientOptions()...)
	rejoin := func() error {
		_, err := client.IssueRejoinTicket(t.Context(), &joinv1.IssueRejoinTicketRequest{NodeName: "w1", Role: joinv1.Role_ROLE_WORKER, DiskId: disk})
		return err
	}
	reattest := func() error {
		_, err := client.Reattest(t.Context(), &joinv1.ReattestRequest{})
		return err
	}
	requests := &joinv1.RenewNodeCertificatesRequest{}
	subject := pkix.Name{CommonName: "system:node:w1", Organization: []string{"system:nodes"}}
	for to, template := range map[*[]byte]*x509.CertificateRequest{
		&requests.KubeletClientCsr:  {Subject: subject},
		&requests.KubeletServingCsr: {Subject: subject, DNSNames: []string{"w1"}, IPAddresses: []net.IP{net.IPv4(192, 168, 77, 12).To4()}},
	} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if *to, err = x509.CreateCertificateRequest(rand.Reader, template, key); err != nil {
			t.Fatal(err)
		}
	}
	renew := func() error {
		_, err := client.RenewNodeCertificates(t.Context(), requests)
		return err
	}

	for name, tt := range map[string]struct {
		ask    func() error
		event  string
		metric string
		passes attestv1.Reason // what comes next
	}{
		"the key of its disk": {rejoin, "rejoin refused", "muster_rejoin_tickets_total", attestv1.Reason_REASON_KMS_UNAVAILABLE},
		"a verdict":           {reattest, "verdict refused", "muster_rpc_requests_total", attestv1.Reason_REASON_LOCK_FOREIGN},
		"its certificates":    {renew, "renewal refused", "muster_rpc_requests_total", attestv1.Reason_REASON_LOCK_FOREIGN},
	} {
		t.Run(name, func(t *testing.T) {
			about := []string{"event", tt.event, "machine", w1.ID().String()}
			places := refusaltest.Places{Metric: []string{tt.metric}, Log: about, Audit: about}
			ahead.Store(0)
			refusaltest.Refused(t, witnesses, tt.passes, places, tt.ask)
			ahead.Store(int64(maxEvidenceAge + time.Second))
			refusaltest.Refused(t, witnesses, attestv1.Reason_REASON_VERDICT_OLD, places, tt.ask)
			ahead.Store(0)
			refusaltest.Refused(t, witnesses, tt.passes, places, tt.ask)
		})
	}
}

// presented judges a joinservice by the owner's policy that it presents.
type presented struct{}

func (presented) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	p, err := attest.OpenPolicy(shared.Public, c.SignedPolicy())
	if err != nil {
		return attest.Appraisal{}, err
	}
	return p.Appraise(c, attest.LockedTo(shared.ID))
}
