package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	attesterservice "github.com/muster-k8s/muster/services/bootstrapper/attester"
	"github.com/muster-k8s/muster/services/joinservice"
	"github.com/muster-k8s/muster/services/kms"
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
		return func() error { return errors.Join(rights(ctx), shared.Stop()) }, nil
	})
}

// rights compares the services' rights with their requests in all tests of this package.
func rights(ctx context.Context) error {
	if flag.Lookup("test.run").Value.String() != "" {
		return nil // some tests only
	}
	return errors.Join(shared.CheckRights(ctx, "joinservice"), shared.CheckRights(ctx, "kms"))
}

// fixture is a cluster with one control plane, cp1, that runs the attester, the key service and joinservice, each as on a
// real machine: over sockets, with tokens, and with the chart's rights.
type fixture struct {
	*membertest.Cluster
	ca        *attesttest.CA
	cp1       *attesttest.Machine
	join      *membertest.Service
	kms       *membertest.Service
	audit     string
	readSoFar seenAudit
	rootDir   string
	pki       string
	token     string
	sockets   string
	kubeconf  string
	flags     []string              // beside the usual ones
	timing    joinservice.Timing    // which no flag sets
	apart     bool                  // no joinservice runs in this process
	image     string                // that cp1 boots; empty: the usual one
	listed    []*attesttest.Machine // the policy's control planes: cp1, and planned
	planned   []*attesttest.Machine // those that controlMachine has not returned yet
}

type option func(*fixture)

// auditAt sets the path of the audit log.
func auditAt(path string) option { return func(s *fixture) { s.audit = path } }

// recordsSoon and signsSoon are for tests that wait until joinservice has written what the owner sees, or has given up a
// certificate request.
func recordsSoon(s *fixture) { s.timing.Record = 200 * time.Millisecond }

func signsSoon(s *fixture) { s.timing.Sign = 4 * time.Second }

// booting makes cp1 boot an image of that name.
func booting(image string) option { return func(s *fixture) { s.image = image } }

func setUp(t *testing.T, options ...option) *fixture {
	t.Helper()
	shared.Reset(t)
	dir := t.TempDir()
	s := &fixture{
		Cluster: shared, ca: attesttest.NewCA(t), audit: filepath.Join(dir, "audit.jsonl"), rootDir: filepath.Join(dir, "root"),
		pki: filepath.Join(dir, "pki"), token: filepath.Join(dir, "token"), kubeconf: filepath.Join(dir, "kubeconfig"),
	}
	for _, o := range options {
		o(s)
	}
	s.cp1 = attesttest.NewMachine(t, s.ca, attesttest.Options{Image: s.image})
	s.cp1.LockTo(s.ID)
	for range 8 {
		s.planned = append(s.planned, s.machine(t))
	}
	s.listed = append([]*attesttest.Machine{s.cp1}, s.planned...)
	s.Enroll(t, "cp1", v1alpha1.AttestedNodeSpec{MachineID: s.cp1.ID().String(), Role: v1alpha1.RoleControlPlane, Addresses: []string{"192.168.77.11"}})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cp1"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.77.11"}}}}
	if err := s.Client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	s.policy(t)
	s.writeFiles(t)
	s.serveAttester(t)
	s.serveKMS(t)
	if !s.apart {
		s.serveJoin(t)
	}
	return s
}

// policy puts a policy in force that accepts what cp1 booted.
func (s *fixture) policy(t *testing.T, changes ...func(*attestv1.Policy)) int64 {
	t.Helper()
	changes = append([]func(*attestv1.Policy){attesttest.ControlPlanes(s.listed...), func(p *attestv1.Policy) {
		p.Insecure = &attestv1.InsecureSwitches{AllowPlainState: true}
	}}, changes...)
	return s.SetPolicy(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{s.cp1}, changes...))
}

var pkiFiles = []string{"ca.crt", "ca.key", "sa.pub", "sa.key", "front-proxy-ca.crt", "front-proxy-ca.key", "etcd/ca.crt", "etcd/ca.key", "encryption.yaml"}

// pkiFile returns the content of one of them on cp1.
func (s *fixture) pkiFile(name string) []byte {
	if name == "ca.crt" {
		return s.CA()
	}
	return []byte("content of " + name)
}

func (s *fixture) writeFiles(t *testing.T) {
	t.Helper()
	files := map[string][]byte{filepath.Join(s.rootDir, "root"): s.Root[:], filepath.Join(s.rootDir, "salt"): s.Salt[:]}
	for _, name := range pkiFiles {
		files[filepath.Join(s.pki, name)] = s.pkiFile(name)
	}
	for path, content := range files {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	pod, err := s.Pod(t.Context(), namespace, "joinservice", "cp1")
	if err != nil {
		t.Fatal(err)
	}
	token, err := s.Token(t.Context(), namespace, "joinservice", kms.Audience, pod)
	if err != nil {
		t.Fatal(err)
	}
	api, err := s.As(t.Context(), namespace, "joinservice")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(s.token, []byte(token+"\n"), 0o600), kubetest.WriteKubeconfig(s.kubeconf, api)); err != nil {
		t.Fatal(err)
	}
}

// serveAttester runs cp1's attester on its sockets.
func (s *fixture) serveAttester(t *testing.T) {
	t.Helper()
	// The path of a socket has at most 108 bytes.
	dir, err := os.MkdirTemp("", "muster")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s.sockets = dir
	attesters := map[attest.Purpose]attest.Attester{}
	for _, p := range attesterservice.Purposes {
		attesters[p] = s.cp1.Attester(p)
	}
	server, err := attesterservice.New(attesterservice.Config{Dir: dir, Attesters: attesters, Metrics: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
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
}

func (s *fixture) serveKMS(t *testing.T) {
	t.Helper()
	api, err := s.As(t.Context(), namespace, "kms")
	if err != nil {
		t.Fatal(err)
	}
	s.kms = s.keys(t, api)
}

// kmsAgent is the User-Agent of the key service.
const kmsAgent = "muster-kms/"

// keys runs a key service that reaches the API server by that configuration.
func (s *fixture) keys(t *testing.T, api *rest.Config) *membertest.Service {
	t.Helper()
	api.UserAgent = kmsAgent + "test"
	client, err := attester.New(attester.Socket(s.sockets, attest.PurposeKMS))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return membertest.Serve(t, func(ctx context.Context, rpcs, probes net.Listener, stderr io.Writer) error {
		return kms.Run(ctx, kms.Options{
			Listener: rpcs, Metrics: probes, Attester: client, Owner: attest.OwnerKeys{s.Public}, RootDir: s.rootDir, API: api,
			Audit: audit.NewStream(io.Discard), Log: slog.New(slog.NewJSONHandler(stderr, nil)),
		})
	})
}

// serveJoin runs the program itself, with its flags.
func (s *fixture) serveJoin(t *testing.T) {
	t.Helper()
	s.join = membertest.Serve(t, func(ctx context.Context, rpcs, probes net.Listener, stderr io.Writer) error {
		if err := errors.Join(rpcs.Close(), probes.Close()); err != nil {
			return err
		}
		return run(ctx, s.joinFlags(t, rpcs.Addr(), probes.Addr()), stderr, func(o *joinservice.Options) { o.Timing = s.timing })
	})
}

// joinFlags returns the flags of a joinservice on cp1.
func (s *fixture) joinFlags(t *testing.T, rpcs, probes net.Addr) []string {
	t.Helper()
	return append([]string{
		"--listen=" + rpcs.String(), "--metrics=" + probes.String(), "--node-name=cp1",
		"--attester=" + attester.Socket(s.sockets, attest.PurposeJoinservice), "--owner-keys=" + base64.StdEncoding.EncodeToString(s.Public), "--image=" + image(t),
		"--kms=https://" + s.kms.Addr, "--kms-token=" + s.token, "--pki=" + s.pki, "--audit=" + s.audit, "--kubeconfig=" + s.kubeconf,
		"--first-lease-within=0s", "--lease-watch=300ms", // machines here boot several times a second, and have no kubelet; see watching for those that have one
	}, s.flags...)
}

// machine returns a machine that boots what cp1 did.
func (s *fixture) machine(t *testing.T) *attesttest.Machine {
	t.Helper()
	return attesttest.NewMachine(t, s.ca, attesttest.Options{})
}

// joinRequest is a request with the keys that stay on the machine.
type joinRequest struct {
	*joinv1.IssueJoinTicketRequest
	client, serving *ecdsa.PrivateKey
}

// oneSecret is the boot secret of machines that are not copies, in their first boot. Clients replace it in requests of a
// later boot, see [anew].
var oneSecret = bytes.Repeat([]byte{0xb0}, keys.Size)

// secretOf returns the boot secret of such a machine's present boot.
func secretOf(m interface{ Boots() uint32 }) []byte {
	if n := m.Boots(); n > 1 {
		return append(bytes.Clone(oneSecret[4:]), binary.BigEndian.AppendUint32(nil, n)...)
	}
	return oneSecret
}

const disk1 = "5f0c95b6-2a3d-4c7e-9f10-000000000001"

// worker returns a valid request of worker w1; each change is made before its requests are signed.
func worker(t *testing.T, changes ...func(*requestOptions)) *joinRequest {
	t.Helper()
	w := &requestOptions{name: "w1", disk: disk1, role: joinv1.Role_ROLE_WORKER, mode: joinv1.DiskMode_DISK_MODE_PLAIN, addresses: []string{"192.168.77.12"}}
	for _, c := range changes {
		c(w)
	}
	return w.sign(t)
}

type requestOptions struct {
	name, disk string
	role       joinv1.Role
	mode       joinv1.DiskMode
	addresses  []string
	template   func(client, serving *x509.CertificateRequest)
	request    func(*joinv1.IssueJoinTicketRequest)
}

func named(name, disk string, addresses ...string) func(*requestOptions) {
	return func(w *requestOptions) { w.name, w.disk, w.addresses = name, disk, addresses }
}

func (w *requestOptions) sign(t *testing.T) *joinRequest {
	t.Helper()
	out := &joinRequest{client: newKey(t), serving: newKey(t)}
	subject := pkix.Name{CommonName: "system:node:" + w.name, Organization: []string{"system:nodes"}}
	client := &x509.CertificateRequest{Subject: subject}
	serving := &x509.CertificateRequest{Subject: subject, DNSNames: []string{w.name}}
	for _, a := range w.addresses {
		ip := net.ParseIP(a)
		if v4 := ip.To4(); v4 != nil {
			ip = v4
		}
		serving.IPAddresses = append(serving.IPAddresses, ip)
	}
	if w.template != nil {
		w.template(client, serving)
	}
	out.IssueJoinTicketRequest = &joinv1.IssueJoinTicketRequest{
		NodeName: w.name, Role: w.role, DiskId: w.disk, DiskMode: w.mode,
		KubeletClientCsr: csr(t, client, out.client), KubeletServingCsr: csr(t, serving, out.serving), BootSecret: oneSecret,
	}
	if w.request != nil {
		w.request(out.IssueJoinTicketRequest)
	}
	return out
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func csr(t *testing.T, template *x509.CertificateRequest, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// asNode returns a client with the credentials of a node's ticket.
func (s *fixture) asNode(t *testing.T, w *joinRequest, ticket *joinv1.IssueJoinTicketResponse) client.Client {
	t.Helper()
	der, err := x509.MarshalECPrivateKey(w.client)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(&rest.Config{Host: s.Admin.Host, QPS: -1, TLSClientConfig: rest.TLSClientConfig{
		CAData: ticket.GetCaCertificate(), CertData: ticket.GetKubeletClientCertificate(),
		KeyData: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
	}}, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// observations returns joinservice's own.
func (s *fixture) observations(t *testing.T) refusaltest.Service {
	t.Helper()
	return s.join.Observations(func() []byte { return s.auditSoFar(t) })
}

// records reads the audit log.
func (s *fixture) records(t *testing.T) []audit.Record {
	t.Helper()
	b := s.auditText(t)
	var out []audit.Record
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		var r audit.Record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

func (s *fixture) recorded(t *testing.T, fits func(audit.Record) bool) bool {
	t.Helper()
	for _, r := range s.records(t) {
		if fits(r) {
			return true
		}
	}
	return false
}

func leaf(t *testing.T, chain []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(chain)
	if block == nil {
		t.Fatal("no PEM")
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// heldFor fails the test unless a ticket that failed after certificates were requested has left the name to its machine
// (J2, J4).
func (s *fixture) heldFor(t *testing.T, m *attesttest.Machine, name string) {
	t.Helper()
	n := s.Node(t, name)
	if n == nil || n.Spec.MachineID != m.ID().String() {
		t.Errorf("%s is %+v, want it held for its machine", name, n)
	}
}

// nothingOf fails the test if anything of a refused machine is left.
func (s *fixture) nothingOf(t *testing.T, m *attesttest.Machine) {
	t.Helper()
	l := &v1alpha1.AttestedNodeList{}
	if err := s.Client.List(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	for _, n := range l.Items {
		if n.Spec.MachineID == m.ID().String() {
			t.Errorf("AttestedNode %s is left", n.Name)
		}
	}
}

// filedNothing fails if certificate requests were filed since: a refused machine causes none.
func (s *fixture) filedNothing(t *testing.T, before []string) {
	t.Helper()
	if after := slices.DeleteFunc(s.CSRs(t), func(name string) bool { return slices.Contains(before, name) }); len(after) > 0 {
		t.Errorf("certificate requests were filed: %v", after)
	}
}

// forget deletes enrollments and frees their disks, and waits until joinservice has seen it.
func (s *fixture) forget(t *testing.T, nodes ...string) {
	t.Helper()
	for _, n := range nodes {
		if have := s.Node(t, n); have != nil && have.Spec.DiskID != "" {
			defer s.FreeDisk(t, have.Spec.DiskID)
		}
		if have := s.Node(t, n); have != nil && have.Spec.Role == v1alpha1.RoleControlPlane { // as `muster forget` does
			free := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null},"spec":{"banned":true}}`))
			if err := s.Client.Patch(t.Context(), have, free); err != nil {
				t.Fatal(err)
			}
		}
		if err := client.IgnoreNotFound(s.Client.Delete(t.Context(), &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: n}})); err != nil {
			t.Fatal(err)
		}
	}
	membertest.Eventually(t, func() error {
		list := s.Access(t)
		for _, n := range nodes {
			if e := list.Entry(n); e.Suspended || e.ControlPlane || s.Node(t, n) != nil {
				return fmt.Errorf("the forgotten node %s is enrolled, or its removal has not ended", n)
			}
		}
		return nil
	})
}
