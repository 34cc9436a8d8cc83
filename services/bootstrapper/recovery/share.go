package recovery

import (
	"context"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// shared lets a few callers at a time to the TPM. Anybody may ask for evidence here, and each piece
// takes the TPM for a moment: the machine's own tries to rejoin need it too.
type shared struct {
	attest.Attester
	places chan struct{}
}

func share(a attest.Attester, n int) attest.Attester {
	return &shared{a, make(chan struct{}, n)}
}

// Attest implements [attest.Attester].
func (s *shared) Attest(ctx context.Context, f attestv1.Format, b attest.Binding, eventLog bool) (*attestv1.Evidence, error) {
	leave, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return s.Attester.Attest(ctx, f, b, eventLog)
}

// Respond implements [attest.Attester].
func (s *shared) Respond(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
	leave, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return s.Attester.Respond(ctx, c, b)
}

func (s *shared) enter(ctx context.Context) (leave func(), err error) {
	select {
	case s.places <- struct{}{}:
		return func() { <-s.places }, nil
	case <-ctx.Done():
		return nil, attest.Refuse(attestv1.Reason_REASON_DEADLINE, "wait for the TPM: %w", ctx.Err())
	}
}
