package main

import (
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A peer that is refused in the exchange never reaches the RPC, and is recorded nevertheless.
func TestMachinesThatGetNoSession(t *testing.T) {
	s := setUp(t)
	machine := func(o attesttest.Options) *attesttest.Machine { return attesttest.NewMachine(t, s.ca, o) }
	saying := func(change func(*attestv1.Tpm2Evidence)) *attesttest.Machine {
		return machine(attesttest.Options{Tamper: attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) { change(ev.GetTpm2()) }}})
	}
	elsewhere := s.machine(t)
	elsewhere.LockTo([32]byte{0xee})
	shell := s.machine(t)
	shell.SetPCR(12, make32(7))
	otherBoot, err := machine(attesttest.Options{Image: "another image"}).Attester(attest.PurposeMachine).Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{})
	if err != nil {
		t.Fatal(err)
	}
	good := s.machine(t)
	for name, tt := range map[string]struct {
		machine *attesttest.Machine
		purpose attest.Purpose // machine, if it is omitted
		reason  attestv1.Reason
	}{
		"a tampered image":              {machine: machine(attesttest.Options{Image: "one byte differs"}), reason: attestv1.Reason_REASON_POLICY_REFUSED},
		"a changed command line":        {machine: shell, reason: attestv1.Reason_REASON_POLICY_REFUSED},
		"a TPM that no root certifies":  {machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), reason: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a TPM without a certificate":   {machine: machine(attesttest.Options{Bare: true}), reason: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a platform key without a rule": {machine: machine(attesttest.Options{Platform: &attesttest.Platform{Project: "ours", Zone: "a"}}), reason: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a NitroTPM without a rule":     {machine: machine(attesttest.Options{Nitro: &attesttest.Nitro{}}), reason: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a machine of another cluster":  {machine: elsewhere, reason: attestv1.Reason_REASON_LOCK_FOREIGN},
		"a joinservice's evidence":      {machine: good, purpose: attest.PurposeJoinservice, reason: attestv1.Reason_REASON_BINDING_MISMATCH},
		"public evidence":               {machine: good, purpose: attest.PurposePublic, reason: attestv1.Reason_REASON_BINDING_MISMATCH},
		"a quote that was changed":      {machine: saying(func(e *attestv1.Tpm2Evidence) { e.Signature[10] ^= 1 }), reason: attestv1.Reason_REASON_SIGNATURE_INVALID},
		"PCR values of another boot":    {machine: saying(func(e *attestv1.Tpm2Evidence) { e.Pcrs[4] = make([]byte, 32) }), reason: attestv1.Reason_REASON_SIGNATURE_INVALID},
		"no signature":                  {machine: saying(func(e *attestv1.Tpm2Evidence) { e.Signature = nil }), reason: attestv1.Reason_REASON_EVIDENCE_MALFORMED},
		"another boot's event log":      {machine: saying(func(e *attestv1.Tpm2Evidence) { e.Events = otherBoot.GetTpm2().GetEvents() }), reason: attestv1.Reason_REASON_EVENTLOG_REPLAY},
		"a key that is free to sign anything": {
			machine: machine(attesttest.Options{Tamper: attesttest.Tamper{AK: func(p *gotpm.TPMTPublic) { p.ObjectAttributes.Restricted = false }}}), reason: attestv1.Reason_REASON_AK_TEMPLATE,
		},
		"an AK that its TPM can't show to have": {
			machine: machine(attesttest.Options{Tamper: attesttest.Tamper{MAC: func(b []byte) []byte { return make([]byte, len(b)) }}}), reason: attestv1.Reason_REASON_ACTIVATION_FAILED,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.purpose == "" {
				tt.purpose = attest.PurposeMachine
			}
			client := s.dial(t, tt.machine.Attester(tt.purpose))
			refusaltest.Refused(t, s.observations(t), tt.reason, refusaltest.Connection(), func() error {
				_, err := client.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
				return err
			})
			if s.Node(t, "w1") != nil || len(s.CSRs(t)) > 0 || len(s.Access(t).Nodes()) > 0 {
				t.Error("something is left")
			}
		})
	}
	t.Run("only the offending input was wrong", func(t *testing.T) { s.ticketFor(t, good, worker(t)) })
}

// Every RPC requires what a connection has not shown.
func TestEveryRPCWantsAnAttestedMachine(t *testing.T) {
	s := setUp(t)
	url := "https://" + s.join.Addr
	t.Run("of a plain client", func(t *testing.T) {
		refusaltest.EveryProcedure(t, s.observations(t), refusaltest.Plain(t), url, attestv1.Reason_REASON_SESSION_REQUIRED, joinv1connect.JoinServiceName)
	})
	t.Run("of a session without evidence", func(t *testing.T) {
		refusaltest.EveryProcedure(t, s.observations(t), rpc.HTTPClient(s.transport(t, atls.NoAttester)), url, attestv1.Reason_REASON_PEER_NOT_ATTESTED, joinv1connect.JoinServiceName)
	})
	t.Run("of an attested machine, in a message that is not endless", func(t *testing.T) {
		m := s.machine(t)
		w := worker(t, func(w *requestOptions) {
			w.request = func(r *joinv1.IssueJoinTicketRequest) { r.KubeletClientCsr = make([]byte, 300<<10) }
		})
		client, places := s.dial(t, m.Attester(attest.PurposeMachine)), refusaltest.Call(joinv1connect.JoinServiceIssueJoinTicketProcedure)
		places.Audit = append(places.Audit, "machine", m.ID().String())
		refusaltest.Refused(t, s.observations(t), attestv1.Reason_REASON_REQUEST_INVALID, places, func() error {
			_, err := client.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
			return err
		})
		s.ticketFor(t, m, worker(t))
	})
}

// An accepted machine may repeat a refused request in a loop: the records of others, and of grants, are kept.
func TestAMachineThatIsRefusedInALoopLeavesRoomInTheAuditLog(t *testing.T) {
	s := setUp(t)
	loud, quiet := s.machine(t), s.machine(t)
	const calls, burst = 150, 50
	unknown := &joinv1.ReturnJoinTicketRequest{TicketId: make([]byte, 15)} // no ticket has such an ID, which is checked before any rate
	client := s.overOneConnection(t, loud.Attester(attest.PurposeMachine))
	began := time.Now()
	for range calls {
		if _, err := client.ReturnJoinTicket(t.Context(), unknown); rpc.ReasonFrom(err) != attestv1.Reason_REASON_TICKET_UNKNOWN {
			t.Fatal(err)
		}
	}
	bucket := burst + int(time.Since(began)/(10*time.Second)) + 1
	recorded := 0
	for _, r := range s.records(t) {
		if r.Event == "return refused" && r.Machine == loud.ID().String() {
			recorded++
		}
	}
	if recorded < burst || recorded > bucket {
		t.Errorf("%d of %d refusals are recorded one by one, want %d to %d", recorded, calls, burst, bucket)
	}
	if n := s.join.Metric(t, "muster_join_returns_total", "reason", "TICKET_UNKNOWN"); n != calls {
		t.Errorf("%v refusals are counted, want %d", n, calls)
	}
	if n := s.join.Metric(t, "muster_refusals_unrecorded_total"); int(n) != calls-recorded {
		t.Errorf("%v are counted as unrecorded, want %d", n, calls-recorded)
	}
	places := refusaltest.Places{Metric: []string{"muster_join_returns_total"}, Log: []string{"event", "return refused"}, Audit: []string{"event", "return refused", "machine", quiet.ID().String()}}
	refusaltest.Refused(t, s.observations(t), attestv1.Reason_REASON_TICKET_UNKNOWN, places, func() error {
		_, err := s.dial(t, quiet.Attester(attest.PurposeMachine)).ReturnJoinTicket(t.Context(), unknown)
		return err
	})
	s.ticketFor(t, loud, worker(t))
	if !s.recorded(t, func(r audit.Record) bool { return r.Event == "ticket issued" && r.Machine == loud.ID().String() }) {
		t.Error("a ticket left without its record")
	}
}
