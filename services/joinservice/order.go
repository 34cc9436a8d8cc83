package joinservice

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// orderInterval is how often a machine with an order attests, so that its owner sees how far it is.
	orderInterval = 15 * time.Second
	// orderRuns is how long after its expiry an order may run until joinservice no longer waits for its end.
	orderRuns = time.Hour
)

// The limits of a report, in bytes, are those of the AttestedNode. A request has at most 16 KiB.
const (
	maxReportAction  = 32
	maxReportMessage = 1 << 10
	maxReportOutput  = 4 << 10
)

// orderFor returns the node's order, until it has expired or the machine has reported its end. joinservice does not verify
// the signature, because the machine does that itself (B11). A malformed order, or one without an expiry, is ignored: a
// machine with an order attests often.
func orderFor(n *v1alpha1.AttestedNode, now time.Time) *joinv1.OwnerOrder {
	signed, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
	if err != nil {
		return nil
	}
	o, err := ownerorder.ParseMachineOrder(signed.Text)
	if err != nil || o.NotAfter.Sub(now) > ownerorder.MaxMachineLife+ownerorder.MaxAhead {
		return nil
	}
	until := o.NotAfter
	if r := n.Status.Order; r != nil && r.Digest == signed.Digest() {
		if r.State != v1alpha1.OrderRunning {
			return nil
		}
		until = until.Add(orderRuns)
	}
	if now.After(until) {
		return nil
	}
	return &joinv1.OwnerOrder{Text: signed.Text, Signature: signed.Signature}
}

var orderStates = map[joinv1.OrderState]v1alpha1.OrderState{
	joinv1.OrderState_ORDER_STATE_RUNNING: v1alpha1.OrderRunning, joinv1.OrderState_ORDER_STATE_DONE: v1alpha1.OrderDone,
	joinv1.OrderState_ORDER_STATE_FAILED: v1alpha1.OrderFailed, joinv1.OrderState_ORDER_STATE_REFUSED: v1alpha1.OrderRefused,
}

// orderReport returns the machine's report of an order, or nil if there is none. A machine that root has taken over writes
// what it wants there: the owner's terminal shows it.
func orderReport(r *joinv1.OrderReport) *v1alpha1.OrderReport {
	state, known := orderStates[r.GetState()]
	if r == nil || !known || len(r.GetDigest()) != sha256.Size {
		return nil
	}
	at := func(t *timestamppb.Timestamp) *metav1.Time {
		if !t.IsValid() {
			return nil
		}
		return new(metav1.NewTime(t.AsTime()))
	}
	return &v1alpha1.OrderReport{
		Digest: hex.EncodeToString(r.GetDigest()), State: state,
		Action: printable.Line(r.GetAction(), maxReportAction), Message: printable.Line(r.GetMessage(), maxReportMessage), Output: printable.Line(r.GetOutput(), maxReportOutput),
		BeganAt: at(r.GetBeganAt()), EndedAt: at(r.GetEndedAt()),
	}
}

// recordOrder counts, and writes to log and audit log, that a machine has reported something else of an order than before.
func (s *Service) recordOrder(ctx context.Context, a *attempt, machine attest.MachineID, before, after *v1alpha1.AttestedNode) {
	was, is := before.Status.Order, after.Status.Order
	if is == nil || was != nil && was.Digest == is.Digest && was.State == is.State {
		return
	}
	if s.limits.orders.Take(machine, a.began) != nil {
		return // a machine that reports something else each time
	}
	s.orders.WithLabelValues(string(is.State)).Inc()
	r := *a
	r.record.Order, r.record.Detail = strings.TrimSpace(is.Action+" "+is.Digest), strings.TrimSuffix(string(is.State)+": "+is.Message, ": ")
	s.cfg.Log.InfoContext(ctx, "order reported", "state", string(is.State), "machine", a.record.Machine, "node", a.record.Node, "order", r.record.Order, "message", is.Message)
	if err := s.write(&r, "order reported"); err != nil {
		s.cfg.Log.ErrorContext(ctx, "the audit record of an order cannot be written", "node", a.record.Node, "order", r.record.Order, "err", err)
	}
}
