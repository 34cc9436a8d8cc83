package progress

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
)

// Step reports f as one step.
func Step(report Reporter, name string, f func() (detail string, err error)) error {
	report.Begin(name)
	detail, err := f()
	report.End(detail, err)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Again calls try until it succeeds or fails with a final error.
func Again(ctx context.Context, report Reporter, try func() error) error {
	pause := retry.Backoff{Min: 500 * time.Millisecond, Max: 10 * time.Second}
	for {
		err := try()
		if err == nil || problem.Final(err) {
			return err
		}
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		report.Update(fmt.Sprintf("waiting for the machine: %v", err))
		if perr := retry.Wait(ctx, pause.Next(rpc.RetryAfterFrom(err))); perr != nil {
			return errors.Join(perr, err)
		}
	}
}
