package component

import (
	"context"
	"log/slog"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
)

// pullAttempts is how often a pull is attempted.
const pullAttempts = 6

// Pull makes the container runtime at socket pull an image by digest (B9); pause is the first pause between two attempts. It refuses with
// COMPONENT_UNAVAILABLE.
func Pull(ctx context.Context, m machine.Machine, socket, image string, pause time.Duration, log *slog.Logger) error {
	backoff := retry.Backoff{Min: pause, Max: 30 * time.Second}
	for try := 1; ; try++ {
		err := m.Pull(ctx, socket, image)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || try >= pullAttempts {
			return attest.Refuse(attestv1.Reason_REASON_COMPONENT_UNAVAILABLE, "image %s can't be pulled after %d attempts: %w", image, try, err)
		}
		log.WarnContext(ctx, "image not pulled, trying again", "image", image, "try", try, "err", err)
		if err := retry.Wait(ctx, backoff.Next(0)); err != nil {
			return err
		}
	}
}
