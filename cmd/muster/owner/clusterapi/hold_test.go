package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

// A rollout keeps its lease for hours, whatever its user is called, and ends when another program has it.
func TestARolloutKeepsItsLease(t *testing.T) {
	api := start(t)
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(text)
	if err != nil {
		t.Fatal(err)
	}
	const by = "jürgen on desk"
	held, end, err := c.hold(t.Context(), by, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	l := &coordinationv1.Lease{}
	get := func(ctx context.Context) error {
		return api.Client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: RolloutLease}, l)
	}
	renewals := 0
	for last := (metav1.MicroTime{}); renewals < 3; {
		if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
			return get(ctx) == nil && !l.Spec.RenewTime.Equal(&last), context.Cause(held)
		}); err != nil {
			t.Fatalf("after %d renewals: %v", renewals, err)
		}
		last, renewals = *l.Spec.RenewTime, renewals+1
	}
	if _, _, err := c.hold(t.Context(), "kim on desk", time.Hour); err == nil || !errors.As(err, new(*HeldError)) {
		t.Errorf("a second one: %v", err)
	}
	for {
		if err := get(t.Context()); err != nil {
			t.Fatal(err)
		}
		l.Spec.HolderIdentity = new("kim on desk")
		if api.Client.Update(t.Context(), l) == nil { // else it was renewed between
			break
		}
	}
	select {
	case <-held.Done():
	case <-time.After(time.Minute):
		t.Fatal("it goes on with the lease of another one")
	}
	if e, is := errors.AsType[*HeldError](context.Cause(held)); !is || e.By != "kim on desk" {
		t.Errorf("it ended with %v", fmt.Sprint(context.Cause(held)))
	}
}
