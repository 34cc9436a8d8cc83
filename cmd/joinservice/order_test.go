package main

import (
	"crypto/ed25519"
	"encoding/hex"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// says has a node's machine attest with a report of an order.
func (s *fixture) says(t *testing.T, m *attesttest.Machine, r *joinv1.OrderReport) (resp *joinv1.ReattestResponse) {
	t.Helper()
	if err := patiently(t, func() (err error) {
		resp, err = s.dial(t, m.Attester(attest.PurposeMachine)).Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: oneSecret, Order: r})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return resp
}

// gets waits until a machine that attests gets an answer that fits: joinservice learns of a change by a watch.
func (s *fixture) gets(t *testing.T, m *attesttest.Machine, what string, fits func(*joinv1.ReattestResponse) bool) (resp *joinv1.ReattestResponse) {
	t.Helper()
	membertest.Eventually(t, func() (err error) {
		if resp, err = s.reattest(t, m); err != nil {
			return err // too many connections, or attestations, of one machine
		}
		return membertest.Want(fits(resp), "%s: it gets %v", what, resp)
	})
	return resp
}

// An order reaches its machine unchanged until the machine has reported its end, and no other machine; the report reaches the
// owner, and each change of it the audit log.
func TestAnOrderReachesItsMachineUntilItHasEnded(t *testing.T) {
	s := setUp(t)
	m := s.node(t)
	other := s.machine(t)
	s.ticketFor(t, other, worker(t, named("w2", "5f0c95b6-2a3d-4c7e-9f10-0000000000aa", "10.0.0.22")))
	other.LockTo(s.ID)
	if r := s.says(t, m, nil); r.GetOrder() != nil || r.GetInterval().AsDuration() < time.Minute {
		t.Fatalf("without an order it gets %v", r)
	}
	want := orderUntil(t, time.Now().Add(time.Hour))
	s.order(t, "w1", want.Note())
	got := s.gets(t, m, "an order", func(r *joinv1.ReattestResponse) bool { return r.GetOrder() != nil })
	if !is(got, want) || got.GetInterval().AsDuration() != 15*time.Second {
		t.Errorf("it gets %v", got)
	}
	if r := s.says(t, other, nil); r.GetOrder() != nil {
		t.Errorf("another machine gets %v", r)
	}
	digest, err := hex.DecodeString(want.Digest())
	if err != nil {
		t.Fatal(err)
	}
	report := &joinv1.OrderReport{Digest: digest, Action: "doctor", State: joinv1.OrderState_ORDER_STATE_RUNNING}
	if r := s.says(t, m, report); !is(r, want) {
		t.Errorf("while it runs it gets %v", r)
	}
	if st := s.Node(t, "w1").Status.Order; st == nil || st.State != v1alpha1.OrderRunning || st.Action != "doctor" {
		t.Errorf("the owner sees %+v", st)
	}
	// Of another order: this one is not over.
	if r := s.says(t, m, &joinv1.OrderReport{Digest: make([]byte, 32), State: joinv1.OrderState_ORDER_STATE_REFUSED, Message: "no"}); r.GetOrder() == nil {
		t.Error("a report of another order ended it")
	}
	report.State, report.Message, report.Output = joinv1.OrderState_ORDER_STATE_DONE, "\x1b[2Jall \x00well\nReason: NONE", strings.Repeat("é", 4<<10)
	if r := s.says(t, m, report); r.GetOrder() != nil || r.GetInterval().AsDuration() < time.Minute {
		t.Errorf("after its end it gets %v", r)
	}
	s.says(t, m, report) // again: no second record
	st := s.Node(t, "w1").Status.Order
	if st == nil || st.State != v1alpha1.OrderDone || st.Message != " [2Jall  well Reason: NONE" || len(st.Output) != 4<<10 || !strings.HasPrefix(st.Output, "éé") {
		t.Errorf("the owner sees %.100v", st)
	}
	var records []string
	for _, r := range s.records(t) {
		if r.Event == "order reported" && r.Node == "w1" && r.Machine == m.ID().String() {
			records = append(records, r.Order+" "+r.Detail)
		}
	}
	if want := []string{"doctor " + want.Digest() + " running", strings.Repeat("0", 64) + " refused: no", "doctor " + want.Digest() + " done:  [2Jall  well Reason: NONE"}; !slices.Equal(records, want) {
		t.Errorf("the audit log has %q, want %q", records, want)
	}
	for state, want := range map[string]float64{"running": 1, "refused": 1, "done": 1, "failed": 0} {
		if got := s.join.Metric(t, "muster_order_reports_total", "state", state); got != want {
			t.Errorf("%v reports %q are counted, want %v", got, state, want)
		}
	}
	if s.recorded(t, func(r audit.Record) bool {
		return strings.HasPrefix(r.Event, "order") && strings.ContainsAny(r.Detail, "\x1b\x00")
	}) {
		t.Error("a record has characters that change a terminal")
	}
}

// What a machine reports is for display: nonsense is left out, and the attestation counts.
func TestAReportThatIsNoneIsIgnored(t *testing.T) {
	s := setUp(t)
	m := s.node(t)
	for _, r := range []*joinv1.OrderReport{{}, {Digest: make([]byte, 31), State: joinv1.OrderState_ORDER_STATE_DONE}, {Digest: make([]byte, 32), State: 99}} {
		s.says(t, m, r)
	}
	if st := s.Node(t, "w1").Status; st.Order != nil || st.LastVerdict == nil || !st.LastVerdict.Accepted {
		t.Errorf("the owner sees %+v", st)
	}
}

func is(r *joinv1.ReattestResponse, want ownerorder.SignedMachineOrder) bool {
	return proto.Equal(r.GetOrder(), &joinv1.OwnerOrder{Text: want.Text, Signature: want.Signature})
}

func orderUntil(t *testing.T, end time.Time) ownerorder.SignedMachineOrder {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	o, err := ownerorder.MachineOrder{Node: "w1", Action: ownerorder.ActionDoctor, NotAfter: end}.Sign(key)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func (s *fixture) order(t *testing.T, node, note string) {
	t.Helper()
	membertest.Eventually(t, func() error {
		n := s.Node(t, node)
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, note)
		return s.Client.Update(t.Context(), n)
	})
}
