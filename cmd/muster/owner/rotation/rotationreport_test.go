package rotation

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// Who can write the status of AttestedNodes can't have a key of his own written into the cluster's description.
func TestAReportWithAnotherPublicPartIsRefused(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	for _, key := range []clusterinfo.RotatedKey{clusterinfo.ServiceAccountKey, clusterinfo.FrontProxyCA} {
		t.Run(string(key), func(t *testing.T) {
			k := newKeyRotation(t, key, "c1", "c2")
			right := k.part
			_, k.part = ownertest.MadeKey(key)
			k.machines(t)
			if _, err := Rotate(ctx, k.config(false)); err == nil || !strings.Contains(err.Error(), "c1: its report about its new key is wrong") {
				t.Fatalf("%v", err)
			}
			if i := k.Info(ctx, t); i.Rotation == nil || i.Rotation.ID != "" || i.Rotation.Public != "" {
				t.Errorf("the cluster says %+v", i.Rotation)
			}
			k.mu.Lock()
			k.part = right
			k.mu.Unlock()
			if p, err := Rotate(ctx, k.config(false)); err != nil || p.ID != k.next {
				t.Errorf("repaired: %v, %+v", err, p)
			}
		})
	}
}

// A control plane that reboots before the key's ID is written gets back what the others accept, and its Node says otherwise until its next renewal.
func TestAControlPlaneThatHasLostTheKeyAcceptsItAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*ownertest.Patience)
	defer cancel()
	for lost, want := range map[string][]string{
		"c1": {"c1 accept", "c1 use", "c2 use"},
		"c2": {"c2 accept", "c1 use", "c2 use"},
	} {
		t.Run(lost, func(t *testing.T) {
			k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1", "c2")
			k.again = true
			k.acts(func(_ string, phase clusterinfo.RotationPhase) v1alpha1.OrderState {
				if phase == clusterinfo.RotationUse {
					return v1alpha1.OrderFailed
				}
				return v1alpha1.OrderDone
			})
			k.machines(t)
			if _, err := Rotate(ctx, k.config(false)); err == nil {
				t.Fatal("it has not failed")
			}
			k.becomesKey(ctx, t, lost, clusterinfo.KeyState{Accepts: []string{ownertest.OldKey}, Uses: ownertest.OldKey})
			k.acts(nil)
			k.took()
			if p, err := Rotate(ctx, k.config(false)); err != nil || p.Phase != clusterinfo.RotationSettled {
				t.Fatalf("%v: %s", err, problem.Remedy(err))
			}
			if got := k.took(); !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
}
