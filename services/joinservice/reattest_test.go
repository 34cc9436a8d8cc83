package joinservice

import (
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestOnlyFreshEvidenceCounts(t *testing.T) {
	now := time.Now()
	for age, want := range map[time.Duration]attestv1.Reason{
		0:                            attestv1.Reason_REASON_ACCEPTED,
		maxEvidenceAge:               attestv1.Reason_REASON_ACCEPTED,
		maxEvidenceAge + time.Second: attestv1.Reason_REASON_VERDICT_OLD,
		time.Hour:                    attestv1.Reason_REASON_VERDICT_OLD,
	} {
		if got := attest.ReasonOf(fresh(now.Add(-age), now)); got != want {
			t.Errorf("%s: %s", age, attest.ReasonName(got))
		}
	}
}

func TestNodesHaveThreeTriesWithinTheAgeOfAVerdict(t *testing.T) {
	for maxAge, want := range map[time.Duration]time.Duration{15 * time.Minute: 5 * time.Minute, time.Hour: 5 * time.Minute, 3 * time.Minute: time.Minute} {
		if got := reattestEvery(maxAge); got != want {
			t.Errorf("%s: every %s, want %s", maxAge, got, want)
		}
	}
}
