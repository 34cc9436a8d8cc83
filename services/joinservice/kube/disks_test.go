package kube

import (
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// J2: the API server creates an object once, so if machines claim a disk at the same time at two replicas, which may or may
// not have seen each other's enrollments, one gets and keeps it.
func TestOfMachinesThatClaimADiskAtOnceOneHasIt(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	for range 10 {
		shared.FreeDisk(t, diskOne)
		var all sync.WaitGroup
		errs, salts := make([]error, 6), make([]Salt, 6)
		for i := range salts {
			salts[i] = Salt{Salt: keys.NewDiskSalt(), Root: keys.FirstVersion}
		}
		for i := range errs {
			all.Go(func() { errs[i] = []*Kube{a, b}[i%2].ClaimDisk(t.Context(), claim(byte(1+i)), salts[i]) })
		}
		all.Wait()
		owner := shared.DiskOf(t, diskOne)
		for i, err := range errs {
			mine := owner == claim(byte(1+i)).Machine.String()
			if reason := attest.ReasonOf(err); mine != (err == nil) || !mine && reason != attestv1.Reason_REASON_DISK_MISMATCH {
				t.Errorf("machine %d, whose the disk is: %v: %v", 1+i, mine, err)
			}
			if again := b.ClaimDisk(t.Context(), claim(byte(1+i)), salts[i]); mine != (again == nil) {
				t.Errorf("machine %d, whose the disk is: %v: again: %v", 1+i, mine, again)
			}
		}
	}
}

// A replica whose view is out of date reads the API before it refuses.
func TestADiskThatWasFreedIsAnybodysAtOnce(t *testing.T) {
	shared.Reset(t)
	k, _ := replica(t)
	shared.GiveDisk(t, diskOne, claim(1).Machine)
	membertest.Eventually(t, func() error {
		return membertest.Want(k.disks.of(diskOne) == claim(1).Machine.String(), "the replica does not see the claim")
	})
	if err := k.Check(t.Context(), claim(2)); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_MISMATCH {
		t.Errorf("%v, want DISK_MISMATCH", err)
	}
	if err := k.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
	shared.FreeDisk(t, diskOne)
	if err := k.Check(t.Context(), claim(2)); err != nil {
		t.Error(err)
	}
}

// If a released enrollment is deleted, its name becomes free, but not its disk.
func TestADeletedEnrollmentLeavesItsDiskToItsMachine(t *testing.T) {
	b := newSweepFixture(t)
	shared.Enroll(t, "w1", claim(1).spec())
	shared.GiveDisk(t, diskOne, claim(1).Machine)
	n := shared.Node(t, "w1")
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.EnrolledByTicket, "true")
	if err := shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	released := b.clock.now().Add(-25 * time.Hour)
	n.Status.ReleasedAt = &metav1.Time{Time: released}
	if err := shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	for range 3 { // conditions are written meanwhile
		b.after(t, 0)
	}
	gone(t)
	membertest.Eventually(t, func() error { // once the replica has seen its own claim
		err := b.Check(t.Context(), claim(2))
		return membertest.Want(attest.ReasonOf(err) == attestv1.Reason_REASON_DISK_MISMATCH, "%v, want DISK_MISMATCH", err)
	})
	if err := b.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
}

// K4: if two tickets of one machine create two salts, one salt stays, and the key of the other, which is not the disk's, is
// not sent.
func TestOfTwoSaltsForADiskOneStays(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	one, err := a.SaltOf(t.Context(), claim(1))
	if err != nil {
		t.Fatal(err)
	}
	two, err := a.SaltOf(t.Context(), claim(1))
	if err != nil || one == two {
		t.Fatalf("the same salt twice, %v", err)
	}
	if err := a.ClaimDisk(t.Context(), claim(1), one); err != nil {
		t.Fatal(err)
	}
	if err := a.ClaimDisk(t.Context(), claim(1), two); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
		t.Errorf("%v, want API_UNAVAILABLE", err)
	}
	if have, err := a.SaltOf(t.Context(), claim(1)); err != nil || have != one {
		t.Errorf("another salt than the first, %v", err)
	}
	if err := a.StillHas(t.Context(), claim(1), two); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_ERASED {
		t.Errorf("%v, want DISK_ERASED", err)
	}
}
