package rollout

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestTheOwnerSeesWhoRunsWhichImage(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	one, two, none := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "two"}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "three"})
	unused := attesttest.NewMachine(t, ca, attesttest.Options{Image: "four"})
	o := ownertest.Rules(ctx, t, kube, attesttest.Policy(t, ca, []*attesttest.Machine{one, two, unused}, func(*attestv1.Policy) {}))
	ownertest.Runs(t, "n1", one, 0)
	ownertest.Runs(t, "n2", two, 0)
	ownertest.Runs(t, "n3", none, time.Hour)
	got, err := RolloutStatus(ctx, o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var images []string
	for _, n := range got.Nodes {
		images = append(images, n.Node+" "+n.Image)
	}
	if want := []string{"n1 image-0", "n2 image-1", "n3 "}; !slices.Equal(images, want) {
		t.Errorf("%q, want %q", images, want)
	}
	if len(got.Images) != 4 || got.Images["image-0"] != 1 || got.Images["image-2"] != 0 || got.Images[""] != 1 {
		t.Errorf("%v", got.Images)
	}
}

// Each machine is drained, restarted and Ready in another boot before the next one; the first that fails ends it.
func TestNodesRestartOneAfterAnother(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	first, second, _ := l.Node(t, "r1", 51, v1alpha1.RoleWorker), l.Node(t, "r2", 52, v1alpha1.RoleWorker), l.Node(t, "r3", 53, v1alpha1.RoleWorker)
	ownertest.Pod(t, "r1", "on-r1", nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ownertest.Obey(ctx, t, "r1", first, l.Public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderRunning, v1alpha1.OrderDone})
		if !ownertest.Unschedulable(t, "r1") || len(ownertest.PodsOn(t, "r1")) > 0 {
			t.Error("r1 was not drained")
		}
		boots(ctx, t, "r1")
		ownertest.Obey(ctx, t, "r2", second, l.Public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderFailed})
	}()
	var steps []string
	err := restartInTurn(ctx, l, func(r *Restarts) {
		r.Drain.Force, r.Report = true, func(node, step string) { steps = append(steps, node+" "+step) }
	}, "r1", "r2", "r3")
	<-done
	if err == nil || !strings.HasPrefix(err.Error(), "r2: r2: reboot failed") || !strings.Contains(problem.Remedy(err), "1 of 3 nodes have restarted") || !strings.HasSuffix(problem.Remedy(err), "muster rollout reboot r2 r3") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if ownertest.Unschedulable(t, "r1") || !ownertest.Unschedulable(t, "r2") || ownertest.Unschedulable(t, "r3") {
		t.Error("which nodes take pods is wrong")
	}
	if n := ownertest.EnrollmentOf(t, "r3"); n.Annotations[v1alpha1.OwnerOrder] != "" {
		t.Error("r3 has an order")
	}
	if i := slices.Index(steps, "r1 Ready"); i < 0 || slices.ContainsFunc(steps[:i], func(s string) bool { return strings.HasPrefix(s, "r2") }) {
		t.Errorf("%q", steps)
	}
}

// A node that an interrupted command has drained takes pods again when it is repeated; one that somebody else had made unschedulable does not.
func TestARepeatedRolloutLetsTheNodeTakePodsAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	on := l.Node(t, "r4", 54, v1alpha1.RoleWorker)
	reboot := func(states ...v1alpha1.OrderState) error {
		done, now := make(chan struct{}), time.Now()
		go func() {
			defer close(done)
			ownertest.Obey(ctx, t, "r4", on, l.Public, now, states)
			boots(ctx, t, "r4")
		}()
		defer func() { <-done }()
		return restartInTurn(ctx, l, nil, "r4")
	}
	if err := reboot(v1alpha1.OrderFailed); err == nil || !ownertest.Unschedulable(t, "r4") {
		t.Fatal(err)
	}
	setBoot(ctx, t, "r4", "first")
	if err := reboot(v1alpha1.OrderDone); err != nil || ownertest.Unschedulable(t, "r4") {
		t.Fatalf("%v: it takes no pods", err)
	}
	if _, err := lifecycle.Drain(ctx, l.Dir, "r4", clusterapi.DrainOptions{}, func(string) {}); err != nil { // muster drain
		t.Fatal(err)
	}
	setBoot(ctx, t, "r4", "second")
	if err := reboot(v1alpha1.OrderDone); err != nil || !ownertest.Unschedulable(t, "r4") {
		t.Fatalf("%v: it takes pods, and was drained by its owner", err)
	}
}

// boots has a Node be Ready in another boot.
func boots(ctx context.Context, t *testing.T, name string) { setBoot(ctx, t, name, "another") }

func setBoot(ctx context.Context, t *testing.T, name, id string) {
	n := &corev1.Node{}
	if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil {
		t.Error(err)
		return
	}
	n.Status.NodeInfo.BootID = id
	if err := ownertest.Shared.Client.Status().Update(ctx, n); err != nil {
		t.Error(err)
	}
}
