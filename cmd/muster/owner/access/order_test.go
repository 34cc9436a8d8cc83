package access

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// orderTaker serves RenewAdministrator over the real attested TLS with genuine evidence. It verifies orders as
// joinservice does, and signs a new certificate at the third request for it.
type orderTaker struct {
	joinv1connect.UnimplementedJoinServiceHandler

	addr  string
	sign  func(*x509.CertificateRequest) []byte // nil: never
	fail  error
	third func() // called at the third call
	// authorities are the cluster's, in PEM, which it sends with the certificate.
	authorities []byte

	mu     sync.Mutex
	owner  ed25519.PublicKey
	orders []ownerorder.Signed
}

func (s *orderTaker) RenewAdministrator(_ context.Context, req *joinv1.RenewAdministratorRequest) (*joinv1.RenewAdministratorResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, err := ownerorder.Parse(req.GetOrder())
	if err != nil {
		return nil, err
	}
	s.orders = append(s.orders, o)
	if err := errors.Join(o.Verify(attest.OwnerKeys{s.owner}, o.Cluster, time.Now()), s.fail); err != nil {
		return nil, err
	}
	if len(s.orders) == 3 {
		s.third()
	}
	if s.sign == nil || len(s.orders) < 3 {
		return &joinv1.RenewAdministratorResponse{RetryAfter: durationpb.New(time.Millisecond)}, nil
	}
	r, err := x509.ParseCertificateRequest(o.Request)
	if err != nil {
		return nil, err
	}
	return &joinv1.RenewAdministratorResponse{Certificate: s.sign(r), CaCertificate: s.authorities}, nil
}

func (s *orderTaker) got() []ownerorder.Signed {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.orders)
}

// After its end the kubeconfig is of no use, and the owner's key gets a new one. The joinservice's machine is
// appraised before.
func TestAnExpiredKubeconfigIsRenewedByTheOwnersOrder(t *testing.T) {
	past, soon, later := time.Now().Add(-time.Minute).Truncate(time.Second), time.Now().Add(time.Minute).Truncate(time.Second), time.Now().Add(20*time.Hour).Truncate(time.Second)
	const first, other = "192.0.2.1:30090", "192.0.2.2:30090"
	none := func(*testing.T, *orderTaker) {}
	type evil func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) []byte
	for name, tt := range map[string]struct {
		holder     pkix.Name
		end        time.Time
		at         string   // where the joinservice answers
		named      []string // by --joinservice
		worker     bool     // the machine is a worker
		foreign    bool     // of another cluster
		otherOwner bool     // its owner is another
		rotated    bool     // the cluster has another authority than the folder knows
		sign       evil
		change     func(*testing.T, *orderTaker)
		impatient  bool
		unsent     bool // no order reaches it
		says, does string
	}{
		"by the cluster":                       {change: none},
		"that ends soon, if one is named":      {end: soon, at: other, named: []string{other}},
		"by an authority since":                {rotated: true},
		"where the first does not answer":      {at: other, named: []string{first, other}},
		"a worker that poses as a joinservice": {worker: true, unsent: true, says: "SERVER_NOT_LISTED", does: "Nothing was sent"},
		"another cluster's joinservice":        {foreign: true, unsent: true, says: "LOCK_FOREIGN", does: "Nothing was sent"},
		"a cluster of another owner":           {otherOwner: true, says: "OWNER_SIGNATURE", does: "owner's folder"},
		"a clock that is off": {change: func(_ *testing.T, s *orderTaker) {
			s.fail = attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "the order was signed at noon")
		}, says: "signed at noon", does: "clock"},
		"denied by the control planes": {change: func(_ *testing.T, s *orderTaker) {
			s.fail = attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "the cluster's control planes deny it")
		}, says: "deny it", does: "ownerKey"},
		"never signed":     {change: func(_ *testing.T, s *orderTaker) { s.sign = nil }, impatient: true, says: "no control plane has signed the certificate", does: "muster-renewal"},
		"nobody answers":   {at: other, impatient: true, unsent: true, says: "deadline exceeded", does: "--joinservice"},
		"of another name":  {holder: pkix.Name{CommonName: "somebody", Organization: []string{ownerorder.Group}}, unsent: true, says: "renew only kubernetes-admin", does: "Copy"},
		"of another group": {holder: pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{"system:masters"}}, unsent: true, says: "kubeadm:cluster-admins", does: "Copy"},
		"for another key": {says: "another key", sign: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) []byte {
			return ownertest.PEMOf(ca.Client(t, r.Subject, ownertest.NewAuthority(t).Key.Public(), later))
		}},
		"for somebody else": {says: "it is for", sign: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) []byte {
			return ownertest.PEMOf(ca.Client(t, pkix.Name{CommonName: "nobody"}, r.PublicKey, later))
		}},
		"by another authority": {says: "a CA that the folder does not trust", sign: func(t *testing.T, _ ownertest.Authority, r *x509.CertificateRequest) []byte {
			return ownertest.PEMOf(ownertest.NewAuthority(t).Client(t, r.Subject, r.PublicKey, later))
		}},
		"one that ends earlier": {says: "no later", end: later.Add(time.Hour), named: []string{first}},
	} {
		t.Run(name, func(t *testing.T) {
			vendor := attesttest.NewCA(t)
			cp, worker := attesttest.NewMachine(t, vendor, attesttest.Options{}), attesttest.NewMachine(t, vendor, attesttest.Options{})
			m := cp
			if tt.worker {
				m = worker
			}
			ca := ownertest.NewAuthority(t)
			api := &ownertest.APIServer{CA: ca, Accepts: true}
			if tt.rotated {
				was := ca
				ca = ownertest.NewAuthority(t)
				api.CA, api.Before = ca, &was
			}
			holder, end := ownertest.Administrator, past
			if tt.holder.CommonName != "" {
				holder = tt.holder
			}
			if !tt.end.IsZero() {
				end = tt.end
			}
			dir := ownertest.Administered(t, api, holder, end, attesttest.Policy(t, vendor, []*attesttest.Machine{cp, worker}, attesttest.ControlPlanes(cp)))
			c := dir.Cluster()
			c.Stage, c.ClusterID = ownerdir.StageInstalled, dir.ClusterID().String()
			if err := dir.Save(c); err != nil {
				t.Fatal(err)
			}
			id := dir.ClusterID()
			if tt.foreign {
				id[0]++
			}
			m.LockTo(id)
			s := &orderTaker{sign: func(r *x509.CertificateRequest) []byte {
				return ownertest.PEMOf(ca.Client(t, r.Subject, r.PublicKey, later))
			}}
			key, err := dir.OwnerKey()
			if err != nil {
				t.Fatal(err)
			}
			s.owner = PublicOf(key)
			if tt.otherOwner {
				if s.owner, _, err = ed25519.GenerateKey(nil); err != nil {
					t.Fatal(err)
				}
			}
			if tt.rotated {
				s.authorities = ownertest.PEMOf(ca.Cert)
			}
			if tt.sign != nil {
				s.sign = func(r *x509.CertificateRequest) []byte { return tt.sign(t, ca, r) }
			}
			if tt.change != nil {
				tt.change(t, s)
			}
			l := ownertest.Listen(t)
			ownertest.Serve(t, l, m.Attester(attest.PurposeJoinservice), rpc.Serve(joinv1connect.JoinServiceName, joinv1connect.JoinServiceHandler(s), joinv1connect.NewJoinServiceHandler))
			if s.addr = tt.at; s.addr == "" {
				s.addr = first
			}
			ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
			defer cancel()
			ctx, enough := context.WithCancelCause(ctx)
			defer enough(nil)
			s.third = func() {
				if tt.impatient {
					enough(context.DeadlineExceeded) // as --timeout does
				}
			}
			dials := 0
			before, _ := dir.AdminConf(t)
			got, err := RenewKubeconfig(ctx, RenewConfig{
				Dir: dir.Dir, Joinservices: tt.named, Now: time.Now, Report: dir.Report(RenewSteps),
				DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
					if addr != s.addr {
						if dials++; dials == 3 {
							s.third()
						}
						return nil, &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
					}
					return new(net.Dialer).DialContext(ctx, network, l.Addr().String())
				},
			})
			after, private := dir.AdminConf(t)
			orders := s.got()
			if tt.unsent != (len(orders) == 0) {
				t.Errorf("%d orders reached the joinservice", len(orders))
			}
			if slices.ContainsFunc(orders, func(o ownerorder.Signed) bool { return o.Name() != orders[0].Name() || o.Cluster != dir.ClusterID() }) {
				t.Error("these were several orders, or for another cluster")
			}
			if api.Filed != nil {
				t.Error("a request was filed with the kubeconfig")
			}
			if tt.says != "" {
				if err == nil || !strings.Contains(err.Error(), tt.says) || !strings.Contains(problem.Explain(err).Remedy, tt.does) {
					t.Errorf("error %v, remedy %q; want %q and %q", err, problem.Explain(err).Remedy, tt.says, tt.does)
				}
				if after != before {
					t.Error("the old kubeconfig is gone")
				}
				return
			}
			if err != nil || !got.Equal(later) || after == before || strings.Contains(before, private) {
				t.Fatalf("ends at %s, %v", got, err)
			}
			conf, err := clientcmd.Load([]byte(after))
			if err != nil {
				t.Fatal(err)
			}
			if got := conf.Clusters["c"].CertificateAuthorityData; string(got) != string(ownertest.PEMOf(ca.Cert)) {
				t.Errorf("it trusts %s", got)
			}
			user := conf.AuthInfos["u"]
			if pair, err := tls.X509KeyPair(user.ClientCertificateData, user.ClientKeyData); err != nil || pair.Leaf.Subject.String() != ownertest.Administrator.String() {
				t.Errorf("the renewed kubeconfig is not as it should be: %v", err)
			}
			if !strings.Contains(dir.Out.String(), "appraised: control plane "+cp.ID().String()) {
				t.Errorf("the output does not name the appraised machine:\n%s", dir.Out)
			}
		})
	}
}
