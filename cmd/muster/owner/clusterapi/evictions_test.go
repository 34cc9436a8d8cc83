package clusterapi

import (
	"fmt"
	"slices"
	"testing"
)

// kubectl writes a line for each pod whenever it tries again.
func TestABudgetInTheWayIsReportedOnce(t *testing.T) {
	var said []string
	blocked := []string{"a/web (pod web-1: 1 of 2 pods are Ready, but 2 must be)"}
	e := &evictions{report: func(s string) { said = append(said, s) }, blocked: func() []string { return blocked }}
	again := func() {
		e.asked = e.asked.Add(-evictEvery)
		for i := range 3 {
			_, _ = fmt.Fprintf(e, "error when evicting pods/\"web-%d\" -n \"a\" (will retry after 5s): Cannot evict pod as it would violate the pod's disruption budget.\n", i)
		}
	}
	again()
	blocked = []string{"a/web (pod web-2: 2 of 2 pods are Ready, but 2 must be)", "b/db (pod db-0: 1 of 1 pods are Ready, but 1 must be)"}
	again()
	_, _ = fmt.Fprintln(e, "another line")
	want := []string{
		"waits for the PodDisruptionBudget a/web (pod web-1: 1 of 2 pods are Ready, but 2 must be)",
		"waits for the PodDisruptionBudget b/db (pod db-0: 1 of 1 pods are Ready, but 1 must be)", "another line",
	}
	if !slices.Equal(said, want) {
		t.Errorf("%q", said)
	}
}
