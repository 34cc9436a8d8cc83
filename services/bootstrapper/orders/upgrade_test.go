package orders

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

func upgrades(o *ownerorder.MachineOrder) {
	o.Action = ownerorder.ActionUpgradeKubernetes
	o.Args = map[string]string{ownerorder.ArgVersion: "1.36.1", ownerorder.ArgList: "{}", ownerorder.ArgPart: ownerorder.PartNode}
}

// The unit's end has no text: the report has what its program has written about this order.
func TestAnUpgradeReportsWhatItsProgramHasWritten(t *testing.T) {
	failed := errors.New("systemctl start muster-upgrade.service: exit status 1")
	for name, tt := range map[string]struct {
		unit   func(n *node) error
		state  joinv1.OrderState
		says   string
		output string
	}{
		"done": {func(n *node) error {
			return WriteResult(n.root, ownerorder.ActionUpgradeKubernetes, `{"version":"1.36.1"}`, nil)
		}, joinv1.OrderState_ORDER_STATE_DONE, "", `{"version":"1.36.1"}`},
		"failed": {func(n *node) error {
			return errors.Join(WriteResult(n.root, ownerorder.ActionUpgradeKubernetes, "", errors.New("kubeadm upgrade apply: no")), failed)
		}, joinv1.OrderState_ORDER_STATE_FAILED, "kubeadm upgrade apply: no", ""},
		"killed":               {func(*node) error { return failed }, joinv1.OrderState_ORDER_STATE_FAILED, "exit status 1", ""},
		"ended without a word": {func(*node) error { return nil }, joinv1.OrderState_ORDER_STATE_FAILED, "left no result", ""},
		"killed after its result": {func(n *node) error {
			return errors.Join(WriteResult(n.root, ownerorder.ActionUpgradeKubernetes, "", nil), failed)
		}, joinv1.OrderState_ORDER_STATE_FAILED, "exit status 1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.actions[ownerorder.ActionUpgradeKubernetes] = UpgradeKubernetes(n.root, func(context.Context) error { n.ran("upgrade"); return tt.unit(n) })
			s := n.order(1, upgrades)
			n.deliver(s)
			n.look()
			n.did("upgrade")
			if r := n.reports(s, tt.state, tt.says); r.GetOutput() != tt.output {
				t.Errorf("output %q", r.GetOutput())
			}
		})
	}
}

func TestTheResultOfAnEarlierUpgradeIsNotReported(t *testing.T) {
	n := newNode(t)
	write := true
	n.actions[ownerorder.ActionUpgradeKubernetes] = UpgradeKubernetes(n.root, func(context.Context) error {
		if write {
			return WriteResult(n.root, ownerorder.ActionUpgradeKubernetes, "first", nil)
		}
		return nil
	})
	first, second := n.order(1, upgrades), n.order(2, upgrades)
	n.deliver(first)
	n.look()
	n.reports(first, joinv1.OrderState_ORDER_STATE_DONE, "")
	write = false
	n.deliver(second)
	n.look()
	n.reports(second, joinv1.OrderState_ORDER_STATE_FAILED, "left no result")
	write = true
	third := n.order(3, upgrades)
	n.actions[ownerorder.ActionUpgradeKubernetes] = UpgradeKubernetes(n.root, func(context.Context) error {
		return errors.Join(WriteResult(n.root, ownerorder.ActionUpgradeKubernetes, "before", nil), BeginResult(n.root, ownerorder.ActionUpgradeKubernetes), BeginResult(n.root, ownerorder.ActionUpgradeKubernetes))
	})
	n.deliver(third)
	n.look()
	n.reports(third, joinv1.OrderState_ORDER_STATE_FAILED, "left no result")
}

// B11: an order has exactly the arguments of its action.
func TestAnUpgradeHasAllArguments(t *testing.T) {
	for _, without := range []string{ownerorder.ArgVersion, ownerorder.ArgList, ownerorder.ArgPart} {
		n := newNode(t)
		n.actions[ownerorder.ActionUpgradeKubernetes] = UpgradeKubernetes(n.root, func(context.Context) error { n.ran("upgrade"); return nil })
		s := n.order(1, upgrades, func(o *ownerorder.MachineOrder) { delete(o.Args, without) })
		n.deliver(s)
		n.look()
		n.did()
		n.reports(s, joinv1.OrderState_ORDER_STATE_REFUSED, "has the arguments")
	}
}

// An action may have a longer time than the others.
func TestAnActionHasItsOwnTime(t *testing.T) {
	if a := UpgradeKubernetes("/", nil); a.Time <= ActionTime || !slices.Equal(a.Args, []string{ownerorder.ArgVersion, ownerorder.ArgList, ownerorder.ArgPart}) {
		t.Errorf("%+v", a)
	}
	n := newNode(t)
	n.limit = time.Millisecond
	n.actions[ownerorder.ActionDoctor] = Action{Time: time.Hour, Run: func(ctx context.Context, _ Args) (string, error) {
		if end, ok := ctx.Deadline(); !ok || time.Until(end) < time.Minute {
			return "", errors.New("too short")
		}
		return "", nil
	}}
	s := n.order(1)
	n.deliver(s)
	n.look()
	n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "")
}

// B11: orders of the largest size, of characters that JSON makes longer, don't damage the journal: another order could begin again.
func TestTheLargestOrdersFitIntoTheJournal(t *testing.T) {
	n := newNode(t)
	n.actions[ownerorder.ActionUpgradeKubernetes] = UpgradeKubernetes(n.root, func(context.Context) error {
		n.ran("upgrade")
		return WriteResult(n.root, ownerorder.ActionUpgradeKubernetes, strings.Repeat("\x01", 2*maxOutput), nil)
	})
	large := func(o *ownerorder.MachineOrder) {
		upgrades(o)
		o.Args[ownerorder.ArgList] = strings.Repeat(`\"`, 3800)
	}
	s := n.order(1, large)
	if len(s.Text) < ownerorder.MaxMachineOrder-2000 || len(s.Text) > ownerorder.MaxMachineOrder {
		t.Fatalf("%d bytes", len(s.Text))
	}
	n.deliver(s)
	n.look()
	n.did("upgrade")
	evil := ownerorder.SignedMachineOrder{Text: strings.Repeat("<", ownerorder.MaxMachineOrder), Signature: make([]byte, 64)}
	n.deliver(evil)
	n.look()
	n.reports(evil, joinv1.OrderState_ORDER_STATE_REFUSED, "")
	n.deliver(s)
	n.look()
	n.did("upgrade")
	n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "")
}
