package lifecycle

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestADrainKeepsWhatWouldBeLost(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "drained", 41, v1alpha1.RoleWorker)
	managed := func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "1", Controller: new(true)}}
	}
	ownertest.Pod(t, "drained", "managed", managed)
	ownertest.Pod(t, "drained", "alone", nil)
	ownertest.Pod(t, "drained", "scratch", func(p *corev1.Pod) {
		managed(p)
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	})
	drain := func(ctx context.Context, o clusterapi.DrainOptions) (bool, []string, error) {
		var said []string
		cordoned, err := Drain(ctx, l.Dir, "drained", o, func(s string) { said = append(said, s) })
		return cordoned, said, err
	}
	cordoned, _, err := drain(ctx, clusterapi.DrainOptions{})
	if err == nil || !strings.Contains(err.Error(), "alone") || !strings.Contains(err.Error(), "scratch") || !strings.Contains(problem.Remedy(err), "--force") || !cordoned || !ownertest.Unschedulable(t, "drained") || len(ownertest.PodsOn(t, "drained")) != 3 {
		t.Fatalf("%v; %t; left %v", err, cordoned, ownertest.PodsOn(t, "drained"))
	}
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "keep"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(3)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "drained"}},
	}}
	budgets := kubernetes.NewForConfigOrDie(ownertest.Shared.Admin).PolicyV1().PodDisruptionBudgets(metav1.NamespaceDefault)
	if _, err := budgets.Create(ctx, budget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := budgets.Delete(context.WithoutCancel(t.Context()), "keep", metav1.DeleteOptions{}); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	all := clusterapi.DrainOptions{Force: true, EmptyDir: true}
	limited, stop := context.WithCancel(ctx)
	defer stop()
	_, err = Drain(limited, l.Dir, "drained", all, func(s string) {
		if strings.Contains(s, "waits for the PodDisruptionBudget default/keep") {
			stop()
		}
	})
	if ctx.Err() != nil {
		t.Fatal("the drain does not report the budget that it waits for")
	}
	if err == nil || len(ownertest.PodsOn(t, "drained")) != 3 || !strings.Contains(err.Error(), "default/keep") || strings.Contains(err.Error(), "global timeout") {
		t.Fatalf("against a budget: %v; left %v", err, ownertest.PodsOn(t, "drained"))
	}
	if err := budgets.Delete(ctx, "keep", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	cordoned, said, err := drain(ctx, all)
	if err != nil || cordoned || len(ownertest.PodsOn(t, "drained")) > 0 || !slices.Contains(said, "drained: 3 pods evicted") {
		t.Errorf("%v; %t; %q; left %v", err, cordoned, said, ownertest.PodsOn(t, "drained"))
	}
	if err := Uncordon(ctx, l.Dir, "drained"); err != nil || ownertest.Unschedulable(t, "drained") {
		t.Error(err)
	}
	if _, err := Drain(ctx, l.Dir, "drainde", all, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("a name with a typing error: %v", err)
	}
}

func TestABanRefusesWritesWithoutAJoinservice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "bad", 42, v1alpha1.RoleWorker)
	if err := Ban(ctx, l.Dir, "bda", func(string) {}, func() {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("a name with a typing error: %v", err)
	}
	ownertest.Pod(t, "bad", "on-bad", nil)
	evicted := make(chan struct{})
	err := Ban(ctx, l.Dir, "bad", func(s string) {
		if !strings.HasPrefix(s, "banned") {
			close(evicted)
			return
		}
		if n := ownertest.EnrollmentOf(t, "bad"); !n.Spec.Banned || !ownertest.Listed(t).Entry("bad").Suspended {
			t.Error("it may still write")
		}
		evicts(ctx, t, "bad", "on-bad")
	}, func() {})
	if err != nil {
		t.Fatal(err)
	}
	<-evicted
	if err := Unban(ctx, l.Dir, "bad"); err != nil || ownertest.EnrollmentOf(t, "bad").Spec.Banned || ownertest.Listed(t).Entry("bad").Suspended {
		t.Errorf("after the ban is lifted: %v, %+v", err, ownertest.Listed(t).Entry("bad"))
	}
	t.Run("one that a replace has set is not lifted", func(t *testing.T) {
		n := ownertest.EnrollmentOf(t, "bad")
		n.Spec.Banned, n.Annotations = true, map[string]string{v1alpha1.KeepNode: "true"}
		if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
			t.Fatal(err)
		}
		if err := Unban(ctx, l.Dir, "bad"); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED || !ownertest.EnrollmentOf(t, "bad").Spec.Banned {
			t.Error(err)
		}
	})
}

// evicts deletes a node and a pod of it, as joinservice does, which does not run here.
func evicts(ctx context.Context, t *testing.T, node, pod string) {
	t.Helper()
	for _, o := range []client.Object{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: pod}}} {
		if err := ownertest.Shared.Client.Delete(ctx, o, client.GracePeriodSeconds(0)); err != nil {
			t.Error(err)
		}
	}
}

// J10: the mark that an interrupted replacement leaves keeps joinservice from evicting the node.
func TestABanAfterAnInterruptedReplacementEvicts(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "half", 43, v1alpha1.RoleWorker)
	ownertest.Pod(t, "half", "on-half", nil)
	n := ownertest.EnrollmentOf(t, "half")
	n.Spec.Banned, n.Annotations = true, map[string]string{v1alpha1.KeepNode: "true"}
	if err := ownertest.Shared.Client.Update(ctx, n); err != nil {
		t.Fatal(err)
	}
	if err := Ban(ctx, l.Dir, "half", func(s string) {
		if !strings.HasPrefix(s, "banned") {
			return
		}
		if n := ownertest.EnrollmentOf(t, "half"); !n.Spec.Banned || n.Annotations[v1alpha1.KeepNode] != "" {
			t.Errorf("joinservice would not evict it: %+v", n)
		}
		evicts(ctx, t, "half", "on-half")
	}, func() {}); err != nil {
		t.Error(err)
	}
}

// The last step of replace and forget ends the command's own ban, and not one that the owner has set meanwhile. Nor does unban lift the command's own.
func TestACommandDoesNotEndALaterBan(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	for i, tt := range []struct {
		name, when string
		to         *clusterapi.Replacement
		own        string
	}{
		{"changing", "writes refused", &clusterapi.Replacement{MachineID: attest.MachineID{48}.String()}, v1alpha1.KeepNode},
		{"leaving", "Node deleted", nil, v1alpha1.Removing},
	} {
		machine := l.Node(t, tt.name, byte(47+2*i), v1alpha1.RoleWorker).Machine
		d := plan(ctx, t, l.Owned, tt.name, tt.to)
		_, err := d.Do(ctx, func(s string) {
			if !strings.HasPrefix(s, tt.when) {
				return
			}
			if n := ownertest.EnrollmentOf(t, tt.name); n.Annotations[tt.own] == "" {
				t.Errorf("%s: %v", tt.name, n.Annotations)
			}
			if err := Unban(ctx, l.Dir, tt.name); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
				t.Errorf("%s: unban: %v", tt.name, err)
			}
			if err := d.kube.SetBanned(ctx, d.found, true); err != nil {
				t.Error(err)
			}
		})
		if n := ownertest.EnrollmentOf(t, tt.name); err == nil || !strings.Contains(err.Error(), "banned it meanwhile") || !n.Spec.Banned || n.Spec.MachineID != machine.String() || n.Annotations[tt.own] != "" {
			t.Errorf("%s: %v; %+v", tt.name, err, n.Spec)
		}
		leave(ctx, t, l.Owned, tt.name, tt.to) // by a plan that shows the ban
	}
}

// A ban that the plan did not show is not taken for that of the command, which ends with it.
func TestABanAfterThePlanStays(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	for i, to := range []*clusterapi.Replacement{{MachineID: attest.MachineID{50}.String()}, nil} {
		name := []string{"replaced", "forgotten"}[i]
		machine := l.Node(t, name, byte(48+i), v1alpha1.RoleWorker).Machine
		d := plan(ctx, t, l.Owned, name, to)
		if err := d.kube.SetBanned(ctx, d.found, true); err != nil {
			t.Fatal(err)
		}
		_, err := d.Do(ctx, func(string) {})
		if n := ownertest.EnrollmentOf(t, name); err == nil || !strings.Contains(err.Error(), "banned it meanwhile") || !n.Spec.Banned || n.Annotations[v1alpha1.KeepNode] != "" || n.Spec.MachineID != machine.String() {
			t.Errorf("%v; %+v", err, n.Spec)
		}
		leave(ctx, t, l.Owned, name, to) // by a plan that shows the ban
	}
	for i, tt := range []struct {
		name string
		plan func() (*Removal, error)
	}{
		{"erased", func() (*Removal, error) { return PlanForget(ctx, l.Dir, "erased", false, true) }},
		{"reset", func() (*Removal, error) {
			r, err := PlanReset(ctx, l.Dir, "reset")
			if err != nil {
				return nil, err
			}
			return r.Removal, nil
		}},
	} {
		on := l.Node(t, tt.name, byte(52+i), v1alpha1.RoleWorker)
		d, err := tt.plan()
		if err == nil {
			err = d.kube.SetBanned(ctx, d.found, true)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.Do(ctx, func(string) {})
		if n := ownertest.EnrollmentOf(t, tt.name); err == nil || !strings.Contains(err.Error(), "banned it meanwhile") || !n.Spec.Banned {
			t.Errorf("%s: %v; %+v", tt.name, err, n.Spec)
		}
		if disk, err := d.kube.Disk(ctx, on.Disk); err != nil || disk == nil || disk.Spec.Erased || disk.Spec.Salt == "" {
			t.Errorf("%s: the salt of its disk: %+v, %v", tt.name, disk, err)
		}
	}
	if n := ownertest.EnrollmentOf(t, "replaced"); n.Spec.Banned || n.Spec.MachineID != (attest.MachineID{50}).String() {
		t.Errorf("%+v", n.Spec)
	}
}

// Another administrator has replaced the disk after the plan was shown.
func TestADiskThatThePlanDidNotNameIsNotErased(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	on := l.Node(t, "exchanged", 54, v1alpha1.RoleWorker)
	d, err := PlanForget(ctx, l.Dir, "exchanged", false, true)
	if err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(on.Disk, "5f0c", "6f0c", 1)
	now, err := d.kube.Presence(ctx, "exchanged")
	if err == nil {
		_, err = d.kube.Replace(ctx, now, clusterapi.Replacement{DiskID: other}, time.Now(), func(string) {})
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Do(ctx, func(string) {})
	if n := ownertest.EnrollmentOf(t, "exchanged"); err == nil || !strings.Contains(err.Error(), "another disk meanwhile: "+other) || n.Spec.Banned {
		t.Errorf("%v; %+v", err, n.Spec)
	}
	if have, err := d.kube.Disk(ctx, on.Disk); err != nil || have == nil || have.Spec.Erased || have.Spec.Salt == "" {
		t.Errorf("the salt of disk %s: %+v, %v", on.Disk, have, err)
	}
}

// The ban that precedes an erasure is the command's own.
func TestANodeWhoseDiskIsErasedIsForgotten(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "erased", 51, v1alpha1.RoleWorker)
	d, err := PlanForget(ctx, l.Dir, "erased", false, true)
	if err != nil {
		t.Fatal(err, problem.Remedy(err))
	}
	out, err := d.Do(ctx, func(string) {})
	if err != nil || out.Erased == "" {
		t.Fatalf("%+v, %v", out, err)
	}
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "erased"}, &v1alpha1.AttestedNode{}); !apierrors.IsNotFound(err) {
		t.Errorf("it is still enrolled: %v", err)
	}
}

// J4: an interrupted forget has revoked the machine's certificates, and its kubelet could write nothing after the ban.
func TestTheBanOfAnInterruptedForgetIsNotLifted(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "leaves", 44, v1alpha1.RoleWorker)
	n := ownertest.EnrollmentOf(t, "leaves")
	n.Status.Ticket = &v1alpha1.Ticket{ID: "01", IssuedAt: metav1.Now(), CertificateID: "X509SHA256=01"}
	if err := ownertest.Shared.Client.Status().Update(ctx, n); err != nil {
		t.Fatal(err)
	}
	ownertest.Pod(t, "leaves", "held-on-leaves", func(p *corev1.Pod) { p.Finalizers = []string{"example.com/keep"} })
	free := func() {
		if err := ownertest.Shared.Client.Patch(context.WithoutCancel(t.Context()), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "held-on-leaves"}},
			client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	}
	t.Cleanup(free)
	if _, err := plan(ctx, t, l.Owned, "leaves", nil).Do(ctx, func(string) {}); err == nil || !strings.Contains(err.Error(), "held-on-leaves") {
		t.Fatalf("%v", err)
	}
	kube, err := access.Connect(l.Dir)
	if err != nil {
		t.Fatal(err)
	}
	err = Unban(ctx, l.Dir, "leaves")
	if attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED || !strings.Contains(problem.Remedy(err), "muster forget leaves") || !ownertest.EnrollmentOf(t, "leaves").Spec.Banned {
		t.Errorf("%v", err)
	}
	t.Run("of a machine with a later ticket it is, after a ban by its owner", func(t *testing.T) {
		ownertest.Access(t, map[string]nodeaccess.Entry{"leaves": {Suspended: true, Revoked: &nodeaccess.Revocation{Until: time.Now().Add(time.Hour), Allowed: []string{"X509SHA256=01"}}}})
		if err := Unban(ctx, l.Dir, "leaves"); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED || !strings.Contains(problem.Remedy(err), "muster ban leaves") {
			t.Errorf("%v", err)
		}
		p, err := enrolled(ctx, kube, "leaves")
		if err == nil {
			err = kube.SetBanned(ctx, p, true)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := Unban(ctx, l.Dir, "leaves"); err != nil || ownertest.EnrollmentOf(t, "leaves").Spec.Banned {
			t.Errorf("%v", err)
		}
	})
}

// Its kms and its kubelet would be shut out, and no joinservice could admit another control plane.
func TestTheOnlyControlPlaneIsNotBanned(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "cp1", 45, v1alpha1.RoleControlPlane)
	l.Node(t, "w1", 46, v1alpha1.RoleWorker)
	if err := Ban(ctx, l.Dir, "cp1", func(string) {}, func() {}); err == nil || !strings.Contains(err.Error(), "only control plane") || ownertest.EnrollmentOf(t, "cp1").Spec.Banned {
		t.Errorf("%v", err)
	}
}
