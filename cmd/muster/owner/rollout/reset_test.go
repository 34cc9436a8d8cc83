package rollout

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
)

// The machine's report comes before anything is forgotten, and of a control plane the etcd member goes first.
func TestAResetIsOrderedAndThenForgotten(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	worker, first, second := l.Node(t, "w1", 43, v1alpha1.RoleWorker), l.Node(t, "cp1", 44, v1alpha1.RoleControlPlane), l.Node(t, "cp2", 45, v1alpha1.RoleControlPlane)
	run := func(name string) error {
		r, err := lifecycle.PlanReset(ctx, l.Dir, name)
		if err != nil {
			return err
		}
		if err := r.RemoveMember(ctx, func(string) {}); err != nil {
			return err
		}
		if err := r.Order(ctx, func(string) {}); err != nil {
			return err
		}
		_, err = r.Do(ctx, func(string) {})
		return err
	}
	gone := func(on ownerorder.Addressee) {
		t.Helper()
		if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: on.Node}, &v1alpha1.AttestedNode{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s is still enrolled: %v", on.Node, err)
		}
		d := &v1alpha1.AttestedDisk{}
		if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: on.Disk}, d); err != nil || !d.Spec.Erased || d.Spec.Salt != "" {
			t.Errorf("its disk still has a key: %v, %+v", err, d.Spec)
		}
	}
	t.Run("one that can't erase keeps its enrollment", func(t *testing.T) {
		l.Obeys(ctx, t, worker, v1alpha1.OrderFailed)
		if err := run("w1"); err == nil || !strings.Contains(err.Error(), "reset failed") {
			t.Errorf("%v", err)
		}
		if n := ownertest.EnrollmentOf(t, "w1"); n.Spec.Banned {
			t.Error("it is banned")
		}
	})
	t.Run("a worker, also after an interruption", func(t *testing.T) {
		r, err := lifecycle.PlanReset(ctx, l.Dir, "w1")
		if err != nil || !strings.HasPrefix(r.Plan[0], "order its machine to erase its state disk "+worker.Disk) {
			t.Fatalf("%v, %q", err, r.Plan)
		}
		done := make(chan time.Time, 1)
		go func() {
			done <- ownertest.Obey(ctx, t, "w1", worker, l.Public, time.Now().Add(-time.Millisecond), []v1alpha1.OrderState{v1alpha1.OrderRunning})
		}()
		if err := r.Order(ctx, func(string) {}); err != nil {
			t.Fatal(err)
		}
		<-done
		// The machine is on its way down and reports nothing any more: a second run does not wait for it.
		if err := run("w1"); err != nil {
			t.Fatal(err)
		}
		gone(worker)
	})
	t.Run("a control plane", func(t *testing.T) {
		r, err := lifecycle.PlanReset(ctx, l.Dir, "cp2")
		if err != nil || !slices.Contains(r.Plan, "have cp1 remove its etcd member, by a signed order: up to five minutes") {
			t.Fatalf("%v, %q", err, r.Plan)
		}
		var removed bool
		l.Obeys(ctx, t, second, v1alpha1.OrderDone) // it shows that it takes orders
		l.Obeys(ctx, t, first, v1alpha1.OrderRunning, v1alpha1.OrderDone)
		if err := r.RemoveMember(ctx, func(string) { removed = true }); err != nil || !removed {
			t.Fatal(err)
		}
		o, err := ownerorder.ParseMachineNote(ownertest.EnrollmentOf(t, "cp1").Annotations[v1alpha1.OwnerOrder])
		if err != nil || !strings.Contains(o.Text, `"action":"remove-etcd-member","args":{"member":"cp2"}`) {
			t.Fatalf("cp1 has the order %s, %v", o.Text, err)
		}
		l.Next(ctx, t, second, v1alpha1.OrderRunning)
		if err := r.Order(ctx, func(string) {}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Do(ctx, func(string) {}); err != nil {
			t.Fatal(err)
		}
		gone(second)
	})
	t.Run("only the machine and disk that its owner has confirmed", func(t *testing.T) {
		on := l.Node(t, "swapped", 58, v1alpha1.RoleWorker)
		r, err := lifecycle.PlanReset(ctx, l.Dir, "swapped")
		if err != nil {
			t.Fatal(err)
		}
		edit := func(spec string) {
			t.Helper()
			for _, s := range []string{`"banned":true`, spec, `"banned":false`} {
				n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "swapped"}}
				if err := ownertest.Shared.Client.Patch(ctx, n, client.RawPatch(types.MergePatchType, []byte(`{"spec":{`+s+`}}`))); err != nil {
					t.Fatal(err)
				}
			}
		}
		for mine, theirs := range map[string]string{
			`"machineID":"` + on.Machine.String() + `"`: `"machineID":"` + strings.Repeat("ee", 32) + `"`,
			`"diskID":"` + on.Disk + `"`:                `"diskID":"5f0c95b6-2a3d-4c7e-9f10-0000000000ee"`,
		} {
			edit(theirs)
			if err := r.Order(ctx, func(string) {}); err == nil || !strings.Contains(err.Error(), "has changed meanwhile") || ownertest.EnrollmentOf(t, "swapped").Annotations[v1alpha1.OwnerOrder] != "" {
				t.Errorf("with %s: %v", theirs, err)
			}
			edit(mine)
		}
		l.Obeys(ctx, t, on, v1alpha1.OrderRunning)
		if err := r.Order(ctx, func(string) {}); err != nil {
			t.Error(err)
		}
	})
	t.Run("one that gets no orders, or has another one", func(t *testing.T) {
		on := l.Node(t, "busy", 47, v1alpha1.RoleWorker)
		n := ownertest.EnrollmentOf(t, on.Node)
		key, err := l.OwnerKey()
		if err != nil {
			t.Fatal(err)
		}
		doctor, err := orders.Sign(l.Dir, n, ownerorder.ActionDoctor, nil, time.Now(), key)
		if err != nil {
			t.Fatal(err)
		}
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, doctor.Note())
		if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if _, err := lifecycle.PlanReset(t.Context(), l.Dir, on.Node); err == nil || !strings.Contains(err.Error(), `has an unfinished order "doctor"`) {
			t.Error(err)
		}
		n = ownertest.EnrollmentOf(t, on.Node)
		n.Spec.Banned = true
		if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if _, err := lifecycle.PlanReset(t.Context(), l.Dir, on.Node); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED || !strings.Contains(problem.Remedy(err), "muster unban") {
			t.Errorf("%v: %s", err, problem.Remedy(err))
		}
	})
	t.Run("a ban after its disk was erased", func(t *testing.T) {
		on := l.Node(t, "half", 48, v1alpha1.RoleWorker)
		n := ownertest.EnrollmentOf(t, on.Node)
		n.Spec.Banned = true
		d := &v1alpha1.AttestedDisk{}
		if err := errors.Join(ownertest.Shared.Client.Update(ctx, n), ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: on.Disk}, d)); err != nil {
			t.Fatal(err)
		}
		d.Spec.Salt, d.Spec.Erased = "", true
		if err := ownertest.Shared.Client.Update(ctx, d); err != nil {
			t.Fatal(err)
		}
		if err := lifecycle.Unban(ctx, l.Dir, on.Node); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_ERASED || !ownertest.EnrollmentOf(t, on.Node).Spec.Banned {
			t.Error(err)
		}
	})
	t.Run("the only control plane", func(t *testing.T) {
		if err := MayRestart(ctx, l.Dir, "cp1"); err == nil || !strings.Contains(err.Error(), "only control plane") {
			t.Error(err)
		}
		if err := MayRestart(ctx, l.Dir, "plain-worker"); err != nil {
			t.Error(err)
		}
		if _, err := lifecycle.PlanReset(ctx, l.Dir, "cp1"); err == nil || !strings.Contains(err.Error(), "only control plane") {
			t.Error(err)
		}
	})
	t.Run("a disk without encryption", func(t *testing.T) {
		l.Node(t, "plain", 46, v1alpha1.RoleWorker)
		n := ownertest.EnrollmentOf(t, "plain")
		n.Spec.DiskMode = v1alpha1.DiskModePlain
		if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		if _, err := lifecycle.PlanReset(ctx, l.Dir, "plain"); err == nil || !strings.Contains(err.Error(), "not encrypted") {
			t.Error(err)
		}
	})
	t.Run("the disk of the first machine, of which nothing is recorded", func(t *testing.T) {
		l.Node(t, "cp3", 49, v1alpha1.RoleControlPlane)
		record := func(mode v1alpha1.DiskMode) {
			t.Helper()
			n := ownertest.EnrollmentOf(t, "cp3")
			n.Spec.DiskMode = mode
			if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
				t.Fatal(err)
			}
		}
		record("")
		if _, err := lifecycle.PlanReset(ctx, l.Dir, "cp3"); attest.ReasonOf(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(problem.Remedy(err), "muster reboot cp3") {
			t.Errorf("%v: %s", err, problem.Remedy(err))
		}
		record(v1alpha1.DiskModeLUKS)
		if _, err := lifecycle.PlanReset(ctx, l.Dir, "cp3"); err != nil {
			t.Error(err)
		}
	})
}
