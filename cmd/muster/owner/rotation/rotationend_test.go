package rotation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// API servers only add to what aggregated API servers read: without this, a certificate of the old authority would be accepted there until it ends.
func TestWhatAggregatedAPIServersReadHasOnlyTheNewAuthority(t *testing.T) {
	name := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: "extension-apiserver-authentication"}
	for key, field := range map[clusterinfo.RotatedKey]string{clusterinfo.ClusterCA: "client-ca-file", clusterinfo.FrontProxyCA: "requestheader-client-ca-file"} {
		t.Run(string(key), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
			defer cancel()
			k := newKeyRotation(t, key, "c1")
			k.machines(t)
			if _, err := Rotate(ctx, k.config(false)); err != nil {
				t.Fatal(err, problem.Remedy(err))
			}
			k.reports(ctx, t, "c1", nil)
			was := ownertest.NewAuthority(t)
			m := &corev1.ConfigMap{}
			ownertest.Change(ctx, t, false, name, m, func() { m.Data[field] = string(ownertest.PEMOf(was.Cert)) + k.part })
			if _, err := Rotate(ctx, k.config(true)); err != nil {
				t.Fatal(err, problem.Remedy(err))
			}
			if err := ownertest.Shared.Client.Get(ctx, name, m); err != nil || m.Data[field] != k.part {
				t.Errorf("%s is %s, %v", field, m.Data[field], err)
			}
			ownertest.Change(ctx, t, false, name, m, func() { m.Data[field] = string(ownertest.Shared.CA()) })
		})
	}
}

// A control plane whose disk was rolled back gets the new key again, and until then no control plane joins.
func TestAControlPlaneThatWasSetBackGetsTheKeyAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.FrontProxyCA, "c1", "c2")
	k.machines(t)
	if _, err := Rotate(ctx, k.config(false)); err != nil {
		t.Fatal(err, problem.Remedy(err))
	}
	k.took()
	k.mu.Lock()
	k.again = true
	k.mu.Unlock()
	k.becomesKey(ctx, t, "c2", clusterinfo.KeyState{Accepts: []string{ownertest.OldKey, k.next}, Uses: ownertest.OldKey})
	if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), "c2 does not use the new key") || !strings.Contains(problem.Remedy(err), "without --finish") || len(k.took()) > 0 {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if p, err := Rotate(ctx, k.config(false)); err != nil || p.Phase != clusterinfo.RotationSettled {
		t.Fatalf("%v: %s; %+v", err, problem.Remedy(err), p)
	}
	if got, want := k.took(), []string{"c2 accept", "c2 use"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Both lists decide on nodes that a rotation of the cluster's authority could lose.
func TestWhichNodesHoldTheRotationUp(t *testing.T) {
	now, id := time.Now(), strings.Repeat("1", 64)
	well := func() clusterapi.NodeRelease {
		return clusterapi.NodeRelease{Name: "w1", Joined: true, Ready: true, Enrollment: &v1alpha1.AttestedNode{
			Spec: v1alpha1.AttestedNodeSpec{DiskID: "d"},
			Status: v1alpha1.AttestedNodeStatus{
				Authorities: []string{id}, KubeletAuthorities: []string{id}, LastVerdict: &v1alpha1.Verdict{Accepted: true, Time: metav1.NewTime(now)},
			},
		}}
	}
	for name, tt := range map[string]struct {
		change func(n *clusterapi.NodeRelease)
		behind string // "": it does not hold --finish up
		silent bool
	}{
		"well":                  {func(*clusterapi.NodeRelease) {}, "", false},
		"not Ready":             {func(n *clusterapi.NodeRelease) { n.Ready = false }, "is off", false},
		"without an enrollment": {func(n *clusterapi.NodeRelease) { n.Enrollment = nil }, "has no AttestedNode", false},
		"banned":                {func(n *clusterapi.NodeRelease) { n.Enrollment.Spec.Banned, n.Enrollment.Status.Authorities = true, nil }, "", false},
		"enrolled, not joined": {func(n *clusterapi.NodeRelease) {
			n.Joined, n.Enrollment.Spec.DiskID, n.Enrollment.Status = false, "", v1alpha1.AttestedNodeStatus{}
		}, "", false},
		"joined once, without Node":  {func(n *clusterapi.NodeRelease) { n.Joined, n.Enrollment.Status = false, v1alpha1.AttestedNodeStatus{} }, "has not reported", false},
		"of an older version":        {func(n *clusterapi.NodeRelease) { n.Enrollment.Status.Authorities = nil }, "has not reported", true},
		"another authority's":        {func(n *clusterapi.NodeRelease) { n.Enrollment.Status.Authorities = []string{ownertest.OldKey} }, "has not reported", false},
		"a kubelet's of another one": {func(n *clusterapi.NodeRelease) { n.Enrollment.Status.KubeletAuthorities = []string{ownertest.OldKey} }, "of the old authority", false},
	} {
		n := well()
		tt.change(&n)
		r := &rotating{now: &clusterinfo.Rotation{ID: id}}
		var problems []string
		r.behind([]clusterapi.NodeRelease{n}, now, func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) })
		if (tt.behind == "") != (len(problems) == 0) || !strings.Contains(strings.Join(problems, ""), tt.behind) {
			t.Errorf("%s: %q, want %q", name, problems, tt.behind)
		}
		if got := silent([]clusterapi.NodeRelease{n}); (len(got) > 0) != tt.silent {
			t.Errorf("%s: silent are %q", name, got)
		}
	}
}

// An API server that uses a random key writes Secrets that the folder's secrets don't decrypt, also if the rotation goes no further.
func TestTheFolderKnowsThatAKeyIsRandomBeforeItIsUsed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.EncryptionKey, "c1")
	k.machines(t)
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse} {
		k.acts(func(_ string, p clusterinfo.RotationPhase) v1alpha1.OrderState {
			if p == phase {
				return v1alpha1.OrderFailed
			}
			return v1alpha1.OrderDone
		})
		if _, err := Rotate(ctx, k.config(false)); err == nil {
			t.Fatalf("%s has not failed", phase)
		}
		if got, want := k.Cluster().EncryptionKeyRotated, phase == clusterinfo.RotationUse; got != want {
			t.Errorf("after the phase %s the folder says %v", phase, got)
		}
	}
	c := k.Cluster() // as in a copy of the folder from before
	c.EncryptionKeyRotated = false
	if err := k.Save(c); err != nil {
		t.Fatal(err)
	}
	if _, err := Rotate(ctx, k.config(false)); err == nil || !k.Cluster().EncryptionKeyRotated {
		t.Errorf("in another folder: %v", err)
	}
}
