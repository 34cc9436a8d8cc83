package recovery

import (
	"context"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// shared lets a few callers at a time to the TPM. Anybody may ask for evidence here, and the machine's
// own tries to rejoin need the TPM too. Those that wait share quotes by themselves; the
// answer to a challenge is each caller's own, and takes the TPM for a moment.
type shared struct {
	attest.Attester
	places chan struct{}
}

// ForStrangers gives an attester that lets two callers at a time to the TPM, for all servers of an initramfs together.
// What has been given once is given back as it is.
func ForStrangers(a attest.Attester) attest.Attester {
	if s, ok := a.(*shared); ok {
		return s
	}
	return &shared{a, make(chan struct{}, answers)}
}

// Respond implements [attest.Attester].
func (s *shared) Respond(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
	select {
	case s.places <- struct{}{}:
		defer func() { <-s.places }()
		return s.Attester.Respond(ctx, c, b)
	case <-ctx.Done():
		return nil, attest.Refuse(attestv1.Reason_REASON_DEADLINE, "wait for the TPM: %w", ctx.Err())
	}
}
