package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"sync"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// twin is the machine with another of its TPM's endorsement keys, of the same kind and with a certificate below the same
// root: the policy cannot distinguish it from another machine.
func (s *fixture) twin(t *testing.T, m *attesttest.Machine) *attesttest.Machine {
	t.Helper()
	return attesttest.NewMachine(t, s.ca, attesttest.Options{TPM: m})
}

// asW2 changes a request to one that could be another machine's.
func asW2() func(*requestOptions) { return named("w2", disk2, "192.168.77.13") }

// Invariant A8.
func TestOneTPMIsEnrolledOnce(t *testing.T) {
	s := setUp(t, recordsSoon)
	m := s.machine(t)
	twin := s.twin(t, m)
	s.ticketFor(t, m, worker(t))
	if n := s.Node(t, "w1"); n.Status.AKName == "" {
		t.Fatalf("the attestation key of w1 is not recorded: %+v", n.Status)
	}
	client := s.dial(t, twin.Attester(attest.PurposeMachine))
	before := s.CSRs(t)
	s.refused(t, client, twin, worker(t, asW2()), attestv1.Reason_REASON_TPM_KNOWN)
	s.nothingOf(t, twin)
	s.filedNothing(t, before)

	// The same under the first machine's name, and as a control plane that the owner enrolled.
	s.refused(t, client, twin, worker(t), attestv1.Reason_REASON_TPM_KNOWN)
	s.Enroll(t, "cp2", v1alpha1.AttestedNodeSpec{MachineID: twin.ID().String(), Role: v1alpha1.RoleWorker})
	s.refused(t, client, twin, worker(t, named("cp2", disk2, "192.168.77.13")), attestv1.Reason_REASON_TPM_KNOWN)
	s.forget(t, "cp2")

	// It is reported to the owner.
	membertest.Eventually(t, func() error {
		e, ok := s.waiting(t)[twin.ID().String()]
		return membertest.Want(ok && e.Reason == "TPM_KNOWN", "waiting: %+v", e)
	})

	// The first machine can join again, and when it is removed the other one can join.
	s.ticketFor(t, m, worker(t))
	s.forget(t, "w1")
	membertest.Eventually(t, func() error {
		_, err := client.IssueJoinTicket(t.Context(), worker(t, asW2()).IssueJoinTicketRequest)
		return err
	})
	s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t), attestv1.Reason_REASON_TPM_KNOWN)
}

// TestABannedTPMComesBackAsNoOtherMachine tests a banned machine that shows its other endorsement key (A8).
func TestABannedTPMComesBackAsNoOtherMachine(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	s.ticketFor(t, m, worker(t))
	n := s.Node(t, "w1")
	n.Spec.Banned = true
	if err := s.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	twin := s.twin(t, m)
	membertest.Eventually(t, func() error {
		_, err := s.dial(t, m.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
		return membertest.Want(attest.ReasonOf(err) == attestv1.Reason_REASON_BANNED, "%v, want BANNED", err)
	})
	if _, err := s.dial(t, twin.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), worker(t, asW2()).IssueJoinTicketRequest); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
		t.Errorf("%v, want BANNED", err)
	}
	s.nothingOf(t, twin)
	// The policy refuses its RSA key, since the root certifies keys on P-256.
	byRSA := attesttest.NewMachine(t, s.ca, attesttest.Options{TPM: m, EK: attest.EKRSA2048})
	if _, err := s.dial(t, byRSA.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), worker(t, asW2()).IssueJoinTicketRequest); attest.ReasonOf(err) == attestv1.Reason_REASON_ACCEPTED {
		t.Error("a banned machine came back by its RSA endorsement key")
	}
	s.nothingOf(t, byRSA)
}

// TestOfOneTPMsMachinesThatAskAtOnceNoTwoAreEnrolled accepts any order: whichever machine is first, and also if none
// succeeds, two are never enrolled.
func TestOfOneTPMsMachinesThatAskAtOnceNoTwoAreEnrolled(t *testing.T) {
	s := setUp(t)
	for round := range 5 {
		first := s.machine(t)
		both := []*attesttest.Machine{first, s.twin(t, first)}
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, m := range both {
			client := s.dial(t, m.Attester(attest.PurposeMachine))
			w := worker(t)
			if i == 1 {
				w = worker(t, asW2())
			}
			wg.Go(func() {
				_, errs[i] = client.IssueJoinTicket(context.WithoutCancel(t.Context()), w.IssueJoinTicketRequest)
			})
		}
		wg.Wait()
		if errs[0] == nil && errs[1] == nil {
			t.Errorf("round %d: one TPM was enrolled as two machines", round)
		}
		for i, err := range errs {
			if r := rpc.ReasonFrom(err); err != nil && r != attestv1.Reason_REASON_TPM_KNOWN && !tooSlow(err) {
				t.Errorf("round %d, machine %d: %v", round, i, err)
			}
		}
		s.forget(t, "w1", "w2")
		membertest.Eventually(t, func() error { // joinservice has seen it
			l := &v1alpha1.AttestedNodeList{}
			if err := s.Client.List(t.Context(), l); err != nil {
				return err
			}
			for _, n := range l.Items {
				if n.Name != "cp1" {
					return fmt.Errorf("%s is left with AK %s", n.Name, hex.EncodeToString([]byte(n.Status.AKName))[:8])
				}
			}
			return nil
		})
	}
}
