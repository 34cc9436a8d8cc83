// Package member is what Muster's services in a cluster have in common: a view of the cluster, the
// owner's policy, evidence of their own machine, a verifier and judges for others' evidence, and the
// readiness that follows from these.
package service

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// readyInterval is how often health follows readiness.
const readyInterval = time.Second

// Config lists what a Member needs. All fields are required unless they say otherwise.
type Config struct {
	// Attester makes evidence of this machine with the service's purpose.
	Attester attest.Attester
	// Owner is the public key that policies are signed with.
	Owner ed25519.PublicKey
	// LowestSerial is the least serial that a policy may have by this machine's image (B7); 0: any. Not required.
	LowestSerial uint64
	// API is how to reach the Kubernetes API.
	API *rest.Config
	// Service is the service's name in audit records, Audit where they go.
	Service string
	Audit   *audit.Log
	Log     *slog.Logger
}

// Member is one service of a cluster. Use its fields to make what the service has of its own, then
// run its Parts.
type Member struct {
	// Cluster is the view of the Kubernetes API.
	Cluster *clusterview.Cluster
	// Policy is the owner's policy in force.
	Policy *policy.Store
	// Verifier checks others' evidence against the policy's EK roots.
	Verifier attest.Verifier
	// Registry collects the process's metrics, RPC those of its server and clients.
	Registry *prometheus.Registry
	RPC      *rpc.Metrics
	// Health is gRPC's view of readiness.
	Health *rpc.Health
	// UnattestedRefusals keeps the records of who is refused before it reaches the service: its Connection is
	// for the service's [atls.ServerConfig], and Refused for its [rpc.Config].
	UnattestedRefusals *audit.UnattestedRefusals
	// RefusalLimits keeps the records of what those are refused who reach the service.
	RefusalLimits *audit.RefusalLimits

	probe *evidence.Probe
}

// New returns a Member that does nothing yet, or says which part of cfg is missing.
func New(cfg Config) (*Member, error) {
	if err := required.Fields("service.New", cfg, "LowestSerial", "Owner"); err != nil {
		return nil, err
	}
	m := &Member{Registry: prometheus.NewRegistry(), Health: rpc.NewHealth()}
	m.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var err error
	if m.RPC, err = rpc.NewMetrics(m.Registry); err != nil {
		return nil, err
	}
	if m.Policy, err = policy.New(policy.Config{Owner: cfg.Owner, Lowest: cfg.LowestSerial, Log: cfg.Log, Metrics: m.Registry, Tell: cfg.record}); err != nil {
		return nil, err
	}
	if m.UnattestedRefusals, err = audit.NewUnattestedRefusals(cfg.Service, cfg.Audit, cfg.Log, m.Registry); err != nil {
		return nil, err
	}
	if m.RefusalLimits, err = audit.NewRefusalLimits(m.UnattestedRefusals); err != nil {
		return nil, err
	}
	verifier, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: m.Policy.Roots, Now: time.Now})
	if err != nil {
		return nil, err
	}
	m.Verifier = m.Policy.Guard(verifier)
	if m.probe, err = evidence.NewProbe(cfg.Attester, cfg.Log); err != nil {
		return nil, err
	}
	if m.Cluster, err = clusterview.Open(cfg.API, cfg.Log); err != nil {
		return nil, err
	}
	return m, policy.Follow(m.Cluster, m.Policy)
}

// record puts each change of the policy on the audit log: who may come in hangs on it.
func (cfg Config) record(r policy.Report) {
	record := audit.Record{Service: cfg.Service, Event: "policy in force", Reason: attest.ReasonName(attest.ReasonOf(r.Err))}
	if r.Err != nil { // R1
		record.Event, record.Detail = "policy refused", r.Err.Error()
	}
	if r.InForce != nil {
		record.PolicySerial, record.PolicyGeneration = r.InForce.Policy.Serial(), r.InForce.Generation
	}
	if err := cfg.Audit.Write(record); err != nil {
		cfg.Log.Error("the audit record of a change of the policy cannot be written", "reason", record.Reason, "err", err)
	}
}

// Refused is for [rpc.Config].
func (m *Member) Refused(r rpc.Refused) {
	m.UnattestedRefusals.Call(r.Procedure, r.Remote, r.Machine, r.Err)
}

// MemberAppraiser judges machines that belong to this cluster: those of its nodes.
func (m *Member) MemberAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewAppraiser(m.Cluster.Nodes.Banned, m.lockedToOurs)
}

// ServerAppraiser judges the machines of this cluster's joinservices and kms, which the owner's policy lists (A7).
func (m *Member) ServerAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewServerAppraiser(m.Cluster.Nodes.Banned, m.lockedToOurs)
}

func (m *Member) lockedToOurs() ([]attest.Lock, error) {
	info, err := m.Cluster.Info()
	if err != nil {
		return nil, err
	}
	return []attest.Lock{attest.LockedTo(info.ClusterID)}, nil
}

// JoinerAppraiser judges machines that ask to join: unlocked, or locked to this cluster by an attempt
// that did not come to its end.
func (m *Member) JoinerAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewAppraiser(m.Cluster.Nodes.Banned, func() ([]attest.Lock, error) {
		info, err := m.Cluster.Info()
		if err != nil {
			return nil, err
		}
		return []attest.Lock{attest.Unlocked(), attest.LockedTo(info.ClusterID)}, nil
	})
}

// RejoinerAppraiser judges machines that ask for the key of their state disk: those that have rebooted,
// and whose bootstrapper has not yet locked them again. A machine that runs already has its disk open.
func (m *Member) RejoinerAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewAppraiser(m.Cluster.Nodes.Banned, func() ([]attest.Lock, error) {
		return []attest.Lock{attest.Unlocked()}, nil
	})
}

// Ready says by name what must hold for the service to be an endpoint. That the key service or the
// API can be reached is no part of it: a joinservice that is no endpoint can't tell a machine when to
// try again.
func (m *Member) Ready() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"policy":    func(context.Context) error { _, err := m.Policy.Current(); return err },
		"informers": func(context.Context) error { return m.Cluster.Ready() },
		"cluster":   func(context.Context) error { _, err := m.Cluster.Info(); return err },
		"evidence":  func(context.Context) error { return m.probe.Ready() },
	}
}

// Parts are what runs for as long as the service does.
func (m *Member) Parts() []serve.Part {
	return []serve.Part{
		{Name: "informers", Run: m.Cluster.Serve},
		{Name: "own evidence", Run: m.probe.Serve},
		{Name: "health", Run: m.followHealth},
		{Name: "records of strangers", Run: m.UnattestedRefusals.Serve},
		{Name: "numbers of refusals", Run: m.RefusalLimits.Serve},
	}
}

func (m *Member) followHealth(ctx context.Context) error {
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	for {
		ready := true
		for _, check := range m.Ready() {
			ready = ready && check(ctx) == nil
		}
		m.Health.SetAll(ready)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// ParseOwnerKey reads an owner's public key: 32 bytes in base64.
func ParseOwnerKey(s string) (ed25519.PublicKey, error) {
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil || len(b) != ed25519.PublicKeySize {
		return nil, fmt.Errorf("the owner's public key must be %d bytes in base64", ed25519.PublicKeySize)
	}
	return b, nil
}

// API gives the configuration of a kubeconfig file, or for an empty path that of the pod.
func API(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		c, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("no pod of a cluster, and no --kubeconfig: %w", err)
		}
		return c, nil
	}
	return clientcmd.BuildConfigFromFlags("", kubeconfig)
}
