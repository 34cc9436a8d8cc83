package kms

import (
	"context"
	"log/slog"
	"net"
	"os"

	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/internal/service"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Options are the settings and resources of a key service. All fields but Probes and Audit are required.
type Options struct {
	// Listener serves RPCs, Metrics serves metrics and probes in plain HTTP.
	Listener, Metrics net.Listener
	// Probes serves probes too, see [serve.Probes.Local]; nil for none.
	Probes net.Listener
	// Attester makes evidence of this machine with the purpose kms.
	Attester attest.Attester
	// Owner has the public keys of which one signs each policy.
	Owner attest.OwnerKeys
	// LowestSerial is the lowest policy serial that this machine's image accepts (B7); 0 for any.
	LowestSerial uint64
	// RootDir is where the Secret muster-kms-root is mounted.
	RootDir string
	// API is the configuration for the Kubernetes API.
	API *rest.Config
	// Audit is the log of audit records, one line each; nil: standard output.
	Audit *audit.Log
	Log   *slog.Logger
}

// Limits are narrower than those of a joinservice: the callers are the joinservices of the cluster's control planes, which
// have one connection each.
var Limits = atls.Limits{SetUp: 64, SetUpPerSource: 16, Open: 16, OpenPerSource: 4, Attested: 64, Bytes: 4 << 20, BytesPerSource: 2 << 20, AttestedBytes: 8 << 20, AttestedBytesPerMachine: 4 << 20}

// Run serves until ctx ends. It closes both listeners.
func Run(ctx context.Context, o Options) error {
	if o.Audit == nil {
		o.Audit = audit.NewStream(os.Stdout)
	}
	m, err := service.New(service.Config{Service: "kms", Attester: o.Attester, Owner: o.Owner, LowestSerial: o.LowestSerial, API: o.API, Audit: o.Audit, Log: o.Log})
	if err != nil {
		return err
	}
	appraiser, err := m.ServerAppraiser() // A7
	if err != nil {
		return err
	}
	svc, err := New(Config{
		Root: MountedRoot(o.RootDir), Review: TokenReview(m.Cluster.Client), Appraiser: appraiser,
		Node: func(name string) (Enrolled, bool) {
			n := m.Cluster.Nodes.ByName(name)
			if n == nil {
				return Enrolled{}, false
			}
			id, err := attest.ParseMachineID(n.Spec.MachineID)
			return Enrolled{Machine: id, Banned: n.ShutOut(), ControlPlane: n.Spec.Role == v1alpha1.RoleControlPlane}, err == nil
		},
		Audit: o.Audit, RefusalLimits: m.RefusalLimits, Log: o.Log, Metrics: m.Registry,
	})
	if err != nil {
		return err
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: o.Listener,
		ATLS: atls.ServerConfig{
			Attester: o.Attester, Verifier: m.Verifier, Appraiser: appraiser, ClientPurpose: attest.PurposeJoinservice, // K2
			Generation: m.Policy.Generation, RefuseUnattested: true, Limits: Limits,
			Observe: func(s atls.SetUp) { m.RPC.SetUp(s); m.UnattestedRefusals.Connection(s, "") },
		},
		Services: []rpc.Service{rpc.Serve(kmsv1connect.KeyServiceName, kmsv1connect.KeyServiceHandler(svc), kmsv1connect.NewKeyServiceHandler)},
		Health:   m.Health, Metrics: m.RPC, Refused: m.Refused, Log: o.Log,
	})
	if err != nil {
		return err
	}
	probes := serve.Probes{Listener: o.Metrics, Local: o.Probes, Metrics: m.Registry, Ready: m.Ready(), Log: o.Log}
	return serve.All(ctx, append(m.Parts(), probes.Part(), serve.Part{Name: "rpc", Run: server.Run})...)
}
