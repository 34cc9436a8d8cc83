package joinservice

import (
	"bytes"
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

func TestOwnersKeysThatAreRefused(t *testing.T) {
	key := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	for name, tt := range map[string]struct {
		keys    [][]byte
		refused bool
	}{
		"none, of an older bootstrapper": {nil, false},
		"one":                            {[][]byte{key(1)}, false},
		"four":                           {[][]byte{key(1), key(2), key(3), key(4)}, false},
		"five":                           {[][]byte{key(1), key(2), key(3), key(4), key(5)}, true},
		"one cut short":                  {[][]byte{key(1), key(2)[:31]}, true},
		"an empty one":                   {[][]byte{{}}, true},
		"one twice":                      {[][]byte{key(1), key(1)}, true},
	} {
		got, err := ownerKeys(tt.keys)
		if tt.refused != (attest.ReasonOf(err) == attestv1.Reason_REASON_REQUEST_INVALID) || !tt.refused && len(got) != len(tt.keys) {
			t.Errorf("%s: %d keys, %v", name, len(got), err)
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
