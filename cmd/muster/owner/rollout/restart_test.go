package rollout

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// ready sets a Node's condition.
func ready(t *testing.T, name string, is corev1.ConditionStatus) {
	t.Helper()
	n := &corev1.Node{}
	if err := ownertest.Shared.Client.Get(t.Context(), types.NamespacedName{Name: name}, n); err != nil {
		t.Fatal(err)
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: is}}
	if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

// served sets on how many of two control planes a DaemonSet of Muster's is ready.
func served(t *testing.T, name string, ready int32) {
	t.Helper()
	sets := kubernetes.NewForConfigOrDie(ownertest.Shared.Admin).AppsV1().DaemonSets(clusterapi.Namespace)
	ds, err := sets.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ds.Status.DesiredNumberScheduled, ds.Status.UpdatedNumberScheduled, ds.Status.NumberReady = 2, 2, ready
	if _, err := sets.UpdateStatus(t.Context(), ds, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// untouched fails the test if a node was drained or has an order.
func untouched(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if ownertest.Unschedulable(t, name) || ownertest.EnrollmentOf(t, name).Annotations[v1alpha1.OwnerOrder] != "" {
			t.Errorf("%s was touched", name)
		}
	}
}

func budget(t *testing.T, name string, set func(*policyv1.PodDisruptionBudget)) {
	t.Helper()
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "drained"}}}}
	set(b)
	status := b.Status
	budgets := kubernetes.NewForConfigOrDie(ownertest.Shared.Admin).PolicyV1().PodDisruptionBudgets(metav1.NamespaceDefault)
	made, err := budgets.Create(t.Context(), b, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := budgets.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	made.Status = status
	if _, err := budgets.UpdateStatus(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// While a control plane is dead, no worker is taken out of service: its restart could not end well, and each repetition would take one more.
func TestARolloutBeginsNoNodeWhileTheClusterIsNotWell(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	l.Node(t, "dead", 63, v1alpha1.RoleControlPlane)
	on := l.Node(t, "r5", 64, v1alpha1.RoleWorker)
	ready(t, "dead", corev1.ConditionUnknown)
	err := restartInTurn(ctx, l, nil, "r5")
	if err == nil || !strings.Contains(err.Error(), "control planes are not healthy: dead is not Ready") || !strings.Contains(problem.Remedy(err), "muster forget") || !strings.Contains(problem.Remedy(err), "0 of 1 nodes have restarted") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	untouched(t, "r5")
	ownertest.Unenroll(ctx, "dead")
	served(t, "muster-kms", 1)
	if err := restartInTurn(ctx, l, nil, "r5"); err == nil || !strings.Contains(err.Error(), "muster-kms is ready on 1 of 2 control planes") {
		t.Errorf("%v", err)
	}
	untouched(t, "r5")
	// The owner can decide otherwise, and then nothing waits for the others.
	done := make(chan struct{})
	go func() {
		defer close(done)
		ownertest.Obey(ctx, t, "r5", on, l.Public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderDone})
		boots(ctx, t, "r5")
	}()
	if err := restartInTurn(ctx, l, func(r *Restarts) { r.Unchecked = true }, "r5"); err != nil || ownertest.Unschedulable(t, "r5") {
		t.Errorf("unchecked: %v", err)
	}
	<-done
}

// A node that is well takes pods again, and counts as restarted, also if a control plane dies meanwhile.
func TestANodeThatIsWellDoesNotStayWithoutPods(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	on := l.Node(t, "r6", 65, v1alpha1.RoleWorker)
	l.Node(t, "r7", 66, v1alpha1.RoleWorker)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ownertest.Obey(ctx, t, "r6", on, l.Public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderDone})
		served(t, "muster-joinservice", 1)
		boots(ctx, t, "r6")
	}()
	limited, stop := context.WithCancel(ctx)
	defer stop()
	err := restartInTurn(limited, l, func(r *Restarts) {
		r.Report = func(_, step string) {
			if strings.HasPrefix(step, "waits: muster-joinservice 1/2 ready") {
				stop()
			}
		}
	}, "r6", "r7")
	<-done
	if err == nil || !strings.Contains(err.Error(), "it has restarted and is Ready") || !strings.Contains(problem.Remedy(err), "1 of 2 nodes have restarted") || !strings.HasSuffix(problem.Remedy(err), "muster rollout reboot r7") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if ownertest.Unschedulable(t, "r6") {
		t.Error("r6 is Ready and takes no pods")
	}
	untouched(t, "r7")
}

// A drain takes long enough for another control plane to die: two restarts at once could cost etcd its majority.
func TestANodeIsNotRestartedIfTheClusterIsNotWellAfterItsDrain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	l.Node(t, "r12", 72, v1alpha1.RoleWorker)
	err := restartInTurn(ctx, l, func(r *Restarts) {
		r.Report = func(_, step string) {
			if strings.HasPrefix(step, "drained") {
				served(t, "muster-kms", 1)
			}
		}
	}, "r12")
	if err == nil || !strings.Contains(err.Error(), "muster-kms is ready on 1 of 2 control planes") || !strings.Contains(problem.Remedy(err), "kubectl uncordon r12") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if o := ownertest.EnrollmentOf(t, "r12").Annotations[v1alpha1.OwnerOrder]; o != "" {
		t.Errorf("it has the order %s", o)
	}
}

// A machine that gets no orders is not waited for: its node keeps its pods.
func TestARolloutLeavesOutMachinesThatGetNoOrders(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	kube := ownertest.Defined(t)
	ca := attesttest.NewCA(t)
	one, two := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "two"})
	o := ownertest.Rules(ctx, t, kube, attesttest.Policy(t, ca, []*attesttest.Machine{one, two}, func(*attestv1.Policy) {}))
	l.Node(t, "off", 67, v1alpha1.RoleWorker)
	for _, name := range []string{"well", "banned", "refused"} {
		ownertest.Runs(t, name, one, time.Minute)
	}
	ownertest.Runs(t, "new", two, time.Minute)
	edited := func(name string, change func(*v1alpha1.AttestedNode)) {
		n := ownertest.EnrollmentOf(t, name)
		change(n)
		status := n.Status
		if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		n.Status = status
		if err := ownertest.Shared.Client.Status().Update(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	edited("off", func(n *v1alpha1.AttestedNode) {
		n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(time.Now().Add(-time.Hour))}
		n.Status.PCRs = ownertest.EnrollmentOf(t, "well").Status.PCRs
	})
	edited("banned", func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true })
	edited("refused", func(n *v1alpha1.AttestedNode) {
		n.Status.LastVerdict.Accepted, n.Status.LastVerdict.Reason = false, "POLICY_REFUSED"
	})
	r, err := RolloutStatus(ctx, o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	restart, skipped, held := r.Outdated("image-0")
	said := map[string]string{}
	for _, n := range skipped {
		said[n.Node] = n.Silent
	}
	if len(restart) != 1 || restart[0].Node != "well" || len(held) != 0 || len(said) != 3 || said["banned"] != "it is banned" || said["refused"] != "its last verdict is POLICY_REFUSED" || !strings.HasPrefix(said["off"], "it has not attested since") {
		t.Errorf("restart %v, held %v, left out %v", restart, held, said)
	}
	if err := restartInTurn(ctx, l, nil, "off"); err == nil || !strings.Contains(err.Error(), "its machine gets no orders: it has not attested since") {
		t.Errorf("one that is named: %v", err)
	}
	untouched(t, "off")
}

// A node that has booted the new image, and takes no pods because its rollout was interrupted, is not one of the old image any more.
func TestARepeatedRolloutEndsWhatItHasBegun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	kube := ownertest.Defined(t)
	ca := attesttest.NewCA(t)
	one, two := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "two"})
	o := ownertest.Rules(ctx, t, kube, attesttest.Policy(t, ca, []*attesttest.Machine{one, two}, func(*attestv1.Policy) {}))
	ownertest.Runs(t, "left", two, time.Minute)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "left"}}
	if err := ownertest.Shared.Client.Create(ctx, node); err != nil {
		t.Fatal(err)
	}
	ready(t, "left", corev1.ConditionTrue)
	setBoot(ctx, t, "left", "before")
	if _, err := lifecycle.Drain(ctx, l.Dir, "left", clusterapi.DrainOptions{Returns: true}, func(string) {}); err != nil {
		t.Fatal(err)
	}
	outdated := func() (*Rollout, []NodeImage) {
		t.Helper()
		r, err := RolloutStatus(ctx, o.Dir)
		if err != nil {
			t.Fatal(err)
		}
		restart, skipped, held := r.Outdated("image-0")
		if len(restart)+len(skipped) > 0 {
			t.Errorf("%v, %v", restart, skipped)
		}
		return r, held
	}
	if r, held := outdated(); len(held) > 0 || !r.Nodes[0].Held {
		t.Errorf("before its restart: %+v", r.Nodes)
	}
	setBoot(ctx, t, "left", "after")
	r, held := outdated()
	if len(held) != 1 || held[0].Node != "left" {
		t.Fatalf("%+v", held)
	}
	r.upgrading = true
	if _, _, held := r.Outdated("image-0"); len(held) > 0 {
		t.Error("a node that an upgrade of Kubernetes has drained")
	}
	if err := restartInTurn(ctx, l, func(r *Restarts) { r.Held = []string{"left"} }); err != nil || ownertest.Unschedulable(t, "left") {
		t.Errorf("%v: it takes no pods", err)
	}
	if ownertest.EnrollmentOf(t, "left").Annotations[v1alpha1.OwnerOrder] != "" {
		t.Error("it restarts once more")
	}
	if _, held := outdated(); len(held) > 0 {
		t.Errorf("after its end: %+v", held)
	}
}

// The machine may restart between an interrupted run and the next one: it is then not waited for a third boot.
func TestAnInterruptedRestartIsNotWaitedForTwice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	on := l.Node(t, "r8", 68, v1alpha1.RoleWorker)
	setBoot(ctx, t, "r8", "first")
	l.Obeys(ctx, t, on, v1alpha1.OrderRunning)
	limited, stop := context.WithCancel(ctx)
	defer stop()
	err := restartInTurn(limited, l, func(r *Restarts) {
		r.Report = func(_, step string) {
			if step == string(v1alpha1.OrderRunning) {
				stop()
			}
		}
	}, "r8")
	order := ownertest.EnrollmentOf(t, "r8").Annotations[v1alpha1.OwnerOrder]
	if err == nil || !ownertest.Unschedulable(t, "r8") || order == "" {
		t.Fatalf("%v, order %q", err, order)
	}
	setBoot(ctx, t, "r8", "second")
	err = restartInTurn(ctx, l, func(r *Restarts) {
		r.Report = func(_, step string) {
			if strings.HasPrefix(step, "ordered: ") { // its machine reports the end only now
				ownertest.Obey(ctx, t, "r8", on, l.Public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderDone})
			}
		}
	}, "r8")
	if err != nil || ownertest.Unschedulable(t, "r8") {
		t.Errorf("%v: it takes no pods", err)
	}
	if ownertest.EnrollmentOf(t, "r8").Annotations[v1alpha1.OwnerOrder] != order {
		t.Error("it restarts once more")
	}
}

// A budget that no eviction can meet is named before anything is changed, on any of the nodes.
func TestABudgetThatAllowsNoEvictionIsNamedBeforeADrain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	l.Node(t, "r9", 69, v1alpha1.RoleWorker)
	l.Node(t, "r10", 70, v1alpha1.RoleWorker)
	ownertest.Pod(t, "r10", "kept", nil)
	for name, set := range map[string]func(*policyv1.PodDisruptionBudget){
		"none-unavailable": func(b *policyv1.PodDisruptionBudget) { b.Spec.MaxUnavailable = new(intstr.FromInt32(0)) },
		"zero-percent":     func(b *policyv1.PodDisruptionBudget) { b.Spec.MaxUnavailable = new(intstr.FromString("0%")) },
		"all-available":    func(b *policyv1.PodDisruptionBudget) { b.Spec.MinAvailable = new(intstr.FromString("100%")) },
		"as-many": func(b *policyv1.PodDisruptionBudget) {
			b.Spec.MinAvailable = new(intstr.FromInt32(1))
			b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 1}
		},
	} {
		t.Run(name, func(t *testing.T) {
			budget(t, name, set)
			_, err := lifecycle.Drain(ctx, l.Dir, "r10", clusterapi.DrainOptions{Force: true}, func(string) {})
			if err == nil || !strings.Contains(err.Error(), "default/"+name+" (pod kept: ") || !strings.HasPrefix(problem.Remedy(err), "Nothing was changed. Ask the owner of the pods to change the budget") {
				t.Errorf("%v: %s", err, problem.Remedy(err))
			}
			err = restartInTurn(ctx, l, func(r *Restarts) { r.Drain.Force = true }, "r9", "r10")
			if err == nil || !strings.Contains(err.Error(), "r10 can't be drained") || !strings.Contains(err.Error(), "default/"+name) {
				t.Errorf("a rollout: %v", err)
			}
			untouched(t, "r9", "r10")
		})
	}
	t.Run("one that may allow it later is waited for", func(t *testing.T) {
		budget(t, "later", func(b *policyv1.PodDisruptionBudget) {
			b.Spec.MinAvailable = new(intstr.FromInt32(1))
			b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 2}
		})
		limited, stop := context.WithCancel(ctx)
		defer stop()
		_, err := lifecycle.Drain(limited, l.Dir, "r10", clusterapi.DrainOptions{Force: true}, func(s string) {
			if strings.Contains(s, "waits for the PodDisruptionBudget default/later") {
				stop()
			}
		})
		if ctx.Err() != nil {
			t.Fatal("the drain does not report the budget that it waits for")
		}
		if err == nil || !strings.Contains(err.Error(), "default/later (pod kept: 1 of 2 pods are Ready, but 1 must be)") || !strings.Contains(problem.Remedy(err), "kubectl uncordon r10") {
			t.Errorf("%v: %s", err, problem.Remedy(err))
		}
	})
}

// Two owners, or one in two windows, don't take two nodes at once.
func TestASecondRolloutIsRefusedWhileTheFirstRestartsNodes(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Services(t)
	on := l.Node(t, "r11", 71, v1alpha1.RoleWorker)
	kube, err := access.Connect(l.Dir)
	if err != nil {
		t.Fatal(err)
	}
	_, end, err := kube.Hold(ctx, "kim on desk (process 7)")
	if err != nil {
		t.Fatal(err)
	}
	if err := restartInTurn(ctx, l, nil, "r11"); err == nil || !strings.Contains(err.Error(), "that of kim on desk (process 7), since 20") || !strings.Contains(problem.Remedy(err), "its lease expires at ") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	untouched(t, "r11")
	lease := func() *coordinationv1.Lease {
		t.Helper()
		have, err := kubernetes.NewForConfigOrDie(ownertest.Shared.Admin).CoordinationV1().Leases(clusterapi.Namespace).Get(ctx, clusterapi.RolloutLease, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return have
	}
	crashed := lease()
	end()
	if h := lease().Spec.HolderIdentity; h != nil && *h != "" {
		t.Errorf("it is still held by %s", *h)
	}
	// One that has crashed is over when its lease has expired.
	crashed.Spec.RenewTime, crashed.ResourceVersion = new(metav1.NewMicroTime(time.Now().Add(-time.Hour))), lease().ResourceVersion
	if _, err := kubernetes.NewForConfigOrDie(ownertest.Shared.Admin).CoordinationV1().Leases(clusterapi.Namespace).Update(ctx, crashed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		ownertest.Obey(ctx, t, "r11", on, l.Public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderDone})
		if h := lease().Spec.HolderIdentity; h == nil || !strings.Contains(*h, fmt.Sprintf("(process %d, ", os.Getpid())) {
			t.Errorf("while it restarts a node, the lease is of %v", h)
		}
		boots(ctx, t, "r11")
	}()
	if err := restartInTurn(ctx, l, nil, "r11"); err != nil {
		t.Error(err)
	}
	<-done
}
