package enroll

import (
	"encoding/hex"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// J11: the recorded boot is 5/2 with a secret, and 100 s on the TPM's clock.
func TestABootIsComparedWithTheLastOne(t *testing.T) {
	secret, other := keys.NewBootSecret(), keys.NewBootSecret()
	hash, since := secret.Hash(), time.Now()
	last := v1alpha1.Boot{ResetCount: 5, RestartCount: 2, Clock: 100_000_000, SecretHash: hex.EncodeToString(hash[:]), Since: metav1.NewMicroTime(since)}
	const known = 100_000 * time.Second
	after, before := since.Add(time.Second), since.Add(-time.Second)
	for name, tt := range map[string]struct {
		now   Boot
		later bool
		want  attestv1.Reason
	}{
		"the same boot":                             {Boot{5, 2, known, secret, "", after, nil}, false, attestv1.Reason_REASON_ACCEPTED},
		"the same boot, some time later":            {Boot{5, 2, known + time.Hour, secret, "", after, nil}, false, attestv1.Reason_REASON_ACCEPTED},
		"the same boot, out of order":               {Boot{5, 2, known - maxClockBack, secret, "", before, nil}, false, attestv1.Reason_REASON_ACCEPTED},
		"memory and TPM put back":                   {Boot{5, 2, known - maxClockBack - time.Second, secret, "", after, nil}, false, attestv1.Reason_REASON_CLOCK_WENT_BACK},
		"another secret":                            {Boot{5, 2, known + time.Hour, other, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"another secret, of before":                 {Boot{5, 2, known, other, "", before, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"no secret":                                 {Boot{5, 2, known, keys.BootSecret{}, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"a later boot":                              {Boot{6, 0, 0, other, "", after, nil}, true, attestv1.Reason_REASON_ACCEPTED},
		"a later boot, whose clock begins anew":     {Boot{6, 0, time.Second, other, "", before, nil}, true, attestv1.Reason_REASON_ACCEPTED},
		"a later restart":                           {Boot{5, 3, known, other, "", after, nil}, true, attestv1.Reason_REASON_ACCEPTED},
		"a suspend to memory":                       {Boot{5, 3, known + time.Hour, secret, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"memory that a TPM's reset has not emptied": {Boot{6, 0, known + time.Hour, secret, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"an earlier boot":                           {Boot{4, 9, known + time.Hour, secret, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"an earlier restart":                        {Boot{5, 1, known, secret, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"an earlier boot that comes late":           {Boot{4, 0, known, secret, "", before, nil}, false, attestv1.Reason_REASON_VERDICT_OLD},
		"an earlier boot that comes too late":       {Boot{4, 0, known, secret, "", since.Add(-maxLate - time.Second), nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
		"an earlier boot of the very same time":     {Boot{4, 0, known, secret, "", since, nil}, false, attestv1.Reason_REASON_VERDICT_OLD},
		"the highest counters that a TPM has":       {Boot{1<<32 - 1, 1<<32 - 1, 0, other, "", after, nil}, true, attestv1.Reason_REASON_ACCEPTED},
		"a cleared TPM, which counts from zero":     {Boot{0, 0, 0, other, "", after, nil}, false, attestv1.Reason_REASON_MACHINE_CLONED},
	} {
		t.Run(name, func(t *testing.T) {
			last.Since = metav1.NewMicroTime(since)
			later, _, reason := compareBoots(last, tt.now)
			if later != tt.later || reason != tt.want {
				t.Errorf("later: %v, %s; want %v, %s", later, attest.ReasonName(reason), tt.later, attest.ReasonName(tt.want))
			}
		})
	}
}

// J11: the latest clock of a boot is recorded, also if evidence arrives out of order, so that memory and TPM cannot be
// reset in small steps; the time of the first record is kept.
func TestTheClockOfABootOnlyGoesOn(t *testing.T) {
	n, s := &v1alpha1.AttestedNode{}, &v1alpha1.AttestedNodeStatus{ResetCount: new(int64(5))} // of a version that recorded no boots
	at := time.Now()
	b := Boot{Reset: 4, Clock: time.Hour, Secret: keys.NewBootSecret(), Verified: at}
	if err := b.record(n, s, false, false); attest.ReasonOf(err) != attestv1.Reason_REASON_CLOCK_WENT_BACK {
		t.Errorf("fewer resets than were counted: %v, want CLOCK_WENT_BACK", err)
	}
	b.Reset = 5
	if !mayHaveRun(s, false) {
		t.Error("a machine whose resets were counted has not run")
	}
	if err := b.record(n, s, false, false); err != nil {
		t.Fatal(err)
	}
	b.Clock, b.Verified = b.Clock-maxClockBack, at.Add(time.Minute)
	if err := b.record(n, s, false, false); err != nil {
		t.Fatal(err)
	}
	if since := metav1.NewMicroTime(at); s.Boot.Clock != time.Hour.Milliseconds() || !s.Boot.Since.Equal(&since) {
		t.Errorf("recorded is the clock %d since %s, want %d since %s", s.Boot.Clock, s.Boot.Since, time.Hour.Milliseconds(), since)
	}
	b.Clock -= maxClockBack
	if err := b.record(n, s, false, false); attest.ReasonOf(err) != attestv1.Reason_REASON_CLOCK_WENT_BACK {
		t.Errorf("the second step back: %v, want CLOCK_WENT_BACK", err)
	}
}

// An attacker who copies one machine takes at most one of the waiting places.
func TestOneMachineWaitsOnce(t *testing.T) {
	w := &leaseWaits{}
	for i := range maxLeaseWaits {
		m := attest.MachineID{byte(i)}
		if !w.begin(m) || w.begin(m) {
			t.Fatalf("machine %d", i)
		}
	}
	if w.begin(attest.MachineID{255}) {
		t.Error("more wait than may")
	}
	w.end(attest.MachineID{1})
	if !w.begin(attest.MachineID{255}) {
		t.Error("a place that is free is not given")
	}
}

// A kubelet renews its Lease after each quarter of the Lease's duration.
func TestALeaseThatLastsLongerIsWatchedLonger(t *testing.T) {
	for seconds, want := range map[int32]time.Duration{1: 15 * time.Second, 40: 15 * time.Second, 80: 30 * time.Second, 1 << 30: maxWatch} {
		if got := DefaultLeaseTimings.watch(&coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: &seconds}}); got != want {
			t.Errorf("one of %d s: %s, want %s", seconds, got, want)
		}
	}
	for l, want := range map[LeaseTimings]time.Duration{DefaultLeaseTimings: time.Second, {Watch: 2 * time.Second}: 500 * time.Millisecond, {}: leastPoll} {
		if got := l.poll(); got != want {
			t.Errorf("a Lease that is watched for %s is read every %s, want %s", l.Watch, got, want)
		}
	}
	if got := DefaultLeaseTimings.watch(nil); got != DefaultLeaseTimings.Watch {
		t.Errorf("one that is not there: %s", got)
	}
}
