package main

import (
	"context"
	"sync"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestASignerThatDoesNotSign(t *testing.T) {
	s := setUp(t, signsSoon)
	m := s.machine(t)
	binding := &rbacv1.ClusterRoleBinding{}
	if err := s.Client.Get(t.Context(), client.ObjectKey{Name: "system:controller:certificate-controller"}, binding); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Delete(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	restore := sync.OnceFunc(func() {
		binding.ResourceVersion, binding.UID = "", ""
		if err := s.Client.Create(context.WithoutCancel(t.Context()), binding); err != nil {
			t.Error(err)
		}
	})
	defer restore()
	asker := s.dial(t, m.Attester(attest.PurposeMachine))
	membertest.Eventually(t, func() error { // the API server's authorizer has a cache of its own
		_, err := asker.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
		if err == nil {
			s.forget(t, "w1")
		}
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_CERTIFICATE_PENDING, "%v, want CERTIFICATE_PENDING", err)
	})
	s.refused(t, asker, m, worker(t), attestv1.Reason_REASON_CERTIFICATE_PENDING)
	s.heldFor(t, m, "w1")
	restore()
	membertest.Eventually(t, func() error {
		_, err := asker.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
		return err
	})
}
