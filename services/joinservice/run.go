package joinservice

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"time"

	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/internal/service"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/joinlease"
	"github.com/muster-k8s/muster/services/joinservice/ownerview"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/services/joinservice/sweeping"
	"github.com/muster-k8s/muster/services/joinservice/token"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Timing are waits of a joinservice; 0 for the default.
type Timing struct {
	// Sign bounds the wait for Kubernetes' signer, see [certificates.Requests].
	Sign time.Duration
	// Record is how often what the owner sees is written, see [ownerview.Records].
	Record time.Duration
	// Sweep is how often enrollments are looked at, see [sweeping.Sweeper].
	Sweep time.Duration
}

// Options are the settings and resources of a joinservice. All fields but Probes, ProxiesFrom and Timing are required.
type Options struct {
	// Listener serves RPCs, Metrics serves metrics and probes in plain HTTP.
	Listener, Metrics net.Listener
	// ProxiesFrom are the addresses of load balancers that send a header of the PROXY protocol, see [serve.Proxied].
	ProxiesFrom []netip.Prefix
	// Limits are [Limits], or a variant with others for one source.
	Limits atls.Limits
	// Probes serves probes too, see [serve.Probes.Local]; nil for none.
	Probes net.Listener
	// Attester makes evidence of this machine with the purpose joinservice.
	Attester attest.Attester
	// Owner has the public keys of which one signs each policy.
	Owner attest.OwnerKeys
	// LowestSerial is the lowest policy serial that this machine's image accepts (B7); 0 for any.
	LowestSerial uint64
	// API is the configuration for the Kubernetes API.
	API *rest.Config
	// KMS is the URL of the key service, Token the file of the projected token for it.
	KMS, Token string
	// VerdictMaxAge is the maximum age of a node's last verdict when its kubelet's certificates are renewed; at least 1
	// min.
	VerdictMaxAge time.Duration
	// Credential is what tickets contain for kubeadm to discover the cluster.
	Credential token.Credential
	// CertificateLife is how long nodes' certificates are valid, at least [state.MinCertificateLife] and what the cluster's
	// signer gives when a kubelet renews.
	CertificateLife time.Duration
	// Leases are the waits for kubelets' Leases.
	Leases enroll.LeaseTimings
	// Timing has no flags: the defaults fit each cluster.
	Timing Timing
	// VanishedAfter and ReleaseAfter define when nodes have vanished, see [sweeping.Config].
	VanishedAfter, ReleaseAfter time.Duration
	// PKI is the folder of the control plane's PKI files.
	PKI string
	// keyTimeout bounds a call of the key service; 0: the constant of that name.
	keyTimeout time.Duration
	// Audit keeps the records; Run does not close it.
	Audit *audit.Log
	Log   *slog.Logger
}

// maxRequest bounds a machine's request, in bytes: two certificate requests and names are less than 8 KiB. Each call is
// charged three times as much, so a replica serves 256 at the same time.
const maxRequest = 16 << 10

// Limits are the defaults, except the number of sessions without evidence, which depends on its memory.
var Limits = atls.Limits{Open: 112}

// Run serves until ctx ends. It closes both listeners.
func Run(ctx context.Context, o Options) error { return run(ctx, o, time.Now) }

// run is Run with the clock now, which measures the age of evidence.
func run(ctx context.Context, o Options, now func() time.Time) error {
	if o.VerdictMaxAge < time.Minute {
		return fmt.Errorf("joinservice: verdicts of at most %s are of no use: no node attests that often", o.VerdictMaxAge)
	}
	m, err := service.New(service.Config{Service: "joinservice", Attester: o.Attester, Owner: o.Owner, LowestSerial: o.LowestSerial, API: o.API, Audit: o.Audit, Log: o.Log})
	if err != nil {
		return err
	}
	presenting, err := evidence.WithPolicy(o.Attester, m.Policy.Signed)
	if err != nil {
		return err
	}
	st, err := state.New(m.Cluster, o.Audit, o.Log, o.CertificateLife)
	if err != nil {
		return err
	}
	list, err := access.Watch(st)
	if err != nil {
		return err
	}
	requests, err := certificates.Watch(st, list)
	if err != nil {
		return err
	}
	requests.Sign = cmp.Or(o.Timing.Sign, requests.Sign)
	enrollments, err := enroll.New(st, list, requests, o.Leases)
	if err != nil {
		return err
	}
	approver, err := requests.NewApprover(list, m.RefusalLimits, m.Policy, o.VerdictMaxAge, m.Registry)
	if err != nil {
		return err
	}
	enforcer, err := sweeping.NewEnforcer(st, list, requests)
	if err != nil {
		return err
	}
	sweeper, err := sweeping.NewSweeper(st, list, requests, enrollments, sweeping.Config{VanishedAfter: o.VanishedAfter, ReleaseAfter: o.ReleaseAfter, VerdictMaxAge: o.VerdictMaxAge, Metrics: m.Registry})
	if err != nil {
		return err
	}
	sweeper.Every = cmp.Or(o.Timing.Sweep, sweeper.Every)
	waiting := ownerview.New(st, enrollments)
	waiting.Every = cmp.Or(o.Timing.Record, waiting.Every)
	parts, tokens := m.Parts(), token.NewIssuer(m.Cluster, o.Log)
	if o.Credential == token.CredentialToken {
		sweeper, err := tokens.NewSweeper()
		if err != nil {
			return err
		}
		parts = append(parts, serve.Part{Name: "tokens", Run: sweeper.Serve})
	}
	members, err := m.MemberAppraiser()
	if err != nil {
		return err
	}
	servers, err := m.ServerAppraiser()
	if err != nil {
		return err
	}
	joiners, err := m.JoinerAppraiser()
	if err != nil {
		return err
	}
	rejoiners, err := m.RejoinerAppraiser()
	if err != nil {
		return err
	}
	refusals, err := NewRefusals(joiners, enrollments, waiting, m.UnattestedRefusals, o.Log)
	if err != nil {
		return err
	}
	toKMS, err := atls.NewTransport(atls.ClientConfig{
		Attester: o.Attester, Verifier: m.Verifier, Appraiser: servers /* A7 */, PeerPurpose: attest.PurposeKMS, Observe: m.RPC.SetUp,
		DialContext: st.DialService(&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}),
	})
	if err != nil {
		return err
	}
	defer func() { _ = toKMS.Close() }()
	ca := func() ([]byte, error) { return caOf(o.PKI, o.API) }
	if _, err := ca(); err != nil {
		return err
	}
	disks := NewKeyService(rpc.HTTPClient(toKMS), o.KMS, o.Token)
	disks.timeout = cmp.Or(o.keyTimeout, disks.timeout)
	svc, err := New(Config{
		Policy: m.Policy, Appraiser: joiners, Members: members, Rejoiners: rejoiners, Interval: reattestEvery(o.VerdictMaxAge), Owner: o.Owner, Enrollments: enrollments, Certificates: requests, Records: waiting, JoinLease: joinlease.New(m.Cluster, o.Log), Tokens: tokens, Cluster: m.Cluster.Info, CA: ca, Credential: o.Credential,
		Keys: disks, PKI: o.PKI, Audit: o.Audit, RefusalLimits: m.RefusalLimits, UnattestedRefusals: m.UnattestedRefusals, Log: o.Log, Metrics: m.Registry,
	})
	if err != nil {
		return err
	}
	svc.now = now
	listener := o.Listener
	if len(o.ProxiesFrom) > 0 {
		listener = serve.NewProxied(listener, o.ProxiesFrom, o.Log)
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: listener,
		ATLS: atls.ServerConfig{
			Attester: presenting, Verifier: m.Verifier, Appraiser: refusals, ClientPurpose: attest.PurposeMachine,
			// A client without evidence gets only a session: the owner's program appraises joinservice over one.
			Generation: m.Policy.Generation, Limits: o.Limits,
			Observe: func(s atls.SetUp) { m.RPC.SetUp(s); refusals.Observe(s) },
		},
		Services: []rpc.Service{rpc.Serve(joinv1connect.JoinServiceName, joinv1connect.JoinServiceHandler(svc), joinv1connect.NewJoinServiceHandler)},
		Health:   m.Health, Metrics: m.RPC, Refused: m.Refused, Log: o.Log, MaxRequest: maxRequest,
	})
	if err != nil {
		return err
	}
	probes := serve.Probes{Listener: o.Metrics, Local: o.Probes, Metrics: m.Registry, Ready: m.Ready(), Log: o.Log}
	return serve.All(ctx, append(parts,
		probes.Part(),
		serve.Part{Name: "rpc", Run: server.Run},
		serve.Part{Name: "refusals", Run: refusals.Serve},
		serve.Part{Name: "records for the owner", Run: waiting.Serve},
		serve.Part{Name: "used certificate requests", Run: requests.Serve},
		serve.Part{Name: "approver", Run: approver.Serve},
		serve.Part{Name: "vanished nodes", Run: sweeper.Serve},
		serve.Part{Name: "bans", Run: func(ctx context.Context) error {
			return enforcer.Serve(ctx, func(id attest.MachineID) { server.CloseMachine(id) })
		}},
		serve.Part{Name: "policy forgets", Run: func(ctx context.Context) error { return forgetWithPolicy(ctx, m.Policy, toKMS) }},
		serve.Part{Name: "policy status", Run: func(ctx context.Context) error {
			return policy.WriteStatus(ctx, m.Cluster.Client, m.Policy, o.Log)
		}},
	)...)
}

// dialTimeout bounds a connection to the key service, which is in the cluster.
const dialTimeout = 5 * time.Second

// forgetWithPolicy makes the next call to the key service appraise it by the policy in force.
func forgetWithPolicy(ctx context.Context, p *policy.Store, t *atls.Transport) error {
	for {
		_, changed := p.Latest()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			t.Forget()
		}
	}
}

// caOf returns the cluster's present CA, two certificates while it is rotated: the file of this control plane, which machines take as their authorities. The
// CA of the API's configuration is from a ConfigMap, which who can write objects could change; it is used where kubeadm keeps the file elsewhere.
func caOf(pki string, c *rest.Config) ([]byte, error) {
	files, err := readPKI(pki, []string{caFile})
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(files[0].GetContent()) {
		err = fmt.Errorf("%s holds no certificate", caFile)
	}
	switch {
	case err == nil:
		return files[0].GetContent(), nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("the cluster's certificate authority: %w", err)
	}
	if len(c.CAData) > 0 {
		return c.CAData, nil
	}
	if c.CAFile == "" {
		return nil, errors.New("the API's configuration names no certificate authority")
	}
	b, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("the cluster's certificate authority: %w", err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("the cluster's certificate authority: %s holds no certificate", c.CAFile)
	}
	return b, nil
}
