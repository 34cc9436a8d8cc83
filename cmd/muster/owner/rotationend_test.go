package owner

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// API servers only add to what aggregated API servers read: without this, a certificate of the old authority would be accepted there until it ends.
func TestWhatAggregatedAPIServersReadHasOnlyTheNewAuthority(t *testing.T) {
	name := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: "extension-apiserver-authentication"}
	for key, field := range map[clusterinfo.RotatedKey]string{clusterinfo.ClusterCA: "client-ca-file", clusterinfo.FrontProxyCA: "requestheader-client-ca-file"} {
		t.Run(string(key), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			k := newKeyRotation(t, key, "c1")
			k.machines(t)
			if _, err := Rotate(ctx, k.config(false)); err != nil {
				t.Fatal(err, remedy(err))
			}
			k.reports(ctx, t, "c1", nil)
			was := newAuthority(t)
			m := &corev1.ConfigMap{}
			change(ctx, t, false, name, m, func() { m.Data[field] = string(pemOf(was.cert)) + k.part })
			if _, err := Rotate(ctx, k.config(true)); err != nil {
				t.Fatal(err, remedy(err))
			}
			if err := shared.Client.Get(ctx, name, m); err != nil || m.Data[field] != k.part {
				t.Errorf("%s is %s, %v", field, m.Data[field], err)
			}
			change(ctx, t, false, name, m, func() { m.Data[field] = string(shared.CA()) })
		})
	}
}

// A control plane whose disk was set back gets the new key again, and until then no control plane joins.
func TestAControlPlaneThatWasSetBackGetsTheKeyAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.FrontProxyCA, "c1", "c2")
	k.machines(t)
	if _, err := Rotate(ctx, k.config(false)); err != nil {
		t.Fatal(err, remedy(err))
	}
	k.took()
	k.mu.Lock()
	k.again = true
	k.mu.Unlock()
	k.becomesKey(ctx, t, "c2", clusterinfo.KeyState{Accepts: []string{oldKey, k.next}, Uses: oldKey})
	if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), "c2 does not use the new key") || !strings.Contains(remedy(err), "without --finish") || len(k.took()) > 0 {
		t.Errorf("%v: %s", err, remedy(err))
	}
	if p, err := Rotate(ctx, k.config(false)); err != nil || p.Phase != clusterinfo.RotationSettled {
		t.Fatalf("%v: %s; %+v", err, remedy(err), p)
	}
	if got, want := k.took(), []string{"c2 accept", "c2 use"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
