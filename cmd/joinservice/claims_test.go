package main

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// unenroll deletes an enrollment, as `kubectl delete attestednode` does, and waits until joinservice has ended it. The disk
// stays assigned to its machine.
func (s *fixture) unenroll(t *testing.T, node string) {
	t.Helper()
	if err := s.Client.Delete(t.Context(), &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: node}}); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(s.Node(t, node) == nil && !s.Access(t).Entry(node).Suspended, "%s is enrolled, or its removal has not ended", node)
	})
	// Its informer gets changes in order: when joinservice has ended another deletion, it has seen this one.
	later := &v1alpha1.AttestedNode{
		ObjectMeta: metav1.ObjectMeta{Name: "later", Finalizers: []string{v1alpha1.RevokeCertificates}},
		Spec:       v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("e", 64), Role: v1alpha1.RoleWorker},
	}
	if err := errors.Join(s.Client.Create(t.Context(), later), s.Client.Delete(t.Context(), later)); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(s.Node(t, "later") == nil, "an enrollment is being deleted still")
	})
}

// J2: the key of a disk whose enrollment was deleted goes to no other machine, whatever that machine claims, until the
// owner frees the disk. Its own machine may return.
func TestTheKeyOfAForgottenDiskGoesToItsMachineAlone(t *testing.T) {
	s := setUp(t)
	m, other := s.machine(t), s.machine(t)
	first := s.ticketFor(t, m, worker(t, encrypted))
	s.unenroll(t, "w1")

	asks := s.dial(t, other.Attester(attest.PurposeMachine))
	for name, w := range map[string]*joinRequest{
		"under the name of before": worker(t, encrypted),
		"under its own":            worker(t, encrypted, named("w2", disk1, "192.168.77.13")),
		"as a plain one":           worker(t),
	} {
		t.Run(name, func(t *testing.T) {
			before := s.CSRs(t)
			s.refused(t, asks, other, w, attestv1.Reason_REASON_DISK_MISMATCH)
			s.nothingOf(t, other)
			s.filedNothing(t, before)
		})
	}
	t.Run("with an enrollment that says so", func(t *testing.T) {
		s.Enroll(t, "w3", v1alpha1.AttestedNodeSpec{MachineID: other.ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk1, DiskMode: v1alpha1.DiskModeLUKS})
		_ = s.notAgain(t, other, again(func(r *joinv1.IssueRejoinTicketRequest) { r.NodeName = "w3" }), attestv1.Reason_REASON_DISK_MISMATCH)
		s.unenroll(t, "w3")
	})
	if owner := s.DiskOf(t, disk1); owner != m.ID().String() {
		t.Fatalf("the disk is machine %q's", owner)
	}
	t.Run("its own machine comes back", func(t *testing.T) {
		if back := s.ticketFor(t, m, worker(t, encrypted)); !bytes.Equal(back.GetDiskKey(), first.GetDiskKey()) {
			t.Error("with another key")
		}
		s.unenroll(t, "w1")
	})
	t.Run("another machine has a disk of its own", func(t *testing.T) {
		s.ticketFor(t, other, worker(t, encrypted, named("w1", disk2, "192.168.77.12")))
		s.unenroll(t, "w1")
	})
	t.Run("the owner frees it", func(t *testing.T) {
		s.FreeDisk(t, disk1)
		if next := s.ticketFor(t, other, worker(t, encrypted)); bytes.Equal(next.GetDiskKey(), first.GetDiskKey()) { // K4
			t.Error("the next machine is given the key of before")
		}
		s.unenroll(t, "w1")
		s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t, encrypted), attestv1.Reason_REASON_DISK_MISMATCH)
	})
}

// J2: if machines ask at the same time for one disk, each under its own name, one gets its key and keeps it.
func TestOfMachinesThatRaceForADiskOneGetsItsKey(t *testing.T) {
	s := setUp(t)
	const machines = 3
	for round := range 5 {
		disk := diskNumber(round)
		var clients []func() error
		ids := map[string]bool{}
		for i := range machines {
			m := s.machine(t)
			ids[m.ID().String()] = true
			asks := s.dial(t, m.Attester(attest.PurposeMachine))
			w := worker(t, encrypted, named(fmt.Sprintf("w%d", i), disk, fmt.Sprintf("192.168.77.%d", 20+i)))
			clients = append(clients, func() error {
				_, err := asks.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
				return err
			})
		}
		got := map[int]bool{}
		var mu sync.Mutex
		for len(got) == 0 { // both may be refused, see package enroll, and would try again
			var all sync.WaitGroup
			for i, ask := range clients {
				all.Go(func() {
					err := ask()
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						got[i] = true
					} else if rpc.ReasonFrom(err) != attestv1.Reason_REASON_DISK_MISMATCH && !tooSlow(err) {
						t.Errorf("%v, want DISK_MISMATCH", err)
					}
				})
			}
			all.Wait()
			if t.Failed() {
				return
			}
		}
		if owner := s.DiskOf(t, disk); len(got) != 1 || !ids[owner] {
			t.Fatalf("%d machines got the key of the disk, which is machine %q's", len(got), owner)
		}
		for i := range machines { // none of the others later, when nothing is enrolled any more
			if got[i] {
				s.unenroll(t, fmt.Sprintf("w%d", i))
			}
		}
		for i, ask := range clients {
			if err := patiently(t, ask); (err == nil) != got[i] {
				t.Errorf("machine %d, whose the disk is: %v: %v", i, got[i], err)
			}
		}
		s.forget(t, "w0", "w1", "w2")
	}
}

// without removes a right on Muster's objects from joinservice, until back is called.
func (s *fixture) without(t *testing.T, resource, verb string) (back func()) {
	t.Helper()
	role := &rbacv1.ClusterRole{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Name: "muster:joinservice"}, role); err != nil {
		t.Fatal(err)
	}
	rules := role.DeepCopy().Rules
	found := false
	for i, r := range role.Rules {
		if slices.Contains(r.Resources, resource) {
			role.Rules[i].Verbs = slices.DeleteFunc(slices.Clone(r.Verbs), func(v string) bool { return v == verb })
			found = len(role.Rules[i].Verbs) < len(r.Verbs)
		}
	}
	if !found {
		t.Fatalf("joinservice may not %s %s", verb, resource)
	}
	set := func(r []rbacv1.PolicyRule) {
		role.Rules = r
		if err := s.Client.Update(t.Context(), role); err != nil {
			t.Fatal(err)
		}
	}
	set(role.Rules)
	return func() { set(rules) }
}

// If the API server does not answer correctly, this is not the machine's fault: no key is sent, and the machine gets a
// pause to try again. The key is sent when the API works again.
func TestWithoutTheAPINoDiskIsOpened(t *testing.T) {
	s := setUp(t)
	m := s.rebooted(t)
	for name, tt := range map[string]struct {
		resource, verb string
	}{
		"the enrollment can't be read":    {resource: "attestednodes", verb: "get"},
		"whose the disk is can't be read": {resource: "attesteddisks", verb: "get"},
	} {
		t.Run(name, func(t *testing.T) {
			back := s.without(t, tt.resource, tt.verb)
			membertest.Eventually(t, func() error { // the API server's authorizer has a cache of its own
				_, err := s.rejoin(t, m, again())
				return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_API_UNAVAILABLE, "%v, want API_UNAVAILABLE", err)
			})
			err := s.notAgain(t, m, again(), attestv1.Reason_REASON_API_UNAVAILABLE)
			if rpc.RetryAfterFrom(err) == 0 {
				t.Errorf("%v has no hint when to try again", err)
			}
			back()
			membertest.Eventually(t, func() error {
				_, err := s.rejoin(t, m, again())
				return err
			})
		})
	}
}
