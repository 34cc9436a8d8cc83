package sweeping

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// While a Node or a pod exists, its tokens are valid and its Secrets readable. The condition reports that, and the eviction
// continues when it is removed (J10).
func TestAnEvictionIsNotOverWhileSomethingIsThere(t *testing.T) {
	for name, hold := range map[string]func(t *testing.T) client.Object{
		"a pod with a finalizer": func(t *testing.T) client.Object {
			p, _ := pod(t, "proxy", "w1")
			return p
		},
		"a Node with a finalizer": func(t *testing.T) client.Object {
			n := object("w1")
			if !exists(t, n) {
				t.Fatal("no Node")
			}
			return n
		},
	} {
		t.Run(name, func(t *testing.T) {
			servicetest.Shared.Reset(t)
			path := filepath.Join(t.TempDir(), "audit.jsonl")
			log, err := audit.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = log.Close() })
			a := newReplica(t, func(k *servicetest.Rooms) { k.State.Audit = log })
			recorded := func(want int) {
				t.Helper()
				text, err := os.ReadFile(path)
				if n := strings.Count(string(text), `"node evicted"`); err != nil || n != want {
					t.Errorf("recorded %d times: %v, want %d", n, err, want)
				}
			}
			servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
			makeReady(t, a, "w1")
			held := hold(t)
			finalizers := func(list ...string) {
				t.Helper()
				membertest.Eventually(t, func() error {
					if err := servicetest.Shared.Client.Get(t.Context(), client.ObjectKeyFromObject(held), held); err != nil {
						return client.IgnoreNotFound(err)
					}
					held.SetFinalizers(list)
					return client.IgnoreNotFound(servicetest.Shared.Client.Update(t.Context(), held))
				})
			}
			t.Cleanup(func() {
				if err := servicetest.Shared.Client.Patch(context.WithoutCancel(t.Context()), held, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); client.IgnoreNotFound(err) != nil {
					t.Error(err)
				}
			})
			finalizers("example.com/keep")
			servicetest.Ban(t, true)
			servicetest.Seen(t, a.Rooms, func(n *v1alpha1.AttestedNode) bool { return n.Spec.Banned })
			if err := a.leave(t.Context(), "w1"); err == nil || !strings.Contains(err.Error(), "example.com/keep") || !strings.Contains(err.Error(), held.GetName()) {
				t.Errorf("error %v", err)
			}
			recorded(0)
			finalizers()
			for range 2 {
				if err := a.leave(t.Context(), "w1"); err != nil {
					t.Error(err)
				}
				recorded(1)
			}
			if exists(t, object("w1")) || exists(t, held) {
				t.Error("it is still there")
			}
		})
	}
}

// The audit log has which machines were banned, and since when.
func TestBansAndDeletionsAreAudited(t *testing.T) {
	servicetest.Shared.Reset(t)
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	log, err := audit.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	a := newReplica(t, func(k *servicetest.Rooms) { k.State.Audit = log })
	e := a.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	servicetest.Serve(t, func(ctx context.Context) error { return e.Serve(ctx, func(attest.MachineID) {}) })
	machine := servicetest.Claim(1).Machine.String()
	var want []string // evictions and the rest are recorded concurrently
	recorded := func(reason string, events ...string) {
		t.Helper()
		for _, event := range events {
			want = append(want, fmt.Sprintf("%s %s w1 %s", event, reason, machine))
		}
		slices.Sort(want)
		membertest.Eventually(t, func() error {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			var got []string
			for line := range strings.Lines(string(text)) {
				var r audit.Record
				if err := json.Unmarshal([]byte(line), &r); err != nil {
					return err
				}
				got = append(got, fmt.Sprintf("%s %s %s %s", r.Event, r.Reason, r.Node, r.Machine))
			}
			slices.Sort(got)
			return membertest.Want(slices.Equal(got, want), "recorded %q, want %q", got, want)
		})
	}
	servicetest.Ban(t, true)
	recorded("BANNED", "machine shut out", "node evicted")
	servicetest.Ban(t, false)
	recorded("ACCEPTED", "machine let in again")
	remove(t, "w1")
	want = append(want, fmt.Sprintf("machine shut out BANNED w1 %s", machine)) // the other one may follow at once
	recorded("ACCEPTED", "enrollment ended")
}

// `muster replace` bans the machine and keeps the Node for the next one.
func TestTheNodeOfAMachineThatIsReplacedStays(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	n := servicetest.Shared.Node(t, "w1")
	n.Spec.Banned = true
	n.Annotations[v1alpha1.KeepNode] = "true"
	if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if err := a.leave(t.Context(), "w1"); err != nil || !exists(t, object("w1")) || !servicetest.Suspended(t, "w1") {
		t.Errorf("its Node is gone, or it may write: %v", err)
	}
}

// If an administrator lifts the ban of an interrupted `muster replace` by hand, the next ban evicts the node like any
// other.
func TestABanThatIsLiftedByHandLeavesNothing(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	e := a.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	servicetest.Serve(t, func(ctx context.Context) error { return e.Serve(ctx, func(attest.MachineID) {}) })
	n := servicetest.Shared.Node(t, "w1")
	n.Annotations[v1alpha1.KeepNode] = "true" // no joinservice ran when the ban was lifted
	n.Annotations[v1alpha1.Removing] = "true"
	if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		a := servicetest.Shared.Node(t, "w1").Annotations
		return membertest.Want(a[v1alpha1.KeepNode] == "" && a[v1alpha1.Removing] == "", "an annotation is still there")
	})
	servicetest.Ban(t, true)
	membertest.Eventually(t, func() error { return membertest.Want(!exists(t, object("w1")), "its Node is still there") })
}

// A first machine has no ticket, and has no Node after an eviction.
func TestABanThatWasLiftedWhileNoJoinserviceRanIsNoticed(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: servicetest.Claim(1).Machine.String(), Role: v1alpha1.RoleControlPlane})
	b.status(t, func(s *v1alpha1.AttestedNodeStatus) {
		s.Certificates = &v1alpha1.NodeCertificates{ClientExpiresAt: new(metav1.NewTime(time.Now().Add(time.Hour)))}
	})
	servicetest.Suspend(t, "w1", true)
	for range 2 {
		b.after(t, time.Minute)
	}
	if e := servicetest.Shared.Access(t).Entry("w1"); e.Suspended || !e.ControlPlane {
		t.Errorf("the list says %+v", e)
	}
}

// Without its Node the last control plane would not run joinservice, and no ban could be lifted.
func TestTheLastControlPlaneIsNotEvicted(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	for i, name := range []string{"w1", "cp2"} {
		servicetest.Shared.Enroll(t, name, v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{byte(i + 1)}.String(), Role: v1alpha1.RoleControlPlane})
	}
	makeReady(t, a, "w1")
	if err := servicetest.Shared.Client.Create(t.Context(), object("cp2")); err != nil { // not Ready
		t.Fatal(err)
	}
	servicetest.Ban(t, true)
	servicetest.Seen(t, a.Rooms, func(n *v1alpha1.AttestedNode) bool { return n.Spec.Banned })
	if err := a.leave(t.Context(), "w1"); err != nil || !exists(t, object("w1")) {
		t.Errorf("the last one that is Ready is evicted: %v", err)
	}
	n := object("cp2")
	if !exists(t, n) {
		t.Fatal("no cp2")
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	// Its kubelet made the Node after a ban was lifted: joinservice does not run there until it is labeled.
	makeReady(t, a, "other") // not among the enrollments; the replica sees it after what was done to cp2
	if a.State.Node("cp2").Serves {
		t.Error("without the label joinservice can run on cp2")
	}
	if err := a.leave(t.Context(), "w1"); err != nil || !exists(t, object("w1")) {
		t.Errorf("no joinservice can run, and it is evicted: %v", err)
	}
	if err := servicetest.Shared.Client.Get(t.Context(), client.ObjectKeyFromObject(n), n); err != nil {
		t.Fatal(err)
	}
	n.Labels = map[string]string{clusterinfo.ControlPlaneLabel: ""}
	if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error { return membertest.Want(a.State.Node("cp2").Serves, "the replica does not see cp2") })
	if err := a.leave(t.Context(), "w1"); err != nil || exists(t, object("w1")) {
		t.Errorf("with another one it stays: %v", err)
	}
}

// stuck is an API server that cannot delete some pods, as etcd refuses the deletion of one that is too large with its
// finalizers.
type stuck struct{ client.Client }

func (s stuck) Delete(ctx context.Context, o client.Object, opts ...client.DeleteOption) error {
	if strings.HasPrefix(o.GetName(), "stuck-") {
		return errors.New("etcdserver: request is too large")
	}
	return s.Client.Delete(ctx, o, opts...)
}

// Pods that cannot be deleted do not prevent the deletion of others, and are named.
func TestPodsThatCannotBeDeletedKeepNoOtherOne(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	innocent, token := pod(t, "proxy", "w1")
	no := false
	for i := range 2 * podsAtOnce { // they are on the first pages
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("stuck-%02d", i)},
			Spec:       corev1.PodSpec{NodeName: "w1", AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "x", Image: "x"}}},
		}
		if err := servicetest.Shared.Client.Create(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := servicetest.Shared.Client.Delete(context.WithoutCancel(t.Context()), p, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
	}
	servicetest.Ban(t, true)
	servicetest.Seen(t, a.Rooms, func(n *v1alpha1.AttestedNode) bool { return n.Spec.Banned })
	a.State.Cluster.Client = stuck{a.State.Cluster.Client}
	if err := a.leave(t.Context(), "w1"); err == nil || !strings.Contains(err.Error(), "delete pod default/stuck-") || !strings.Contains(err.Error(), "request is too large") {
		t.Errorf("error %v", err)
	}
	if exists(t, innocent) {
		t.Error("a pod that can be deleted is there still")
	}
	membertest.Eventually(t, func() error { return membertest.Want(!knows(t, token), "its token is believed") })
}

// A deletion that waits for dependents, by a finalizer that the API server itself adds, does not delay an eviction: nodes
// may delete their pods in this way.
func TestADeletionThatWaitsForOthersHoldsNoEviction(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	held, _ := pod(t, "proxy", "w1")
	for _, o := range []client.Object{held, object("w1")} {
		if err := servicetest.Shared.Client.Delete(t.Context(), o, client.PropagationPolicy(metav1.DeletePropagationForeground), client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
		if !exists(t, o) {
			t.Fatalf("%T is gone at once: nothing is tried", o)
		}
	}
	servicetest.Ban(t, true)
	servicetest.Seen(t, a.Rooms, func(n *v1alpha1.AttestedNode) bool { return n.Spec.Banned })
	if err := a.leave(t.Context(), "w1"); err != nil || exists(t, held) || exists(t, object("w1")) {
		t.Errorf("they are there still: %v", err)
	}
}
