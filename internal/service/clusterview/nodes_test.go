package clusterview

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

func node(name, version string, spec v1alpha1.AttestedNodeSpec) *v1alpha1.AttestedNode {
	return &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), ResourceVersion: version}, Spec: spec}
}

func TestAwaitEndsOnceTheOwnWriteHasComeBack(t *testing.T) {
	n := newNodes()
	n.set(node("a", "9", v1alpha1.AttestedNodeSpec{}))
	done := make(chan error, 1)
	go func() { done <- n.Await(t.Context(), "a", "a", "12") }()
	for _, version := range []string{"10", "11"} {
		n.set(node("a", version, v1alpha1.AttestedNodeSpec{}))
		select {
		case err := <-done:
			t.Fatalf("it ended at version %s: %v", version, err)
		default:
		}
	}
	n.set(node("a", "100", v1alpha1.AttestedNodeSpec{})) // later, though not in the order of text
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(5 * time.Minute):
		t.Fatal("it does not end")
	}
}

func TestAwaitDoesNotTakeAnotherObjectOfThatName(t *testing.T) {
	n := newNodes()
	other := node("a", "100", v1alpha1.AttestedNodeSpec{})
	other.UID = "other"
	n.set(other)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := n.Await(ctx, "a", "a", "12"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// After any sequence of events, the indexes agree with the objects.
func TestIndexesFollowTheObjects(t *testing.T) {
	machine := func(i int) attest.MachineID { return attest.MachineID{byte(i)} }
	rapid.Check(t, func(t *rapid.T) {
		n, model := newNodes(), map[string]v1alpha1.AttestedNodeSpec{}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			if rapid.Bool().Draw(t, "remove") {
				n.remove(node(name, "1", model[name]))
				delete(model, name)
				continue
			}
			spec := v1alpha1.AttestedNodeSpec{
				MachineID: machine(rapid.IntRange(0, 2).Draw(t, "machine")).String(), DiskID: rapid.SampledFrom([]string{"", "d", "e"}).Draw(t, "disk"),
				Addresses: rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"1", "2", "3"}), 0, 3, rapid.ID[string]).Draw(t, "addresses"), Banned: rapid.Bool().Draw(t, "banned"),
			}
			n.set(node(name, "1", spec))
			model[name] = spec
		}
		for i := range 3 {
			want, banned := 0, false
			for _, s := range model {
				if s.MachineID == machine(i).String() {
					want, banned = want+1, banned || s.Banned
				}
			}
			if len(n.ByMachine(machine(i))) != want || n.banned(machine(i), "") != banned {
				t.Fatalf("machine %d: %d enrollments, banned %v; want %d, %v", i, len(n.ByMachine(machine(i))), n.banned(machine(i), ""), want, banned)
			}
		}
		for _, value := range []string{"1", "2", "3"} {
			want := 0
			for _, s := range model {
				for _, a := range s.Addresses {
					if a == value {
						want++
					}
				}
			}
			if len(n.ByAddress(value)) != want {
				t.Fatalf("address %s: %d, want %d", value, len(n.ByAddress(value)), want)
			}
		}
		if len(n.ByDisk("")) != 0 {
			t.Fatal("enrollments without a disk are found by it")
		}
	})
}
