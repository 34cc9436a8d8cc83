package rotation

import (
	"context"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// attested sets when nodes have attested.
func attested(ctx context.Context, t *testing.T, ago time.Duration, names ...string) {
	t.Helper()
	for _, name := range names {
		n := &v1alpha1.AttestedNode{}
		ownertest.Change(ctx, t, true, types.NamespacedName{Name: name}, n, func() {
			n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(time.Now().Add(-ago))}
		})
	}
}

// A running node that would refuse the cluster must not become a note because this computer's clock is ahead.
func TestAWrongClockHidesNoNodeWithoutTheNewKey(t *testing.T) {
	k := newKeyChange(t)
	k.does(OwnerKeyPrepare)
	r, _ := k.state()
	k.boots("n1", k.old, r.Next)
	attested(k.ctx, t, 20*time.Minute, "n1", "n2")
	k.ServerClock(t, -20*time.Minute)
	if p, err := PlanOwnerKey(k.ctx, k.config(OwnerKeyCommit)); err != nil || p.Err() == nil || !strings.Contains(p.Err().Error(), "n2 has not reported") {
		t.Errorf("%v, %+v", err, p)
	}
}

// n2 attests to a joinservice whose clock is right, and n1 to one on the control plane of the API server, which is ahead.
func TestAnAPIServerAheadHidesNoNodeWithoutTheNewKey(t *testing.T) {
	k := newKeyChange(t)
	k.does(OwnerKeyPrepare)
	r, _ := k.state()
	k.boots("n1", k.old, r.Next)
	attested(k.ctx, t, -20*time.Minute, "n1")
	attested(k.ctx, t, 0, "n2")
	k.ServerClock(t, 20*time.Minute)
	if p, err := PlanOwnerKey(k.ctx, k.config(OwnerKeyCommit)); err != nil || p.Err() == nil || !strings.Contains(p.Err().Error(), "n2 has not reported") {
		t.Errorf("%v, %+v", err, p)
	}
}

// If joinservice records nothing, which nodes run is not known.
func TestIfNoNodeAttestsTheOwnersKeyStays(t *testing.T) {
	k := newKeyChange(t)
	k.does(OwnerKeyPrepare)
	r, _ := k.state()
	k.boots("n1", k.old, r.Next)
	attested(k.ctx, t, time.Hour, "n1", "n2")
	k.refuses(OwnerKeyCommit, "no node has attested in the last 15m0s, so it is not known which nodes run. These have not reported that their images have the new key: n2")
	k.boots("n2", k.old, r.Next)
	if p, err := PlanOwnerKey(k.ctx, k.config(OwnerKeyCommit)); err != nil || p.Err() != nil {
		t.Errorf("all have it: %v, %+v", err, p)
	}
}

// The pods' tokens are renewed by the cluster's clocks.
func TestAPhaseBeginsByTheAPIServersClock(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1")
	k.machines(t)
	k.ServerClock(t, -4*time.Minute)
	if _, err := Rotate(ctx, k.config(false)); err != nil {
		t.Fatal(err, problem.Remedy(err))
	}
	if age := time.Since(k.Info(ctx, t).Rotation.Since); age < 3*time.Minute {
		t.Errorf("the phase has begun %s ago, want four minutes", age)
	}
	k.Describes(t, func(i *clusterinfo.Info) {
		i.Rotation.Since = time.Now().Add(-tokensRenewed - time.Hour).UTC().Truncate(time.Second)
	})
	k.ServerClock(t, -2*time.Hour)
	if p, err := PlanRotation(ctx, k.config(true)); err != nil || p.Err() == nil || !strings.Contains(p.Err().Error(), "finish with --early") {
		t.Errorf("this computer's clock is two hours ahead: %v, %+v", err, p)
	}
	k.ServerClock(t, 0)
	if p, err := PlanRotation(ctx, k.config(true)); err != nil || p.Err() != nil {
		t.Errorf("%v, %+v", err, p)
	}
}

// Of a cluster whose joinservice records nothing, no healthy node must be removed.
func TestIfNoNodeAttestsNoneIsCalledOff(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ClusterCA, "c1", "w1")
	k.machines(t)
	if _, err := Rotate(ctx, k.config(false)); err != nil {
		t.Fatal(err, problem.Remedy(err))
	}
	for name := range k.On {
		k.reports(ctx, t, name, func(s *v1alpha1.AttestedNodeStatus) { s.LastVerdict.Time = metav1.NewTime(time.Now().Add(-time.Hour)) })
	}
	p, err := PlanRotation(ctx, k.config(true))
	if err != nil || len(p.Problems) != 1 || !strings.Contains(p.Problems[0], "no node has attested in the last 15m0s") || strings.Contains(p.Problems[0], "forget") {
		t.Errorf("%v, %+v", err, p)
	}
}
