package sweeping

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// pod creates a Node and a pod bound to it, and returns the pod and a token of it.
func pod(t *testing.T, account, node string) (*corev1.Pod, string) {
	t.Helper()
	err := servicetest.Shared.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: account}})
	if client.IgnoreAlreadyExists(err) != nil {
		t.Fatal(err)
	}
	p, err := servicetest.Shared.Pod(t.Context(), clusterinfo.Namespace, account, node)
	if err != nil {
		t.Fatal(err)
	}
	token, err := servicetest.Shared.Token(t.Context(), clusterinfo.Namespace, account, "", p)
	if err != nil {
		t.Fatal(err)
	}
	return p, token
}

// knows reports whether the API server accepts the token.
func knows(t *testing.T, token string) bool {
	t.Helper()
	transport, err := rest.TransportFor(&rest.Config{BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAData: servicetest.Shared.Admin.CAData}})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, servicetest.Shared.Admin.Host+"/api", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func exists(t *testing.T, o client.Object) bool {
	t.Helper()
	err := servicetest.Shared.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

func object(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// makeReady creates a Node and makes it Ready.
func makeReady(t *testing.T, k *replica, name string) {
	t.Helper()
	n := object(name)
	n.Labels = map[string]string{clusterinfo.ControlPlaneLabel: ""}
	if err := servicetest.Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error { return membertest.Want(k.State.Node(name).Serves, "the replica does not see %s", name) })
}

func remove(t *testing.T, name string) {
	t.Helper()
	if err := servicetest.Shared.Client.Delete(t.Context(), &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		t.Fatal(err)
	}
}

// A ban ends the tokens that were taken from a node, and what it may read: its Node and the pods on it are deleted.
func TestABanEvicts(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	one := a.Enforcer
	two := newReplica(t).Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	p, token := pod(t, "proxy", "w1")
	other, others := pod(t, "proxy", "w2")
	if !knows(t, token) {
		t.Fatal("before the ban the token is refused")
	}
	enforce(t, one)
	enforce(t, two)
	evicted := func() {
		t.Helper()
		membertest.Eventually(t, func() error { return membertest.Want(!exists(t, object("w1")), "its Node is there") })
		membertest.Eventually(t, func() error { return membertest.Want(!exists(t, p), "its pod is there") })
	}
	servicetest.Ban(t, true)
	evicted()
	membertest.Eventually(t, func() error { return membertest.Want(!knows(t, token), "its token is believed") })
	if !exists(t, other) || !exists(t, object("w2")) || !knows(t, others) {
		t.Error("another node's pod, token or Node is gone")
	}
	// If the Node is created again, by any client, it is soon deleted, and gets no pods.
	if err := servicetest.Shared.Client.Create(t.Context(), object("w1")); err != nil {
		t.Fatal(err)
	}
	late := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: "late"}, Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "x", Image: "x"}}}}
	if err := servicetest.Shared.Client.Create(t.Context(), late); err == nil || !strings.Contains(err.Error(), "w1 may not write") {
		t.Errorf("a pod is bound to it: %v", err)
	}
	evicted()

	servicetest.Ban(t, false)
	membertest.Eventually(t, func() error {
		return membertest.Want(!servicetest.Suspended(t, "w1"), "it may not write again")
	})
	p, _ = pod(t, "proxy", "w1")
	one.stillThere()
	two.stillThere()
	if err := a.leave(t.Context(), "w1"); err != nil || !exists(t, p) || !exists(t, object("w1")) {
		t.Errorf("the ban was lifted, and its Node or pod is gone: %v", err)
	}
}

// A Node that any client creates under a name that is shut out is evicted as soon as it is seen.
func TestANodeThatComesDuringABanIsNoticed(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	e := a.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	noticed := func() {
		t.Helper()
		membertest.Eventually(t, func() error {
			e.mu.Lock()
			defer e.mu.Unlock()
			is := e.leaving["w1"]
			e.leaving = map[string]bool{} // Serve does not run
			return membertest.Want(is, "w1 is not evicted")
		})
	}
	servicetest.Ban(t, true)
	noticed()
	makeReady(t, a, "w1")
	noticed()
}

// The list is written first: a kubelet that may still write would create its Node again.
func TestANodeIsDeletedOnceItMayNotWrite(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	servicetest.Ban(t, true)
	a.State.Cluster.Client = deletes{a.State.Cluster.Client, func(o client.Object) {
		if !servicetest.Suspended(t, "w1") {
			t.Errorf("%T is deleted while its kubelet may write", o)
		}
	}}
	if err := a.leave(t.Context(), "w1"); err != nil || exists(t, object("w1")) {
		t.Errorf("its Node is there: %v", err)
	}
}

// deletes reports what is about to be deleted.
type deletes struct {
	client.Client
	before func(client.Object)
}

func (d deletes) Delete(ctx context.Context, o client.Object, opts ...client.DeleteOption) error {
	d.before(o)
	return d.Client.Delete(ctx, o, opts...)
}

// Objects that appear under the name after the ban was lifted are not those that were banned.
func TestANodeThatComesWhileTheBanIsLiftedStays(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	makeReady(t, a, "w1")
	p, _ := pod(t, "proxy", "w1")
	servicetest.Ban(t, true)
	renew := func(o client.Object) { // between the last check and the deletion
		if err := servicetest.Shared.Client.Delete(t.Context(), o.DeepCopyObject().(client.Object), client.GracePeriodSeconds(0)); err != nil {
			t.Error(err)
		}
	}
	next := object("w1")
	a.State.Cluster.Client = deletes{a.State.Cluster.Client, func(o client.Object) {
		renew(o)
		switch o.(type) {
		case *corev1.Node:
			if err := servicetest.Shared.Client.Create(t.Context(), next); err != nil {
				t.Error(err)
			}
		case *corev1.Pod:
			servicetest.Suspend(t, "w1", false)
			p, _ = pod(t, "proxy", "w1")
		}
	}}
	uid := func() types.UID { // of the existing Node
		n := object("w1")
		exists(t, n)
		return n.UID
	}
	if err := a.leave(t.Context(), "w1"); uid() != next.UID || !exists(t, p) { // while the ban lasts, it is an error that they exist
		t.Errorf("the next Node or pod is gone: %v", err)
	}
}

// As users do it: the name is free when the certificates are revoked, and not before, also while no joinservice runs (J4).
func TestADeletedEnrollmentIsRetiredBeforeItsNameIsFree(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	e := a.Enforcer
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	servicetest.Shared.GiveDisk(t, servicetest.DiskOne, servicetest.Claim(1).Machine)
	p, token := pod(t, "proxy", "w1")
	before := time.Now()
	remove(t, "w1")
	if n := servicetest.Shared.Node(t, "w1"); n == nil || !n.Leaving() {
		t.Fatalf("no joinservice runs, and the enrollment is %+v", n)
	}
	next := servicetest.Claim(2)
	next.Disk = servicetest.DiskTwo
	if err := servicetest.Join(t.Context(), a.Rooms, next, "b"); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_TAKEN {
		t.Errorf("the next machine: %v, want NAME_TAKEN", err)
	}
	cut := enforce(t, e)
	membertest.Eventually(t, func() error {
		return membertest.Want(servicetest.Shared.Node(t, "w1") == nil, "the enrollment is still there")
	})
	if m := <-cut; m != servicetest.Claim(1).Machine {
		t.Errorf("cut %s", m)
	}
	if r := servicetest.Shared.Access(t).Entry("w1").Revoked; r == nil || r.Until.Before(before.Add(nodeaccess.CertificateLife)) || len(r.Allowed) > 0 {
		t.Errorf("revoked: %+v", r)
	}
	if exists(t, object("w1")) || exists(t, p) {
		t.Error("its Node or pod is there")
	}
	membertest.Eventually(t, func() error { return membertest.Want(!knows(t, token), "its token is believed") })
	if servicetest.Shared.DiskOf(t, servicetest.DiskOne) != servicetest.Claim(1).Machine.String() {
		t.Errorf("its disk is %q's", servicetest.Shared.DiskOf(t, servicetest.DiskOne))
	}
	membertest.Eventually(t, func() error {
		return servicetest.Join(t.Context(), a.Rooms, next, "b")
	})
}

func TestAnEnrollmentThatIsBeingDeletedGetsNothing(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	held := servicetest.Shared.Node(t, "w1")
	servicetest.Seen(t, a.Rooms, servicetest.Holds("a"))
	b := newReplica(t)
	stale := b.State.Cluster.Nodes.ByName("w1") // the view of a replica that is behind
	remove(t, "w1")
	for name, try := range map[string]func(k *replica) error{
		"a ticket": func(k *replica) error { return servicetest.Join(t.Context(), k.Rooms, servicetest.Claim(1), "b") },
		"a rejoin": func(k *replica) error { _, err := k.Rejoin(t.Context(), servicetest.Claim(1)); return err },
		"a verdict": func(k *replica) error {
			_, _, err := k.Reattest(t.Context(), servicetest.Claim(1).Machine, servicetest.Claim(1).Boot, servicetest.Ticket("b"))
			return err
		},
		"new certificates": func(k *replica) error {
			_, err := k.BeginRenewal(t.Context(), servicetest.Claim(1), servicetest.Ticket("b"))
			return err
		},
		"a return": func(k *replica) error {
			_, err := k.ReturnTicket(t.Context(), servicetest.Claim(1).Machine, "a")
			return err
		},
		"a certificate": func(*replica) error { return a.List.Allow(t.Context(), held, servicetest.Signed("b")) },
	} {
		t.Run(name, func(t *testing.T) {
			servicetest.Seen(t, a.Rooms, (*v1alpha1.AttestedNode).Leaving)
			if err := try(a); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
				t.Errorf("%v, want BANNED", err)
			}
		})
	}
	t.Run("a verdict, from a replica that is behind", func(t *testing.T) {
		err := b.WriteStatus(t.Context(), stale.DeepCopy(), func(s *v1alpha1.AttestedNodeStatus) error {
			s.ResetCount = new(int64(7))
			return nil
		})
		if n := servicetest.Shared.Node(t, "w1"); err == nil || n.Status.ResetCount != nil && *n.Status.ResetCount == 7 {
			t.Errorf("it was written: %v", err)
		}
	})
	if n := servicetest.Shared.Node(t, "w1"); n == nil || n.Status.Ticket == nil || n.Status.Ticket.ID != "a" {
		t.Errorf("enrollment %+v", n)
	}
}

// The work is done, and another machine has the name. A replica that does the rest late deletes nothing of that machine.
func TestAReplicaThatIsLateTakesNothingFromTheNextMachine(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	b := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	servicetest.Seen(t, b.Rooms, servicetest.Holds("a"))
	remove(t, "w1")
	servicetest.Seen(t, a.Rooms, (*v1alpha1.AttestedNode).Leaving)
	old := servicetest.Shared.Node(t, "w1")
	next := servicetest.Claim(2)
	next.Disk = servicetest.DiskTwo
	if err := b.leave(t.Context(), "w1"); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(b.State.Cluster.Nodes.ByName("w1") == nil, "the enrollment is still there")
	})
	membertest.Eventually(t, func() error {
		e, _ := b.List.Entry("w1")
		return membertest.Want(e.Revoked != nil, "the replica's view is old")
	})
	servicetest.Enroll(t, b.Rooms, next, "b")
	makeReady(t, a, "w1")
	p, _ := pod(t, "proxy", "w1")
	list := servicetest.Shared.Access(t).Entry("w1")
	if list.Revoked == nil || !list.Revoked.Allows(nodeaccess.ID(servicetest.Signed("b"))) {
		t.Fatalf("the next machine's certificate may not write: %+v", list.Revoked)
	}
	for name, step := range map[string]func(context.Context, *v1alpha1.AttestedNode) error{"revoke": a.List.Revoke, "evict": a.evict, "finish": a.finish} {
		if err := step(t.Context(), old); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := blind(a).evict(t.Context(), old); err != nil { // its view of Nodes may be out of date
		t.Error(err)
	}
	if now := servicetest.Shared.Access(t).Entry("w1"); !now.Equal(list) {
		t.Errorf("the list says %+v, and said %+v", now, list)
	}
	if n := servicetest.Shared.Node(t, "w1"); !exists(t, p) || !exists(t, object("w1")) || n == nil || n.Leaving() {
		t.Error("the next machine's enrollment, Node or pod is gone")
	}
	remove(t, "w1") // whose certificates are not revoked yet
	if err := a.finish(t.Context(), old); err != nil || servicetest.Shared.Node(t, "w1") == nil {
		t.Errorf("the deletion of the next machine's enrollment is ended: %v", err)
	}
}

// A ticket of the next machine between read and write of the list keeps its certificate.
func TestARetirementIsWrittenByCompareAndSwap(t *testing.T) {
	servicetest.Shared.Reset(t)
	a := newReplica(t)
	b := newReplica(t)
	servicetest.Enroll(t, a.Rooms, servicetest.Claim(1), "a")
	remove(t, "w1")
	servicetest.Seen(t, b.Rooms, (*v1alpha1.AttestedNode).Leaving)
	old := servicetest.Shared.Node(t, "w1")
	next := servicetest.Claim(2)
	next.Disk = servicetest.DiskTwo
	a.State.Cluster.Client = servicetest.Before{Client: a.State.Cluster.Client, Once: &sync.Once{}, Do: func() {
		if err := b.leave(t.Context(), "w1"); err != nil {
			t.Error(err)
		}
		membertest.Eventually(t, func() error {
			return membertest.Want(b.State.Cluster.Nodes.ByName("w1") == nil, "the enrollment is still there")
		})
		membertest.Eventually(t, func() error {
			e, _ := b.List.Entry("w1")
			return membertest.Want(e.Revoked != nil, "the replica's view is old")
		})
		servicetest.Enroll(t, b.Rooms, next, "b")
	}}
	if err := a.List.Revoke(t.Context(), old); err != nil {
		t.Error(err)
	}
	if r := servicetest.Shared.Access(t).Entry("w1").Revoked; r == nil || !r.Allows(nodeaccess.ID(servicetest.Signed("b"))) {
		t.Errorf("revoked: %+v", r)
	}
}

// Enrollments of the owner or of an earlier version are revoked when they are deleted, like those of tickets.
func TestEachEnrollmentOutlivesItsDeletion(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: servicetest.Claim(1).Machine.String(), Role: v1alpha1.RoleWorker})
	b.after(t, 0)
	if n := servicetest.Shared.Node(t, "w1"); !n.Revokes() {
		t.Errorf("after a sweep: %v", n.Finalizers)
	}
	servicetest.Shared.Reset(t)
	b.current(t)
	servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: servicetest.Claim(1).Machine.String(), Role: v1alpha1.RoleWorker})
	b.current(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	if n := servicetest.Shared.Node(t, "w1"); !n.Revokes() {
		t.Errorf("with a ticket: %v", n.Finalizers)
	}
}

func TestNobodyButTheOwnersProgramEndsMuster(t *testing.T) {
	servicetest.Shared.Reset(t)
	servicetest.Shared.Enroll(t, "cp1", v1alpha1.AttestedNodeSpec{MachineID: servicetest.Claim(1).Machine.String(), Role: v1alpha1.RoleControlPlane})
	crd := &metav1.PartialObjectMetadata{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	for _, name := range []string{"attestednodes.muster.dev", "attesteddisks.muster.dev"} {
		crd.Name = name
		if err := servicetest.Shared.Client.Delete(t.Context(), crd, client.DryRunAll); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
			t.Errorf("the definition %s: %v", name, err)
		}
	}
	if err := servicetest.Shared.Client.Delete(t.Context(), &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "cp1"}}, client.DryRunAll); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		t.Errorf("a control plane's enrollment: %v", err)
	}
	if err := servicetest.Shared.Client.DeleteAllOf(t.Context(), &v1alpha1.AttestedNode{}); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || servicetest.Shared.Node(t, "cp1").Leaving() {
		t.Errorf("all enrollments: %v", err)
	}
	n := servicetest.Shared.Node(t, "cp1")
	n.Spec.Banned, n.Finalizers = true, []string{v1alpha1.RevokeCertificates}
	if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if err := servicetest.Shared.Client.Delete(t.Context(), n, client.DryRunAll); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		t.Errorf("a banned one: %v", err)
	}
	n.Finalizers = nil
	if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if err := servicetest.Shared.Client.Delete(t.Context(), n, client.DryRunAll); err != nil {
		t.Errorf("as muster forget leaves it: %v", err)
	}
}

// blind returns the Enforcer of a joinservice that has seen no Node.
func blind(a *replica) *Enforcer {
	st := &state.State{Cluster: a.State.Cluster, Audit: a.State.Audit, Log: a.State.Log, Now: a.State.Now}
	return &Enforcer{state: st, list: a.List, requests: a.Requests}
}
