package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/services/bootstrapper/attester"
	"github.com/muster-k8s/muster/services/bootstrapper/backups"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/reattestation"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Options are what the process needs beside the Bootstrapper's own configuration.
type Options struct {
	// Config is the Bootstrapper's, without Metrics and Calls.
	Config
	// Public makes public evidence, for GetEvidence.
	Public rpc.PublicAttester
}

func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// InitLimits are narrower than those of a joinservice, since the machine's owner is the only caller, except for the size of a request with the init
// secret.
var InitLimits = atls.Limits{
	SetUp: 256, SetUpPerSource: 16, Open: 256, OpenPerSource: 8, Total: 64, Bytes: 12 << 20, BytesPerSource: 4 << 20, ConnBytes: 16 << 10,
	Large: 16, LargePerSource: 4, LargeBytes: 512 << 10,
}

// maxInit bounds the owner's request, in bytes: it lists components and their addresses.
const maxInit = 256 << 10

// Serve runs `bootstrapper run`: the init server, the join client and the probes. It returns nil once the machine is a node.
func Serve(ctx context.Context, o Options) error {
	if o.Image == nil || o.Public == nil || o.Log == nil || o.Attester == nil {
		return errors.New("bootstrapper: Serve: Image, Attester, Public and Log are required")
	}
	registry := newRegistry()
	quotes, err := newQuoteSeconds(registry)
	if err != nil {
		return err
	}
	o.Metrics, o.Attester = registry, measureQuotes(o.Attester, attest.PurposeMachine, quotes)
	calls, err := rpc.NewMetrics(registry)
	if err != nil {
		return err
	}
	o.Calls = calls
	b, err := New(ctx, o.Config)
	if err != nil {
		return err
	}
	public, err := rpc.NewEvidence(o.Public)
	if err != nil {
		return err
	}
	probes, err := serve.Listen(ctx, "listen.metrics", o.Image.Listen.Metrics)
	if err != nil {
		return err
	}
	port, err := serve.Listen(ctx, "listen.init", o.Image.Listen.Init)
	if err != nil {
		return errors.Join(err, probes.Close())
	}
	health := rpc.NewHealth()
	server, err := rpc.NewServer(rpc.Config{
		Listener: port, Health: health, Metrics: calls, Log: o.Log,
		// The caller is the owner's program, which has no TPM: it appraises this machine, and authenticates itself by the init secret.
		ATLS:       atls.ServerConfig{Attester: o.Attester, Appraiser: atls.NoAppraiser, Limits: InitLimits, Challenges: atls.NewChallengeQueue()},
		MaxRequest: maxInit,
		Services: []rpc.Service{
			rpc.Serve[initv1connect.InitServiceHandler](initv1connect.InitServiceName, b.init, initv1connect.NewInitServiceHandler),
			rpc.Serve[initv1connect.MachineServiceHandler](initv1connect.MachineServiceName, b, initv1connect.NewMachineServiceHandler),
			rpc.Serve[attestv1connect.EvidenceServiceHandler](attestv1connect.EvidenceServiceName, public, attestv1connect.NewEvidenceServiceHandler),
		},
	})
	if err != nil {
		return errors.Join(err, probes.Close())
	}
	health.SetAll(true)
	o.Log.InfoContext(ctx, "listening", "init", port.Addr().String(), "metrics", probes.Addr().String())
	return serve.All(ctx,
		serve.Part{Name: "bootstrapper", Run: b.Run},
		serve.Part{Name: "init server", Run: server.Run},
		serve.Probes{
			Listener: probes, Metrics: registry, Log: o.Log,
			// Ready means that the machine can serve an init or a join, not that it has become a node.
			Ready: map[string]func(context.Context) error{"bootstrapper": b.ready},
		}.Part(),
	)
}

// ready returns nil while this machine waits for an init or a join, or works on one.
func (b *Bootstrapper) ready(context.Context) error {
	if b.node.Lock.Record().Step == journal.StepDone {
		return errors.New("this machine is a node: the bootstrapper is about to end")
	}
	return nil
}

// AttesterOptions are what the process `bootstrapper attester` needs.
type AttesterOptions struct {
	// Dir holds the folders of the sockets.
	Dir string
	// Metrics is the address of metrics and probes.
	Metrics string
	// NewAttester returns an attester of one purpose.
	NewAttester func(attest.Purpose) (attest.Attester, error)
	// Reattest configures how the machine attests itself, without Attester, Metrics and Log.
	Reattest reattestation.Config
	// Log receives all records.
	Log *slog.Logger
}

// ServeAttester runs `bootstrapper attester` until ctx ends.
func ServeAttester(ctx context.Context, o AttesterOptions) error {
	registry := newRegistry()
	quotes, err := newQuoteSeconds(registry)
	if err != nil {
		return err
	}
	attesters := map[attest.Purpose]attest.Attester{}
	for _, p := range attester.Purposes {
		a, err := o.NewAttester(p)
		if err != nil {
			return fmt.Errorf("attester for %s: %w", p, err)
		}
		attesters[p] = measureQuotes(a, p, quotes)
	}
	own, err := o.NewAttester(attest.PurposeMachine)
	if err != nil {
		return fmt.Errorf("attester for %s: %w", attest.PurposeMachine, err)
	}
	var key platformKey
	// It has no socket (A5): only the machine's own calls use the machine's evidence.
	o.Reattest.Attester, o.Reattest.Metrics, o.Reattest.Log = measureQuotes(key.watch(own), attest.PurposeMachine, quotes), registry, o.Log
	if err := errors.Join(registry.Register(kubelet.Collector{Root: "/", PlatformKey: key.certificate}), registry.Register(backups.Collector{Root: "/", Every: o.Reattest.Image.Backup.Every})); err != nil {
		return fmt.Errorf("bootstrapper: %w", err)
	}
	again, err := reattestation.New(o.Reattest)
	if err != nil {
		return err
	}
	s, err := attester.New(attester.Config{Dir: o.Dir, Attesters: attesters, Metrics: registry, Log: o.Log})
	if err != nil {
		return err
	}
	probes, err := serve.Listen(ctx, "listen.attesterMetrics", o.Metrics)
	if err != nil {
		return err
	}
	o.Log.InfoContext(ctx, "attester is running", "dir", o.Dir, "metrics", probes.Addr().String())
	probe, err := evidence.NewProbe(attesters[attest.PurposePublic], o.Log)
	if err != nil {
		return errors.Join(err, probes.Close())
	}
	return serve.All(ctx,
		serve.Part{Name: "attester", Run: s.Run},
		serve.Part{Name: "own evidence", Run: probe.Serve},
		serve.Part{Name: "re-attestation", Run: again.Run},
		serve.Probes{
			Listener: probes, Metrics: registry, Log: o.Log,
			Ready: map[string]func(context.Context) error{"evidence": func(context.Context) error { return probe.Ready() }},
		}.Part(),
	)
}
