package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

var clusterID = [32]byte(bytes.Repeat([]byte{0xC1}, 32))

// joinservice is a cluster with one joinservice on a machine of its own: real attested TLS, real certificates, and scripted answers.
type joinservice struct {
	joinv1connect.UnimplementedJoinServiceHandler // a running machine requests no rejoin ticket

	t       testing.TB
	addr    string
	host    *attesttest.Machine
	signed  *attestv1.SignedPolicy
	key     *ecdsa.PrivateKey
	ca      *x509.Certificate
	fixture *fixture

	mu       sync.Mutex
	answer   func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) // nil: a ticket
	change   func(*joinv1.IssueJoinTicketResponse)
	requests []*joinv1.IssueJoinTicketRequest
	callers  []attest.MachineID
	returned [][]byte
	keys     [][]byte                                      // the owner's, of the latest Reattest call
	reports  []*joinv1.OrderReport                         // of Reattest calls
	attested []attest.Peer                                 // the peers of Reattest calls
	again    func(n int) (*joinv1.ReattestResponse, error) // returns the nth answer; nil: an empty one
	at       []time.Time
	lease    time.Duration // of a control plane's join lease
	renewals []*joinv1.RenewJoinLeaseRequest
	renewal  func(n int) error // returns the nth answer; nil: the lease is renewed
	ahead    atomic.Int64      // offset of the cluster's clock
	renewed  []*joinv1.RenewNodeCertificatesRequest
	renew    func(n int, out *joinv1.RenewNodeCertificatesResponse) error // changes the nth answer; nil: certificates
	trusted  [][]byte                                                     // the authorities of the last report
	rotated  func(*joinv1.GetRotatedKeyRequest) ([]byte, error)           // nil: it has no key of a rotation
}

// signs sets the policy that the joinservice shows from now on.
func (j *joinservice) signs(p *attestv1.SignedPolicy) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.signed = p
}

// newJoinservice starts a joinservice that admits the fixture's machine as it was booted. It runs on host, and presents a policy that owner signed and
// that lists the host, with the changes.
func newJoinservice(t testing.TB, w *fixture, host *attesttest.Machine, owner ed25519.PrivateKey, changes ...func(*attestv1.Policy)) *joinservice {
	t.Helper()
	policy := attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, slices.Insert(changes, 0, attesttest.ControlPlanes(host))...)
	j := &joinservice{t: t, host: host, lease: time.Minute, signed: attest.SignPolicy(owner, policy), fixture: w}
	var err error
	if j.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	j.ca = j.sign(template, template, &j.key.PublicKey)
	host.LockTo(clusterID)
	attester, err := evidence.WithPolicy(host.Attester(attest.PurposeJoinservice), func() *attestv1.SignedPolicy {
		j.mu.Lock()
		defer j.mu.Unlock()
		return j.signed
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	j.addr = l.Addr().String()
	calls, err := rpc.NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: rpc.NewHealth(), Metrics: calls, Log: slog.New(slog.DiscardHandler), Grace: time.Second,
		ATLS: atls.ServerConfig{
			Attester: attester, Verifier: attesttest.Verifier(t, w.ca), ClientPurpose: attest.PurposeMachine, Generation: func() int64 { return 0 },
			Appraiser: attesttest.ParsedPolicy(t, w.ca, []*attesttest.Machine{w.tpm}).For(attest.Unlocked(), attest.LockedTo(clusterID)),
		},
		Services: []rpc.Service{rpc.Serve[joinv1connect.JoinServiceHandler](joinv1connect.JoinServiceName, j, joinv1connect.NewJoinServiceHandler)},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return j
}

func (j *joinservice) sign(template, parent *x509.Certificate, public any) *x509.Certificate {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, j.key)
	if err != nil {
		j.t.Error(err)
		return nil
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		j.t.Error(err)
	}
	return c
}

func certPEM(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// keyPEM returns the authority's key.
func (j *joinservice) keyPEM() []byte {
	der, err := x509.MarshalECPrivateKey(j.key)
	if err != nil {
		j.t.Error(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

// issue signs a certificate request as Kubernetes' signers do.
func (j *joinservice) issue(csr []byte, use x509.ExtKeyUsage) []byte {
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		j.t.Error(err)
		return nil
	}
	return certPEM(j.sign(&x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: r.Subject, DNSNames: r.DNSNames, IPAddresses: r.IPAddresses,
		NotBefore: j.now().Add(-time.Minute), NotAfter: j.now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{use},
	}, j.ca, r.PublicKey))
}

// now returns the time of the cluster's clock.
func (j *joinservice) now() time.Time { return time.Now().Add(time.Duration(j.ahead.Load())) }

func (j *joinservice) RenewNodeCertificates(_ context.Context, req *joinv1.RenewNodeCertificatesRequest) (*joinv1.RenewNodeCertificatesResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.renewed = append(j.renewed, req)
	out := &joinv1.RenewNodeCertificatesResponse{
		RenewalId:                 bytes.Repeat([]byte{8}, 16),
		KubeletClientCertificate:  j.issue(req.GetKubeletClientCsr(), x509.ExtKeyUsageClientAuth),
		KubeletServingCertificate: j.issue(req.GetKubeletServingCsr(), x509.ExtKeyUsageServerAuth),
	}
	if j.renew != nil {
		if err := j.renew(len(j.renewed), out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// onRenewal sets how renewals are answered.
func (j *joinservice) onRenewal(renew func(n int, out *joinv1.RenewNodeCertificatesResponse) error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.renew = renew
}

// renewedCSRs returns the certificate renewal requests so far.
func (j *joinservice) renewedCSRs() []*joinv1.RenewNodeCertificatesRequest {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.renewed)
}

var pkiFiles = []string{"ca.crt", "ca.key", "encryption.yaml", "etcd/ca.crt", "etcd/ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "sa.pub"}

func (j *joinservice) IssueJoinTicket(ctx context.Context, req *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
	j.mu.Lock()
	j.requests, j.at = append(j.requests, req), append(j.at, time.Now())
	if p, ok := attest.PeerFrom(ctx); ok {
		j.callers = append(j.callers, p.Machine())
	}
	answer, change := j.answer, j.change
	j.mu.Unlock()
	if answer != nil {
		if resp, err := answer(ctx, req); resp != nil || err != nil {
			return resp, err
		}
	}
	resp := &joinv1.IssueJoinTicketResponse{
		TicketId: bytes.Repeat([]byte{7}, 16), DiskKey: bytes.Repeat([]byte{0xD1}, 32), ClusterId: clusterID[:], KubernetesVersion: "1.36.1",
		ControlPlaneEndpoint: "192.168.77.1:6443", CaCertificate: certPEM(j.ca), Components: j.fixture.components(), Images: machinetest.Images().References(),
		KubeletClientCertificate:  j.issue(req.GetKubeletClientCsr(), x509.ExtKeyUsageClientAuth),
		KubeletServingCertificate: j.issue(req.GetKubeletServingCsr(), x509.ExtKeyUsageServerAuth),
	}
	if req.GetRole() == joinv1.Role_ROLE_CONTROL_PLANE {
		for _, f := range pkiFiles {
			content := []byte("content of " + f)
			switch f {
			case "ca.crt":
				content = certPEM(j.ca)
			case "ca.key":
				content = j.keyPEM()
			}
			resp.ControlPlaneFiles = append(resp.ControlPlaneFiles, &joinv1.ControlPlaneFile{Path: f, Content: content})
		}
		resp.LeaseLifetime, resp.ControlPlaneAddresses = durationpb.New(j.lease), []string{"192.168.77.21"}
	}
	if change != nil {
		change(resp)
	}
	return resp, nil
}

func (j *joinservice) ReturnJoinTicket(_ context.Context, req *joinv1.ReturnJoinTicketRequest) (*joinv1.ReturnJoinTicketResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.returned = append(j.returned, req.GetTicketId())
	return &joinv1.ReturnJoinTicketResponse{}, nil
}

func (j *joinservice) Reattest(ctx context.Context, req *joinv1.ReattestRequest) (*joinv1.ReattestResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.keys, j.trusted = req.GetOwnerKeys(), req.GetAuthorities()
	j.reports = append(j.reports, req.GetOrder())
	if p, ok := attest.PeerFrom(ctx); ok {
		j.attested = append(j.attested, p)
	}
	if j.again != nil {
		return j.again(len(j.attested))
	}
	return &joinv1.ReattestResponse{}, nil
}

func (j *joinservice) RenewJoinLease(_ context.Context, req *joinv1.RenewJoinLeaseRequest) (*joinv1.RenewJoinLeaseResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.renewals = append(j.renewals, req)
	if j.renewal != nil {
		if err := j.renewal(len(j.renewals)); err != nil {
			return nil, err
		}
	}
	if req.GetDone() {
		return &joinv1.RenewJoinLeaseResponse{}, nil
	}
	return &joinv1.RenewJoinLeaseResponse{Lifetime: durationpb.New(j.lease)}, nil
}

// leases returns how often a join lease was renewed, and how often one was ended.
func (j *joinservice) leases() (renewed, ended int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, r := range j.renewals {
		if r.GetDone() {
			ended++
		} else {
			renewed++
		}
	}
	return renewed, ended
}

func (j *joinservice) asked() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.requests)
}

func (j *joinservice) script(answer func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error), change func(*joinv1.IssueJoinTicketResponse)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.answer, j.change = answer, change
}

func (j *joinservice) givenBack() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.returned)
}
