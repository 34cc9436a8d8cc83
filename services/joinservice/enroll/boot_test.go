package enroll_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// J11: if two replicas admit two machines with the same TPM state at the same time, the compare-and-swap lets one pass.
func TestOfAMachineAndItsCopyOneIsRecorded(t *testing.T) {
	servicetest.Shared.Reset(t)
	a, b := servicetest.New(t), servicetest.New(t)
	owner := servicetest.Claim(1)
	owner.Boot = enroll.Boot{Reset: 1, Secret: keys.NewBootSecret(), Verified: time.Now()}
	if err := servicetest.Join(t.Context(), a, owner, "a"); err != nil {
		t.Fatal(err)
	}
	servicetest.Shared.GiveDisk(t, owner.Disk, owner.Machine)
	for range 5 {
		last := servicetest.Shared.Node(t, "w1").Status.Boot
		var wait sync.WaitGroup
		errs := make([]error, 2)
		rejoining := make([]*enroll.Rejoining, 2)
		for i, k := range []*servicetest.Rooms{a, b} { // both have been checked before either is recorded
			c := servicetest.Claim(1)
			c.Boot = enroll.Boot{Reset: uint32(last.ResetCount) + 1, Secret: keys.NewBootSecret(), Verified: time.Now(), Address: "192.0.2." + string(rune('1'+i))}
			var err error
			if rejoining[i], err = k.Rejoin(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			if err = rejoining[i].AwaitPreviousBootEnd(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for i := range rejoining {
			wait.Go(func() { errs[i] = rejoining[i].Record(t.Context()) })
		}
		wait.Wait()
		if (errs[0] == nil) == (errs[1] == nil) {
			t.Fatalf("%v and %v: want one to pass", errs[0], errs[1])
		}
		for i, err := range errs {
			if err != nil && attest.ReasonOf(err) != attestv1.Reason_REASON_MACHINE_CLONED || err != nil && !strings.Contains(err.Error(), "192.0.2.1") && !strings.Contains(err.Error(), "192.0.2.2") {
				t.Errorf("replica %d: %v", i, err)
			}
		}
	}
}

// A boot is recorded for a key only if it was checked that the boot before it has ended, and that one is still the last.
func TestABootThatNobodyHasLookedForGetsNoKey(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	c := servicetest.Claim(1)
	c.Boot.Reset, c.Boot.Secret = 1, keys.NewBootSecret()
	if err := servicetest.Join(t.Context(), k, c, "a"); err != nil {
		t.Fatal(err)
	}
	servicetest.Seen(t, k, func(n *v1alpha1.AttestedNode) bool { return n != nil && n.Status.Boot != nil })
	c.Boot.Reset, c.Boot.Secret = 3, keys.NewBootSecret()
	if err := servicetest.Join(t.Context(), k, c, "b"); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
		t.Errorf("a ticket: %v", err)
	}
	servicetest.Shared.GiveDisk(t, c.Disk, c.Machine)
	r, err := k.Rejoin(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Record(t.Context()); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
		t.Errorf("a rejoin: %v", err)
	}
	if err := r.AwaitPreviousBootEnd(t.Context()); err != nil {
		t.Fatal(err)
	}
	between := c.Boot
	between.Reset, between.Secret = 2, keys.NewBootSecret()
	if _, _, err := k.Reattest(t.Context(), c.Machine, between, servicetest.Ticket("")); err != nil {
		t.Fatal(err)
	}
	if err := r.Record(t.Context()); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
		t.Errorf("after another boot: %v", err)
	}
	if err := r.AwaitPreviousBootEnd(t.Context()); err != nil { // it does not read again
		t.Fatal(err)
	}
	again, err := k.Rejoin(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error { return again.AwaitPreviousBootEnd(t.Context()) })
	if err := again.Record(t.Context()); err != nil {
		t.Error(err)
	}
}

// A copy that was booted once more asks while the original, which has its key, is still starting: it is refused until the
// original's kubelet has had the time to start.
func TestNoLaterBootIsBelievedWhileTheLastOneComesUp(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	k.SetFirst(time.Hour)
	c := servicetest.Claim(1)
	now := time.Now()
	c.Boot = enroll.Boot{Reset: 1, Secret: keys.NewBootSecret(), Verified: now, Address: "192.0.2.1"}
	if err := servicetest.Join(t.Context(), k, c, "a"); err != nil {
		t.Fatal(err)
	}
	servicetest.Shared.GiveDisk(t, c.Disk, c.Machine)
	later := c
	later.Boot = enroll.Boot{Reset: 2, Secret: keys.NewBootSecret(), Verified: now, Address: "192.0.2.2"}
	await := func() error {
		r, err := k.Rejoin(t.Context(), later)
		if err != nil {
			t.Fatal(err)
		}
		return r.AwaitPreviousBootEnd(t.Context())
	}
	servicetest.Seen(t, k, func(n *v1alpha1.AttestedNode) bool { return n != nil && n.Status.Boot != nil })
	err := await()
	refusal, ok := errors.AsType[*attest.Refusal](err)
	if !ok || refusal.Reason != attestv1.Reason_REASON_BUSY || refusal.RetryAfter <= 0 || refusal.RetryAfter > time.Hour || !strings.Contains(err.Error(), "192.0.2.1") || !strings.Contains(err.Error(), "192.0.2.2") {
		t.Errorf("a rejoin: %v", err)
	}
	if _, err := k.AwaitPreviousBootEnd(t.Context(), later); attest.ReasonOf(err) != attestv1.Reason_REASON_BUSY {
		t.Errorf("a ticket: %v", err)
	}
	if _, err := k.AwaitPreviousBootEnd(t.Context(), c); err != nil {
		t.Errorf("the machine itself: %v", err)
	}
	k.SetFirst(time.Minute)
	last := servicetest.Shared.Node(t, "w1").Status.Boot
	written := func(at time.Time) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{{Time: new(metav1.NewTime(at))}}}}
	}
	for name, tt := range map[string]struct {
		last  *v1alpha1.Boot
		lease *coordinationv1.Lease
		now   time.Time
		want  time.Duration
	}{
		"no Lease":            {last, nil, last.Since.Add(20 * time.Second), 40 * time.Second},
		"a Lease of before":   {last, written(last.Since.Add(-time.Second)), last.Since.Add(20 * time.Second), 40 * time.Second},
		"a Lease since":       {last, written(last.Since.Add(time.Second)), last.Since.Add(20 * time.Second), 0},
		"no Lease, for long":  {last, nil, last.Since.Add(time.Minute), 0},
		"no boot is recorded": {nil, nil, last.Since.Time, 0},
	} {
		if got := k.StartupGraceLeft(tt.last, tt.lease, tt.now); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	k.SetFirst(0)
	if err := await(); err != nil {
		t.Error(err)
	}
}
