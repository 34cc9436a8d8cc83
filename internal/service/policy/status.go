package policy

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// Follow makes s follow the AttestationPolicy "default" of a cluster.
func Follow(c *clusterview.Cluster, s *Store) error {
	return clusterview.Watch(c,
		func(p *v1alpha1.AttestationPolicy) {
			if p.Name == v1alpha1.PolicyName {
				s.Set(p)
			}
		},
		func(p *v1alpha1.AttestationPolicy) {
			if p.Name == v1alpha1.PolicyName {
				s.Remove(p)
			}
		})
}

// WriteStatus writes each report into the status of the AttestationPolicy until ctx ends. Of several replicas the first one
// writes; the others find the same status and do not write.
func WriteStatus(ctx context.Context, c client.Client, s *Store, log *slog.Logger) error {
	for attempt := 0; ; {
		report, changed := s.Latest()
		var retry <-chan time.Time
		if err := writeStatus(ctx, c, report); err != nil && ctx.Err() == nil {
			attempt++
			retry = time.After(backoff(attempt))
			log.Warn("the policy's status cannot be written; trying again", "err", err)
		} else {
			attempt = 0
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-retry:
		}
	}
}

func writeStatus(ctx context.Context, c client.Client, r Report) error {
	if r.Observed == nil {
		return nil
	}
	want := statusOf(r)
	// Another replica may have written the same meanwhile.
	live := &v1alpha1.AttestationPolicy{}
	if err := c.Get(ctx, client.ObjectKeyFromObject(r.Observed), live); err != nil {
		return client.IgnoreNotFound(err)
	}
	if live.UID != r.Observed.UID || live.Generation != r.Observed.Generation {
		return nil // the informer will deliver a newer version
	}
	old := live.Status
	if old.ObservedGeneration == want.ObservedGeneration && old.Accepted == want.Accepted && old.Reason == want.Reason {
		return nil
	}
	if old.Serial > want.Serial || (old.Serial == want.Serial && old.PolicyDigest != "") {
		want.Serial, want.PolicyDigest = old.Serial, old.PolicyDigest
	}
	live.Status = want
	err := c.Status().Update(ctx, live)
	if apierrors.IsConflict(err) {
		return errors.New("another client wrote it at the same time")
	}
	return err
}

func statusOf(r Report) v1alpha1.AttestationPolicyStatus {
	out := v1alpha1.AttestationPolicyStatus{Accepted: r.Err == nil, ObservedGeneration: r.Observed.Generation}
	if r.InForce != nil {
		out.Generation = r.InForce.Generation
		out.Serial = int64(min(r.InForce.Policy.Serial(), math.MaxInt64))
		out.PolicyDigest = digest(r.InForce.Signed)
		out.Insecure = r.InForce.Policy.Insecure()
	}
	if r.Err != nil {
		out.Reason = attest.ReasonName(attest.ReasonOf(r.Err))
		out.Message = r.Err.Error()
		if len(out.Message) > 1024 {
			out.Message = out.Message[:1024]
		}
	}
	return out
}

// backoff returns 0.25 s doubling to 30 s, with jitter.
func backoff(attempt int) time.Duration {
	d := min(250*time.Millisecond<<min(attempt, 8), 30*time.Second)
	return d/2 + rand.N(d/2+1) //nolint:gosec // spreading load is no secret
}
