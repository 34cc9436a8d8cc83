package orders

import (
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// attestedNode is a node whose machine has a TPM.
type attestedNode struct {
	*node
	ca *attesttest.CA
	m  *attesttest.Machine
}

func newAttestedNode(t *testing.T) *attestedNode {
	t.Helper()
	ca := attesttest.NewCA(t)
	n := &attestedNode{newNode(t), ca, attesttest.NewMachine(t, ca, attesttest.Options{})}
	n.journal.MachineID = n.m.ID().String()
	n.actions[ownerorder.ActionVerify] = Verify(n.root, n.m.Attester(attest.PurposeOrder))
	return n
}

// challenge makes a challenge for the keys of a machine.
func challenge(t *testing.T, ca *attesttest.CA, m *attesttest.Machine) *tpm2.Activation {
	t.Helper()
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{9})
	if err != nil {
		t.Fatal(err)
	}
	a, err := tpm2.NewActivation(c.EKPublic(), c.AKName())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (n *attestedNode) verification(second int, args map[string]string) ownerorder.SignedMachineOrder {
	return n.order(second, func(o *ownerorder.MachineOrder) {
		o.Machine, o.Action, o.Args = n.m.ID(), ownerorder.ActionVerify, args
	})
}

// files returns the names of the evidence.
func (n *attestedNode) files() (names []string) {
	n.t.Helper()
	files, err := os.ReadDir(filepath.Join(n.root, EvidenceFolder))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// verified is whether the answer and the evidence on the machine are for an order and a purpose.
func (n *attestedNode) verified(a *tpm2.Activation, s ownerorder.SignedMachineOrder, p attest.Purpose, mac string) error {
	n.t.Helper()
	b, err := os.ReadFile(filepath.Join(n.root, EvidenceFolder, n.files()[0]))
	if err != nil {
		n.t.Fatal(err)
	}
	ev := &attestv1.Evidence{}
	answer, err := hex.DecodeString(mac)
	if err = errors.Join(err, proto.Unmarshal(b, ev)); err != nil {
		n.t.Fatal(err)
	}
	v := attesttest.Verifier(n.t, n.ca)
	if err := v.Activated(a, &attestv1.Response{Mac: answer}, s.Binding()); err != nil {
		return err
	}
	pending, err := v.Verify(n.t.Context(), ev, attest.NewStatement(p, s.Binding()), s.Binding())
	if err == nil {
		_, err = pending.Complete(nil)
	}
	return err
}

// verify has the machine execute an order, and returns it with its answer.
func (n *attestedNode) verify(second int, a *tpm2.Activation) (s ownerorder.SignedMachineOrder, mac string) {
	n.t.Helper()
	s = n.verification(second, ownerorder.ChallengeArgs(a.Challenge()))
	n.deliver(s)
	n.look()
	return s, n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "").GetOutput()
}

// A5: the evidence is for this order and for no other purpose. One file stays.
func TestAMachineMakesEvidenceForItsOrder(t *testing.T) {
	n := newAttestedNode(t)
	a := challenge(t, n.ca, n.m)
	before, mac := n.verify(1, a)
	if err := n.verified(a, before, attest.PurposeOrder, mac); err != nil {
		t.Error(err)
	}
	a = challenge(t, n.ca, n.m)
	s, mac := n.verify(2, a)
	if names := n.files(); len(names) != 1 || names[0] != s.EvidenceFile() {
		t.Fatalf("the evidence is in %q", names)
	}
	// answered is a challenge with its answer for an order.
	answered := func(p attest.Purpose, s ownerorder.SignedMachineOrder) (*tpm2.Activation, string) {
		a := challenge(t, n.ca, n.m)
		mac, err := n.m.Attester(p).Respond(t.Context(), a.Challenge(), s.Binding())
		if err != nil {
			t.Fatal(err)
		}
		return a, hex.EncodeToString(mac)
	}
	for _, p := range []attest.Purpose{attest.PurposeMachine, attest.PurposeJoinservice, attest.PurposeKMS, attest.PurposePublic} {
		other, mac := answered(p, s)
		if err := n.verified(other, s, p, mac); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
			t.Errorf("as evidence of the purpose %s: %v", p, err)
		}
	}
	other, answer := answered(attest.PurposeOrder, before)
	if err := n.verified(other, before, attest.PurposeOrder, answer); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
		t.Errorf("for the order before: %v", err)
	}
	if err := n.verified(challenge(t, n.ca, n.m), s, attest.PurposeOrder, mac); attest.ReasonOf(err) != attestv1.Reason_REASON_ACTIVATION_FAILED {
		t.Errorf("as an answer to another challenge: %v", err)
	}
	if err := n.verified(a, s, attest.PurposeOrder, mac); err != nil {
		t.Error(err)
	}
}

func TestAVerificationThatWasInterruptedIsMadeAgain(t *testing.T) {
	n := newAttestedNode(t)
	a := challenge(t, n.ca, n.m)
	s := n.verification(1, ownerorder.ChallengeArgs(a.Challenge()))
	n.deliver(s)
	genuine := n.actions[ownerorder.ActionVerify]
	dying, die := context.WithCancel(t.Context())
	n.actions[ownerorder.ActionVerify] = Action{Args: genuine.Args, Run: func(context.Context, Args) (string, error) {
		die()
		return "", errors.New("killed")
	}}
	if err := n.process().once(dying); err != nil {
		t.Fatal(err)
	}
	n.reports(s, joinv1.OrderState_ORDER_STATE_RUNNING, "")
	n.actions[ownerorder.ActionVerify] = genuine
	e := n.process()
	rec, err := e.load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := e.resume(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	if err := n.verified(a, s, attest.PurposeOrder, n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "").GetOutput()); err != nil {
		t.Error(err)
	}
}

// A challenge that the machine can't answer gets no evidence either, and says nothing about its TPM's secrets.
func TestAChallengeForOtherKeysGetsNoEvidence(t *testing.T) {
	n := newAttestedNode(t)
	other := attesttest.NewMachine(t, n.ca, attesttest.Options{})
	good := func() map[string]string { return ownerorder.ChallengeArgs(challenge(t, n.ca, n.m).Challenge()) }
	with := func(name, value string) map[string]string {
		args := good()
		args[name] = value
		return args
	}
	second := 0
	for name, tt := range map[string]struct {
		args map[string]string
		says string
	}{
		"of another machine": {ownerorder.ChallengeArgs(challenge(t, n.ca, other).Challenge()), "ACTIVATION_FAILED"},
		"no base64":          {with(ownerorder.ArgSecret, "?"), "the order's challenge"},
		"an empty one":       {with(ownerorder.ArgCredential, ""), "ACTIVATION_FAILED"},
		"too long":           {ownerorder.ChallengeArgs(&attestv1.Challenge{CredentialBlob: make([]byte, 257)}), "FRAME_INVALID"},
	} {
		second++
		s := n.verification(second, tt.args)
		n.deliver(s)
		n.look()
		if r := n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, tt.says); r.GetOutput() != "" || len(n.files()) > 0 {
			t.Errorf("%s: it answers %q, with the files %q", name, r.GetOutput(), n.files())
		}
	}
	a := challenge(t, n.ca, n.m)
	s := n.verification(second+1, ownerorder.ChallengeArgs(a.Challenge()))
	n.deliver(s)
	n.look()
	if err := n.verified(a, s, attest.PurposeOrder, n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "").GetOutput()); err != nil {
		t.Error(err)
	}
}

// longAttester makes evidence with an event log of so many bytes.
type longAttester struct {
	attest.Attester

	events int
}

func (l longAttester) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	ev, err := l.Attester.Attest(ctx, f, b)
	if err == nil {
		ev.GetTpm2().Events = make([]byte, l.events)
	}
	return ev, err
}

// The owner's program reads no more.
func TestEvidenceThatIsTooLongIsNotWritten(t *testing.T) {
	n := newAttestedNode(t)
	for second, tt := range []struct {
		events, files int
		state         joinv1.OrderState
	}{{ownerorder.MaxEvidence, 0, joinv1.OrderState_ORDER_STATE_FAILED}, {256 << 10, 1, joinv1.OrderState_ORDER_STATE_DONE}} {
		n.actions[ownerorder.ActionVerify] = Verify(n.root, longAttester{n.m.Attester(attest.PurposeOrder), tt.events})
		s := n.verification(second+1, ownerorder.ChallengeArgs(challenge(t, n.ca, n.m).Challenge()))
		n.deliver(s)
		n.look()
		n.reports(s, tt.state, "")
		if got := len(n.files()); got != tt.files {
			t.Errorf("%d bytes: there are %d files", tt.events, got)
		}
	}
}
