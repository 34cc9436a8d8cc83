package enroll

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

func TestAVerdictNeverGivesWayToAnOlderOne(t *testing.T) {
	now := time.Now()
	at := func(d time.Duration, accepted bool) *v1alpha1.Verdict {
		return &v1alpha1.Verdict{Accepted: accepted, Time: metav1.NewTime(now.Add(d))}
	}
	for name, tt := range map[string]struct {
		stored, next *v1alpha1.Verdict
		taken        bool
	}{
		"the first":                          {nil, at(0, true), true},
		"a newer one":                        {at(-time.Minute, false), at(0, true), true},
		"an older one":                       {at(0, false), at(-time.Minute, true), false},
		"one over another of the far future": {at(time.Hour, true), at(0, true), true},
		"none at all":                        {at(0, false), nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := v1alpha1.AttestedNodeStatus{LastVerdict: tt.stored, EvidenceDigest: "before"}
			mergeVerdict(&s, v1alpha1.AttestedNodeStatus{LastVerdict: tt.next, EvidenceDigest: "after"})
			if got := s.EvidenceDigest == "after"; got != tt.taken {
				t.Errorf("taken: %t", got)
			}
		})
	}
}

func TestALaterEndOfACertificateStands(t *testing.T) {
	s := &v1alpha1.AttestedNodeStatus{}
	early, late := time.Unix(1000, 0), time.Unix(2000, 5)
	for i, tt := range []struct {
		e       Expiry
		changed bool
	}{{Expiry{Client: early}, true}, {Expiry{Client: early}, false}, {Expiry{Client: late, Serving: early}, true}, {Expiry{Client: early}, false}, {Expiry{Client: time.Unix(2000, 9)}, false}, {Expiry{}, false}} {
		if got := raiseExpiry(s, tt.e); got != tt.changed {
			t.Errorf("%d: changed is %v", i, got)
		}
	}
	if s.Certificates.ClientExpiresAt.Unix() != 2000 || s.Certificates.ServingExpiresAt.Unix() != 1000 {
		t.Errorf("%+v", s.Certificates)
	}
}
