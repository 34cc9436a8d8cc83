package owner

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestTheOwnerSeesWhoRunsWhichImage(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	fresh(t)
	kube := defined(t)
	access(t, nil)
	ca := attesttest.NewCA(t)
	one, two, none := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "two"}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "three"})
	unused := attesttest.NewMachine(t, ca, attesttest.Options{Image: "four"})
	o := rules(ctx, t, kube, attesttest.Policy(t, ca, []*attesttest.Machine{one, two, unused}, func(*attestv1.Policy) {}))
	runs(t, "n1", one, 0)
	runs(t, "n2", two, 0)
	runs(t, "n3", none, time.Hour)
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
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := newLifecycle(t)
	l.services(t)
	first, second, _ := l.node(t, "r1", 51, v1alpha1.RoleWorker), l.node(t, "r2", 52, v1alpha1.RoleWorker), l.node(t, "r3", 53, v1alpha1.RoleWorker)
	pod(t, "r1", "on-r1", nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		obey(ctx, t, "r1", first, l.public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderRunning, v1alpha1.OrderDone})
		if !unschedulable(t, "r1") || len(podsOn(t, "r1")) > 0 {
			t.Error("r1 was not drained")
		}
		boots(ctx, t, "r1")
		obey(ctx, t, "r2", second, l.public, time.Time{}, []v1alpha1.OrderState{v1alpha1.OrderFailed})
	}()
	var steps []string
	err := l.restart(ctx, func(r *Restarts) {
		r.Drain.Force, r.Report = true, func(node, step string) { steps = append(steps, node+" "+step) }
	}, "r1", "r2", "r3")
	<-done
	if err == nil || !strings.HasPrefix(err.Error(), "r2: r2: reboot failed") || !strings.Contains(remedy(err), "1 of 3 nodes have restarted") || !strings.HasSuffix(remedy(err), "muster rollout reboot r2 r3") {
		t.Errorf("%v: %s", err, remedy(err))
	}
	if unschedulable(t, "r1") || !unschedulable(t, "r2") || unschedulable(t, "r3") {
		t.Error("which nodes take pods is wrong")
	}
	if n := enrollmentOf(t, "r3"); n.Annotations[v1alpha1.OwnerOrder] != "" {
		t.Error("r3 has an order")
	}
	if i := slices.Index(steps, "r1 Ready"); i < 0 || slices.ContainsFunc(steps[:i], func(s string) bool { return strings.HasPrefix(s, "r2") }) {
		t.Errorf("%q", steps)
	}
}

// A node that an interrupted command has drained takes pods again when it is repeated; one that somebody else had made unschedulable does not.
func TestARepeatedRolloutLetsTheNodeTakePodsAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := newLifecycle(t)
	l.services(t)
	on := l.node(t, "r4", 54, v1alpha1.RoleWorker)
	reboot := func(states ...v1alpha1.OrderState) error {
		done, now := make(chan struct{}), time.Now()
		go func() {
			defer close(done)
			obey(ctx, t, "r4", on, l.public, now, states)
			boots(ctx, t, "r4")
		}()
		defer func() { <-done }()
		return l.restart(ctx, nil, "r4")
	}
	if err := reboot(v1alpha1.OrderFailed); err == nil || !unschedulable(t, "r4") {
		t.Fatal(err)
	}
	setBoot(ctx, t, "r4", "first")
	if err := reboot(v1alpha1.OrderDone); err != nil || unschedulable(t, "r4") {
		t.Fatalf("%v: it takes no pods", err)
	}
	if _, err := Drain(ctx, l.Dir, "r4", clusterapi.DrainOptions{}, func(string) {}); err != nil { // muster drain
		t.Fatal(err)
	}
	setBoot(ctx, t, "r4", "second")
	if err := reboot(v1alpha1.OrderDone); err != nil || !unschedulable(t, "r4") {
		t.Fatalf("%v: it takes pods, and was drained by its owner", err)
	}
}

// services makes Muster's DaemonSets look ready, as their controller reports them.
func (l *lifecycle) services(t *testing.T) {
	t.Helper()
	for _, name := range clusterapi.Services {
		labels := map[string]string{"app": name}
		ds := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: name}, Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "x"}}}},
		}}
		daemonSets := kubernetes.NewForConfigOrDie(shared.Admin).AppsV1().DaemonSets(clusterapi.Namespace)
		made, err := daemonSets.Create(t.Context(), ds, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) { // of the chart, by another test
			made, err = daemonSets.Get(t.Context(), name, metav1.GetOptions{})
		} else if err == nil {
			t.Cleanup(func() {
				if err := daemonSets.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		made.Status = appsv1.DaemonSetStatus{ObservedGeneration: made.Generation, DesiredNumberScheduled: 1, CurrentNumberScheduled: 1, UpdatedNumberScheduled: 1, NumberReady: 1}
		if _, err := daemonSets.UpdateStatus(t.Context(), made, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// boots has a Node be Ready in another boot.
func boots(ctx context.Context, t *testing.T, name string) { setBoot(ctx, t, name, "another") }

func setBoot(ctx context.Context, t *testing.T, name, id string) {
	n := &corev1.Node{}
	if err := shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil {
		t.Error(err)
		return
	}
	n.Status.NodeInfo.BootID = id
	if err := shared.Client.Status().Update(ctx, n); err != nil {
		t.Error(err)
	}
}

// restart restarts nodes in turn.
func (l *lifecycle) restart(ctx context.Context, change func(*Restarts), nodes ...string) error {
	r := Restarts{Nodes: nodes, DrainFor: patience, Report: func(string, string) {}}
	if change != nil {
		change(&r)
	}
	return RebootInTurn(ctx, l.Dir, r)
}
