package unlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/recovery"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// Serve runs `bootstrapper unlock`: it opens the disk, and serves its status meanwhile on the ports that `bootstrapper run` uses later. cfg is without
// Metrics and Recovery. It returns nil once the disk is open.
func Serve(ctx context.Context, cfg Config) error {
	if cfg.Image == nil || cfg.Attester == nil || cfg.Log == nil {
		return errors.New("unlock: Serve: Image, Attester and Log are required")
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	calls, err := rpc.NewMetrics(registry)
	if err != nil {
		return err
	}
	// The callers of both servers share the TPM, which the machine's own attempts to rejoin need too.
	challenges := atls.NewChallengeQueue()
	cfg.Metrics, cfg.Recovery = registry, recoverBy(cfg, challenges, calls, registry)
	u, err := New(cfg)
	if err != nil {
		return err
	}
	probes, err := serve.Listen(ctx, "listen.metrics", cfg.Image.Listen.Metrics)
	if err != nil {
		return err
	}
	port, err := serve.Listen(ctx, "listen.init", cfg.Image.Listen.Init)
	if err != nil {
		return errors.Join(err, probes.Close())
	}
	health := rpc.NewHealth()
	server, err := rpc.NewServer(rpc.Config{
		Listener: port, Health: health, Metrics: calls, Log: cfg.Log, Grace: grace,
		// The client has no TPM. It can appraise this machine, so it can rely on the answer.
		ATLS:     atls.ServerConfig{Attester: cfg.Attester, Appraiser: atls.NoAppraiser, Limits: Limits, Challenges: challenges},
		Services: []rpc.Service{rpc.Serve[initv1connect.MachineServiceHandler](initv1connect.MachineServiceName, u, initv1connect.NewMachineServiceHandler)},
	})
	if err != nil {
		return errors.Join(err, probes.Close())
	}
	health.SetAll(true)
	cfg.Log.InfoContext(ctx, "listening", "init", port.Addr().String(), "metrics", probes.Addr().String())
	return serve.All(ctx,
		serve.Part{Name: "unlock", Run: u.Run},
		serve.Part{Name: "status server", Run: server.Run},
		serve.Probes{
			Listener: probes, Metrics: registry, Log: cfg.Log,
			// Ready means that the process works on opening the disk, not that the disk is open.
			Ready: map[string]func(context.Context) error{"unlock": func(context.Context) error { return nil }},
		}.Part(),
	)
}

// Limits bound the status server like the recovery server, but for the size of a request: only the owner's program uses them.
var Limits = func() atls.Limits {
	l := recovery.Limits
	l.Large, l.LargePerSource, l.LargeBytes = 0, 0, 0
	return l
}()

// grace is how long a running call may delay the boot of a machine whose disk is open.
const grace = 2 * time.Second

// recoverBy returns the recovery of a control plane, on a port of its own.
func recoverBy(cfg Config, challenges *peerlimit.Queue, calls *rpc.Metrics, registry prometheus.Registerer) Recovery {
	return func(ctx context.Context, id keys.DiskID, try Try) error {
		s, err := recovery.New(recovery.Config{
			DiskID: id, OwnerKeys: cfg.Image.OwnerKeys, NoOwnerKey: len(cfg.Image.OwnerKeys) == 0 && cfg.Image.NoOwnerKey, Attester: cfg.Attester, Challenges: challenges, Calls: calls, Metrics: registry, Log: cfg.Log,
			Try: func(ctx context.Context, key keys.Disk, cluster keys.ClusterID, desired component.Desired) error {
				err := try(ctx, key, cluster, desired)
				switch {
				case errors.Is(err, disk.ErrWrongKey):
					return fmt.Errorf("%w: %w", recovery.ErrWrongKey, err)
				case errors.Is(err, ErrOpen):
					return fmt.Errorf("%w: %w", recovery.ErrOpen, err)
				}
				return err
			},
		})
		if err != nil {
			return err
		}
		l, err := serve.Listen(ctx, "listen.recover", cfg.Image.Listen.Recover)
		if err != nil {
			return err
		}
		return s.Run(ctx, l)
	}
}
