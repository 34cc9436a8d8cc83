package kubelet

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"time"

	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// WatchInterval is the pause between two checks of the kubelet's certificate in production.
const WatchInterval = time.Minute

// WatchConfig lists what [Watch] needs. All fields are required.
type WatchConfig struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// Machine starts the bootstrapper.
	Machine machine.Machine
	// Interval is the longest pause between two checks.
	Interval time.Duration
	Now      func() time.Time
	Log      *slog.Logger
}

// Watch starts the bootstrapper of a running node once the kubelet's client certificate has expired, until ctx ends: such a kubelet can't request
// another one, and ends. The bootstrapper then does the same as at a boot: after its node lock, it sends fresh evidence to the same joinservices (J7).
// Watch decides nothing, so it may start a bootstrapper that already runs, or one that gets no certificate.
func Watch(ctx context.Context, cfg WatchConfig) error {
	if err := required.Fields("kubelet.Watch", cfg); err != nil {
		return err
	}
	if !filepath.IsAbs(cfg.Root) {
		return fmt.Errorf("kubelet.Watch: Root %q is not an absolute path", cfg.Root)
	}
	for {
		if why := ended(cfg.Root, cfg.Now()); why != "" {
			cfg.Log.WarnContext(ctx, "the kubelet can't ask for another certificate; starting the bootstrapper, which does", "why", why)
			if err := cfg.Machine.Unit(ctx, "start", machine.UnitBootstrapper); err != nil && ctx.Err() == nil {
				cfg.Log.ErrorContext(ctx, "the bootstrapper did not start", "err", err)
			}
		}
		// Certificates of many nodes may have expired in the same outage.
		if retry.Wait(ctx, cfg.Interval-rand.N(cfg.Interval/5+1)) != nil { //nolint:gosec // spreads load, protects nothing
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

// ended returns why the kubelet's client certificate can't be used any more; empty if it may be usable. One that begins in the future may be: it was
// issued by the API server's clock, which decides, and a kubelet is not stopped because its machine's clock is behind.
func ended(root string, now time.Time) string {
	leaf, err := Certificate(root, ClientFile)
	switch {
	case err != nil:
		return fmt.Sprintf("the kubelet's client certificate can't be used: %v", err)
	case !now.Before(leaf.NotAfter):
		return fmt.Sprintf("the kubelet's client certificate ended at %s", stamp(leaf.NotAfter))
	}
	return ""
}
