// Package evidence adapts attesters for services: a joinservice adds its cluster's policy to its evidence, and readiness
// depends on whether evidence can be made.
package evidence

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// WithPolicy returns an attester that adds the signed policy to its evidence, so that a machine that knows the owner's key
// can appraise this service by it.
func WithPolicy(a attest.Attester, signed func() *attestv1.SignedPolicy) (attest.Attester, error) {
	if a == nil || signed == nil {
		return nil, errors.New("evidence: attester and policy are required")
	}
	return presenting{a, signed}, nil
}

type presenting struct {
	attest.Attester
	signed func() *attestv1.SignedPolicy
}

func (p presenting) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	ev, err := p.Attester.Attest(ctx, f, b)
	if err != nil {
		return nil, err
	}
	ev.SignedPolicy = p.signed()
	return ev, nil
}

// Probe checks whether this machine's attester can make evidence. Its zero value is not usable.
type Probe struct {
	attester attest.Attester
	log      *slog.Logger
	made     atomic.Bool
}

// NewProbe returns a Probe of a.
func NewProbe(a attest.Attester, log *slog.Logger) (*Probe, error) {
	if a == nil || log == nil || len(a.Formats()) == 0 {
		return nil, errors.New("evidence: a probe needs a log and an attester that has evidence to give")
	}
	return &Probe{attester: a, log: log}, nil
}

// Serve requests evidence until it has succeeded once, then waits for ctx to end.
func (p *Probe) Serve(ctx context.Context) error {
	for wait := 250 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		if _, err := p.attester.Attest(ctx, p.attester.Formats()[0], attest.Binding{}); err == nil {
			p.made.Store(true)
			p.log.Info("own evidence can be made")
			<-ctx.Done()
			return nil
		} else if ctx.Err() == nil {
			p.log.Warn("own evidence cannot be made; is muster-attester.service running on this machine?", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait/2 + rand.N(wait/2)): //nolint:gosec // spreading load is no secret
		}
	}
}

// Ready returns nil when evidence was made.
func (p *Probe) Ready() error {
	if !p.made.Load() {
		return errors.New("no evidence of this machine was made yet")
	}
	return nil
}
