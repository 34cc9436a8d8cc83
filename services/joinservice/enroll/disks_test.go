package enroll_test

import (
	"sync"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// J2: the API server creates an object once, so if machines claim a disk at the same time at two replicas, which may or may
// not have seen each other's enrollments, one gets and keeps it.
func TestOfMachinesThatClaimADiskAtOnceOneHasIt(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	b := servicetest.New(t)
	for range 10 {
		servicetest.Shared.FreeDisk(t, servicetest.DiskOne)
		var all sync.WaitGroup
		errs, salts := make([]error, 6), make([]enroll.Salt, 6)
		for i := range salts {
			salts[i] = enroll.Salt{Salt: keys.NewDiskSalt(), Root: keys.FirstVersion}
		}
		for i := range errs {
			all.Go(func() {
				errs[i] = []*servicetest.Rooms{a, b}[i%2].AssignDisk(t.Context(), servicetest.Claim(byte(1+i)), salts[i])
			})
		}
		all.Wait()
		owner := servicetest.Shared.DiskOf(t, servicetest.DiskOne)
		for i, err := range errs {
			mine := owner == servicetest.Claim(byte(1+i)).Machine.String()
			if reason := attest.ReasonOf(err); mine != (err == nil) || !mine && reason != attestv1.Reason_REASON_DISK_MISMATCH {
				t.Errorf("machine %d, whose the disk is: %v: %v", 1+i, mine, err)
			}
			if again := b.AssignDisk(t.Context(), servicetest.Claim(byte(1+i)), salts[i]); mine != (again == nil) {
				t.Errorf("machine %d, whose the disk is: %v: again: %v", 1+i, mine, again)
			}
		}
	}
}

// A replica whose view is out of date reads the API before it refuses.
func TestADiskThatWasFreedIsAnybodysAtOnce(t *testing.T) {
	servicetest.Shared.Reset(t)
	k := servicetest.New(t)
	servicetest.Shared.GiveDisk(t, servicetest.DiskOne, servicetest.Claim(1).Machine)
	membertest.Eventually(t, func() error {
		return membertest.Want(k.OwnerOf(servicetest.DiskOne) == servicetest.Claim(1).Machine.String(), "the replica does not see the claim")
	})
	if err := k.Check(t.Context(), servicetest.Claim(2)); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_MISMATCH {
		t.Errorf("%v, want DISK_MISMATCH", err)
	}
	if err := k.Check(t.Context(), servicetest.Claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
	servicetest.Shared.FreeDisk(t, servicetest.DiskOne)
	if err := k.Check(t.Context(), servicetest.Claim(2)); err != nil {
		t.Error(err)
	}
}

// K4: if two tickets of one machine create two salts, one salt stays, and the key of the other, which is not the disk's, is
// not sent.
func TestOfTwoSaltsForADiskOneStays(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := servicetest.New(t)
	one, err := a.SaltOrNew(t.Context(), servicetest.Claim(1))
	if err != nil {
		t.Fatal(err)
	}
	two, err := a.SaltOrNew(t.Context(), servicetest.Claim(1))
	if err != nil || one == two {
		t.Fatalf("the same salt twice, %v", err)
	}
	if err := a.AssignDisk(t.Context(), servicetest.Claim(1), one); err != nil {
		t.Fatal(err)
	}
	if err := a.AssignDisk(t.Context(), servicetest.Claim(1), two); attest.ReasonOf(err) != attestv1.Reason_REASON_API_UNAVAILABLE {
		t.Errorf("%v, want API_UNAVAILABLE", err)
	}
	membertest.Eventually(t, func() error { // with an outdated view SaltOrNew makes another salt, which AssignDisk refuses
		return membertest.Want(a.OwnerOf(servicetest.DiskOne) == servicetest.Claim(1).Machine.String(), "the replica does not see the claim")
	})
	if have, err := a.SaltOrNew(t.Context(), servicetest.Claim(1)); err != nil || have != one {
		t.Errorf("another salt than the first, %v", err)
	}
	if err := a.RecheckDisk(t.Context(), servicetest.Claim(1), two); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_ERASED {
		t.Errorf("%v, want DISK_ERASED", err)
	}
}
