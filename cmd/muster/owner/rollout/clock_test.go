package rollout

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// With a clock that is 20 minutes ahead, no node would take orders, and a rollout would end without having restarted one.
func TestAWrongClockLeavesNoNodeOutOfARollout(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	o := ownertest.Rules(ctx, t, kube, attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	ownertest.Runs(t, "n1", m, 20*time.Minute)
	// By the right clock, it is off: then no machine gets orders, and that is no success.
	r, err := RolloutStatus(ctx, o.Dir)
	if err != nil || r.Nodes[0].Silent == "" || r.Err() == nil || !strings.Contains(r.Err().Error(), "no node has attested in the last 15m0s") || !strings.Contains(problem.Remedy(r.Err()), "muster doctor") {
		t.Errorf("%+v, %v", r, err)
	}
	o.ServerClock(t, -20*time.Minute)
	if r, err := RolloutStatus(ctx, o.Dir); err != nil || r.Nodes[0].Silent != "" || r.Err() != nil {
		t.Errorf("%+v, %v, %v", r, err, r.Err())
	}
}

// Both begin with a look at the cluster's description. With two copies of the folder, a rotation can begin after this look.
func TestNoUpgradeOfKubernetesBeginsBesideARotation(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	u := ownertest.NewUpgrading(t, "c1")
	k, err := newKubernetes(ctx, kubernetesConfig(u, &u.New))
	if err != nil {
		t.Fatal(err)
	}
	u.Describes(t, func(i *clusterinfo.Info) {
		i.Rotation = &clusterinfo.Rotation{Key: clusterinfo.EncryptionKey, Phase: clusterinfo.RotationAccept, Since: time.Now().UTC().Truncate(time.Second)}
	})
	if err := k.begin(ctx); err == nil || !strings.Contains(problem.Remedy(err), "muster rotate encryption-key") || u.Info(ctx, t).Next != nil {
		t.Errorf("%v: %s; %+v", err, problem.Remedy(err), u.Info(ctx, t))
	}
	// One whose old key is only still accepted does not disturb.
	u.Describes(t, func(i *clusterinfo.Info) {
		i.Rotation.Phase, i.Rotation.ID = clusterinfo.RotationSettled, strings.Repeat("ab", 32)
	})
	if err := k.begin(ctx); err != nil || u.Info(ctx, t).Next == nil {
		t.Errorf("%v", err)
	}
}
