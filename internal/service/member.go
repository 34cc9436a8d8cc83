// Package service is the common part of Muster's services in a cluster: a view of the cluster, the owner's policy, evidence
// of their own machine, a verifier and appraisers for peers' evidence, and the readiness that depends on these.
package service

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/internal/apiserver"
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

// readyInterval is how often health is updated from readiness.
const readyInterval = time.Second

// Config lists what a Member needs. All fields are required unless their comments say otherwise.
type Config struct {
	// Attester makes evidence of this machine with the service's purpose.
	Attester attest.Attester
	// Owner has the public keys of which one signs each policy.
	Owner attest.OwnerKeys
	// LowestSerial is the lowest policy serial that this machine's image accepts (B7); 0 for any. Not required.
	LowestSerial uint64
	// API is the configuration for the Kubernetes API.
	API *rest.Config
	// Service is the service's name in audit records, Audit their log.
	Service string
	Audit   *audit.Log
	Log     *slog.Logger
}

// Member is one service of a cluster. Use its fields to create the service's own parts, then run its Parts.
type Member struct {
	// Cluster is the view of the Kubernetes API.
	Cluster *clusterview.Cluster
	// Policy is the owner's policy in force.
	Policy *policy.Store
	// Verifier checks peers' evidence against the policy's EK roots.
	Verifier attest.Verifier
	// Registry collects the process's metrics, RPC those of its server and clients.
	Registry *prometheus.Registry
	RPC      *rpc.Metrics
	// Health is gRPC's health service, which follows readiness.
	Health *rpc.Health
	// UnattestedRefusals records peers that are refused before they reach the service: its Connection is for the service's
	// [atls.ServerConfig], and Refused for its [rpc.Config].
	UnattestedRefusals *audit.UnattestedRefusals
	// RefusalLimits records refusals of peers that reached the service.
	RefusalLimits *audit.RefusalLimits

	probe *evidence.Probe
}

// New returns a Member that is not running yet, or an error that names the missing field of cfg.
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
	if m.Policy, err = policy.New(policy.Config{Owner: cfg.Owner, Lowest: cfg.LowestSerial, Log: cfg.Log, Metrics: m.Registry, OnReport: cfg.record}); err != nil {
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

// record writes each change of the policy to the audit log: it decides which machines are admitted.
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

// MemberAppraiser returns the appraiser for machines that belong to this cluster: those of its nodes.
func (m *Member) MemberAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewAppraiser(m.Cluster.Nodes.Banned, m.lockedToOurs)
}

// ServerAppraiser returns the appraiser for the machines of this cluster's joinservices and kms, which the owner's policy
// lists (A7).
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

// JoinerAppraiser returns the appraiser for machines that ask to join: unlocked, or locked to this cluster by an attempt
// that was not completed.
func (m *Member) JoinerAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewAppraiser(m.Cluster.Nodes.Banned, func() ([]attest.Lock, error) {
		info, err := m.Cluster.Info()
		if err != nil {
			return nil, err
		}
		return []attest.Lock{attest.Unlocked(), attest.LockedTo(info.ClusterID)}, nil
	})
}

// RejoinerAppraiser returns the appraiser for machines that ask for the key of their state disk: those that have rebooted,
// and whose bootstrapper has not yet locked them again. A machine that runs already has its disk open.
func (m *Member) RejoinerAppraiser() (*policy.Appraiser, error) {
	return m.Policy.NewAppraiser(m.Cluster.Nodes.Banned, func() ([]attest.Lock, error) {
		return []attest.Lock{attest.Unlocked()}, nil
	})
}

// Ready returns the named checks that must pass for the service to be an endpoint. Whether the key service and the API can
// be reached is not checked: a joinservice that is not an endpoint can't send a machine the time of the next attempt.
func (m *Member) Ready() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"policy":    func(context.Context) error { _, err := m.Policy.Current(); return err },
		"informers": func(context.Context) error { return m.Cluster.Ready() },
		"cluster":   func(context.Context) error { _, err := m.Cluster.Info(); return err },
		"evidence":  func(context.Context) error { return m.probe.Ready() },
	}
}

// Parts returns the parts that run as long as the service.
func (m *Member) Parts() []serve.Part {
	return []serve.Part{
		{Name: "informers", Run: m.Cluster.Serve},
		{Name: "own evidence", Run: m.probe.Serve},
		{Name: "health", Run: m.followHealth},
		{Name: "records of unattested refusals", Run: m.UnattestedRefusals.Serve},
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

// API returns the configuration of a kubeconfig file, or for an empty path that of the pod.
func API(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		c, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("no pod of a cluster, and no --kubeconfig: %w", err)
		}
		c.Wrap(apiserver.Only)
		return c, nil
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err == nil {
		c.Wrap(apiserver.Only)
	}
	return c, err
}
