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
)

// J2: the API server creates an object once, so of machines that claim a disk at once at two replicas, which know
// of each other's enrolments or not, one has it, and stays.
func TestOfMachinesThatClaimADiskAtOnceOneHasIt(t *testing.T) {
	shared.Reset(t)
	a, _ := replica(t)
	b, _ := replica(t)
	for range 10 {
		shared.FreeDisk(t, diskOne)
		var all sync.WaitGroup
		errs := make([]error, 6)
		for i := range errs {
			all.Go(func() { errs[i] = []*Kube{a, b}[i%2].ClaimDisk(t.Context(), claim(byte(1+i))) })
		}
		all.Wait()
		owner := shared.DiskOf(t, diskOne)
		for i, err := range errs {
			mine := owner == claim(byte(1+i)).Machine.String()
			if reason := attest.ReasonOf(err); mine != (err == nil) || !mine && reason != attestv1.Reason_REASON_DISK_MISMATCH {
				t.Errorf("machine %d, whose the disk is: %v: %v", 1+i, mine, err)
			}
			if again := b.ClaimDisk(t.Context(), claim(byte(1+i))); mine != (again == nil) {
				t.Errorf("machine %d, whose the disk is: %v: again: %v", 1+i, mine, again)
			}
		}
	}
}

// A replica whose view is old asks the API before it refuses.
func TestADiskThatWasFreedIsAnybodysAtOnce(t *testing.T) {
	shared.Reset(t)
	k, _ := replica(t)
	if err := k.ClaimDisk(t.Context(), claim(1)); err != nil {
		t.Fatal(err)
	}
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

// Enrolments of before say whose a disk is, as long as they are there: so the first look at them makes it last.
func TestAnEnrolledDiskOfBeforeBecomesItsMachinesForGood(t *testing.T) {
	for name, tt := range map[string]struct {
		status v1alpha1.AttestedNodeStatus
		spec   func(*v1alpha1.AttestedNodeSpec)
		begun  bool // a ticket is being made
		want   bool
	}{
		"a worker's":                        {status: ticket("1"), want: true},
		"a banned machine's":                {status: ticket("1"), spec: func(s *v1alpha1.AttestedNodeSpec) { s.Banned = true }, want: true},
		"one that the owner named":          {want: true},
		"one without a disk yet":            {spec: func(s *v1alpha1.AttestedNodeSpec) { s.DiskID = "" }},
		"one whose first ticket is at work": {begun: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBroom(t)
			spec := claim(1).spec()
			if tt.spec != nil {
				tt.spec(&spec)
			}
			if tt.begun {
				half(t, b.Kube, claim(1), "1")
			} else {
				shared.Enrol(t, "w1", spec)
				n := shared.Node(t, "w1")
				n.Status = tt.status
				if err := shared.Client.Status().Update(t.Context(), n); err != nil {
					t.Fatal(err)
				}
			}
			b.after(t, 0)
			want := ""
			if tt.want {
				want = spec.MachineID
			}
			if owner := shared.DiskOf(t, diskOne); owner != want || b.recorded(t, "disk claim decided") != tt.want { // J3
				t.Errorf("the disk is %q's, want %q; on record: %v", owner, want, b.recorded(t, "disk claim decided"))
			}
		})
	}
}

// A released enrolment that is deleted takes its name along, and not the disk.
func TestADeletedEnrolmentLeavesItsDiskToItsMachine(t *testing.T) {
	b := newBroom(t)
	shared.Enrol(t, "w1", claim(1).spec())
	n := shared.Node(t, "w1")
	released := b.clock.now().Add(-25 * time.Hour)
	n.Status.ReleasedAt = &metav1.Time{Time: released}
	if err := shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	b.after(t, 0)
	gone(t)
	membertest.Eventually(t, func() error { // once the replica has seen its own claim
		err := b.Check(t.Context(), claim(2))
		return membertest.Want(attest.ReasonOf(err) == attestv1.Reason_REASON_DISK_MISMATCH, "%v, want DISK_MISMATCH", err)
	})
	if err := b.Check(t.Context(), claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
}
