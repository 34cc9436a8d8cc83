package crash

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

var joinCluster = [32]byte(bytes.Repeat([]byte{0xC1}, 32))

// joinservice is a cluster of one joinservice, on a machine of its own: real attested TLS and real certificates. It
// admits every genuine machine that is unlocked or locked to its cluster.
type joinservice struct {
	joinv1connect.UnimplementedJoinServiceHandler
	t        testing.TB
	b        *bench
	addr     string
	ownerKey ed25519.PublicKey
	owner    ed25519.PrivateKey
	machine  attest.MachineID // that asks
	key      *ecdsa.PrivateKey

	mu       sync.Mutex
	delay    time.Duration    // before an answer
	gate     chan struct{}    // a ticket is answered once it is closed; nil: at once
	now      func() time.Time // of the cluster
	ca       []byte           // the authority of the last ticket, in PEM
	asked    int              // requests for a ticket
	issued   int
	returned int
	rejoins  int
	root     *keys.Root // of encrypted disks' keys; nil: all disks have one key, and no machine is enrolled
	enrolled map[attest.MachineID]*joinv1.IssueJoinTicketRequest
}

// machineOf returns the ID of the bench's machine.
func machineOf(t *testing.T, b *bench) attest.MachineID {
	t.Helper()
	ek, err := b.tpm.Open().EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(ek.Certificates[0])
	if err != nil {
		t.Fatal(err)
	}
	return attest.MachineIDOf(cert.RawSubjectPublicKeyInfo)
}

// signs has the owner sign an init of the machine that asks (B10).
func (j *joinservice) signs(req *initv1.InitRequest, cluster keys.ClusterID) {
	req.OwnerSignature = ownerorder.Init{Cluster: cluster, Machine: j.machine}.Sign(j.owner)
}

func newJoinservice(t *testing.T, b *bench) *joinservice {
	t.Helper()
	pub, priv, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	j := &joinservice{t: t, b: b, ownerKey: pub, owner: priv, machine: machineOf(t, b), now: time.Now}
	if j.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	vendor := attesttest.NewCA(t)
	on := attesttest.NewMachine(t, vendor, attesttest.Options{})
	on.LockTo(joinCluster)
	signed := attest.SignPolicy(priv, attesttest.Policy(t, vendor, []*attesttest.Machine{on}, attesttest.ControlPlanes(on)))
	attester, err := evidence.WithPolicy(on.Attester(attest.PurposeJoinservice), func() *attestv1.SignedPolicy { return signed })
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
	verifier, err := verifierOf([]*x509.Certificate{b.tpm.Root})
	if err != nil {
		t.Fatal(err)
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: rpc.NewHealth(), Metrics: calls, Log: slog.New(slog.DiscardHandler), Grace: time.Second, Timeout: patience,
		ATLS: atls.ServerConfig{
			Attester: attester, Verifier: verifier, ClientPurpose: attest.PurposeMachine, Generation: func() int64 { return 0 },
			Appraiser: inState{attest.Unlocked(), attest.LockedTo(joinCluster)}, Limits: atls.Limits{Rate: 100000, Burst: 100000},
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

// certificate makes one as Kubernetes signs them: from five minutes ago, by the clock of the cluster, for a day.
func (j *joinservice) certificate(template, parent *x509.Certificate, public any) (*x509.Certificate, error) {
	now := j.now()
	template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(now.UnixNano()), now.Add(-5*time.Minute), now.Add(24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, j.key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func inPEM(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// components is what each machine installs.
func (j *joinservice) components() []*initv1.Component {
	sum := sha256.Sum256(kubeadmBinary)
	return []*initv1.Component{{Url: j.b.mirror + "/kubeadm", Sha256: sum[:], Path: "/usr/local/bin/kubeadm", Mode: 0o755}}
}

// file is a file of a control plane: the authority, or text in PEM.
func (j *joinservice) file(name string) *joinv1.ControlPlaneFile {
	content := pem.EncodeToMemory(&pem.Block{Type: "TEST", Bytes: []byte("content of " + name)})
	switch name {
	case component.CA:
		content = j.ca
	case "ca.key":
		der, err := x509.MarshalECPrivateKey(j.key)
		if err != nil {
			panic(err) // it is a P-256 key
		}
		content = pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	}
	return &joinv1.ControlPlaneFile{Path: name, Content: content}
}

func (j *joinservice) answer(req *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
	authority := &x509.Certificate{Subject: pkix.Name{CommonName: "kubernetes"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	ca, err := j.certificate(authority, authority, &j.key.PublicKey)
	if err != nil {
		return nil, err
	}
	j.ca = inPEM(ca)
	out := &joinv1.IssueJoinTicketResponse{
		TicketId: bytes.Repeat([]byte{7}, 16), DiskKey: bytes.Repeat([]byte{0xD1}, 32), ClusterId: joinCluster[:], KubernetesVersion: "1.36.1",
		ControlPlaneEndpoint: "192.168.77.1:6443", CaCertificate: j.ca,
		Components: j.components(), Images: machinetest.Images().References(),
	}
	for _, c := range []struct {
		csr []byte
		to  *[]byte
		use x509.ExtKeyUsage
	}{
		{req.GetKubeletClientCsr(), &out.KubeletClientCertificate, x509.ExtKeyUsageClientAuth},
		{req.GetKubeletServingCsr(), &out.KubeletServingCertificate, x509.ExtKeyUsageServerAuth},
	} {
		r, err := x509.ParseCertificateRequest(c.csr)
		if err != nil {
			return nil, err
		}
		leaf, err := j.certificate(&x509.Certificate{Subject: r.Subject, DNSNames: r.DNSNames, IPAddresses: r.IPAddresses, ExtKeyUsage: []x509.ExtKeyUsage{c.use}}, ca, r.PublicKey)
		if err != nil {
			return nil, err
		}
		*c.to = inPEM(leaf)
	}
	if req.GetRole() == joinv1.Role_ROLE_CONTROL_PLANE {
		for _, f := range []string{"ca.crt", "ca.key", "encryption.yaml", "etcd/ca.crt", "etcd/ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "sa.pub"} {
			out.ControlPlaneFiles = append(out.ControlPlaneFiles, j.file(f))
		}
		out.LeaseLifetime, out.ControlPlaneAddresses = durationpb.New(time.Minute), []string{"192.168.77.21"}
	}
	return out, nil
}

// RenewJoinLease implements [joinv1connect.JoinServiceHandler].
func (j *joinservice) RenewJoinLease(context.Context, *joinv1.RenewJoinLeaseRequest) (*joinv1.RenewJoinLeaseResponse, error) {
	return &joinv1.RenewJoinLeaseResponse{Lifetime: durationpb.New(time.Minute)}, nil
}

// IssueJoinTicket implements [joinv1connect.JoinServiceHandler].
func (j *joinservice) IssueJoinTicket(ctx context.Context, req *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
	j.mu.Lock()
	j.asked++
	delay, gate := j.delay, j.gate
	j.mu.Unlock()
	if gate == nil {
		gate = make(chan struct{})
		wait := time.AfterFunc(delay, func() { close(gate) })
		defer wait.Stop()
	}
	select {
	case <-gate:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.issued++
	resp, err := j.answer(req)
	if err == nil && j.root != nil {
		resp.DiskKey, err = j.enroll(ctx, req)
	}
	return resp, err
}

// ReturnJoinTicket implements [joinv1connect.JoinServiceHandler].
func (j *joinservice) ReturnJoinTicket(context.Context, *joinv1.ReturnJoinTicketRequest) (*joinv1.ReturnJoinTicketResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.returned++
	return &joinv1.ReturnJoinTicketResponse{}, nil
}

// counts returns how many tickets were issued and how many came back since the last call.
func (j *joinservice) counts() (issued, returned int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	issued, returned = j.issued, j.returned
	j.issued, j.returned = 0, 0
	return issued, returned
}

// shut blocks requests for a ticket until open is called.
func (j *joinservice) shut() (open func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	gate := make(chan struct{})
	j.gate, j.asked = gate, 0
	return sync.OnceFunc(func() { close(gate) })
}

// soFar returns how many tickets were asked for since shut, and how many came back since counts.
func (j *joinservice) soFar() (asked, returned int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.asked, j.returned
}
