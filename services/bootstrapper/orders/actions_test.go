package orders

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
)

func removal(args map[string]string) func(*ownerorder.MachineOrder) {
	return func(o *ownerorder.MachineOrder) { o.Action, o.Args = ownerorder.ActionRemoveEtcdMember, args }
}

func reset(o *ownerorder.MachineOrder) { o.Action = ownerorder.ActionReset }

// waitFor waits until so many things were done.
func (n *node) waitFor(count int) {
	n.t.Helper()
	for len(n.done()) < count {
		select {
		case <-time.After(time.Millisecond):
		case <-n.t.Context().Done():
			n.t.Fatal("it does not go on")
		}
	}
}

// Arguments are signed with the rest; an action that can't understand one does not begin.
func TestAnActionGetsItsArgumentsAndNoOthers(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*ownerorder.MachineOrder)
		state  joinv1.OrderState
		says   string
		did    []string
	}{
		"a member":          {removal(map[string]string{"member": "cp3"}), joinv1.OrderState_ORDER_STATE_DONE, "", []string{"remove cp3"}},
		"no argument":       {removal(nil), joinv1.OrderState_ORDER_STATE_REFUSED, `has the arguments ["member"] here, and not []`, nil},
		"another one":       {removal(map[string]string{"node": "cp3"}), joinv1.OrderState_ORDER_STATE_REFUSED, `not ["node"]`, nil},
		"one more":          {removal(map[string]string{"member": "cp3", "force": "yes"}), joinv1.OrderState_ORDER_STATE_REFUSED, `not ["force" "member"]`, nil},
		"an empty member":   {removal(map[string]string{"member": ""}), joinv1.OrderState_ORDER_STATE_FAILED, "names no member", nil},
		"the machine's own": {removal(map[string]string{"member": "w1"}), joinv1.OrderState_ORDER_STATE_FAILED, "order it of another control plane", nil},
		"one for a doctor":  {func(o *ownerorder.MachineOrder) { o.Args = map[string]string{"member": "cp3"} }, joinv1.OrderState_ORDER_STATE_REFUSED, `not ["member"]`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.actions[ownerorder.ActionRemoveEtcdMember] = RemoveEtcdMember(func() (string, error) { return "w1", nil }, func(_ context.Context, member string) ([]string, error) {
				n.ran("remove " + member)
				return []string{"member 3 " + member}, nil
			})
			s := n.order(1, tt.change)
			n.deliver(s)
			n.look()
			n.did(tt.did...)
			if r := n.reports(s, tt.state, tt.says); tt.did != nil && r.GetOutput() != "member 3 cp3" {
				t.Errorf("it reports %q", r.GetOutput())
			}
		})
	}
}

func TestAMemberThatIsGoneIsNoError(t *testing.T) {
	a := RemoveEtcdMember(func() (string, error) { return "w1", nil }, func(context.Context, string) ([]string, error) { return nil, nil })
	if out, err := a.Resume(t.Context(), Args{"member": "cp3"}, false); err != nil || out != "etcd has no member cp3" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestAResetErasesAndThenRestarts(t *testing.T) {
	n := newNode(t)
	var fails, unrecorded error
	on := func(mode string) {
		n.actions[ownerorder.ActionReset] = Reset(mode,
			func(context.Context) error { return unrecorded },
			func(context.Context) error { n.ran("erase"); return fails },
			func(context.Context) error { n.ran("reboot"); return nil },
		)
	}
	for i, mode := range []string{metadata.DiskPlain, ""} { // its owner is never told that it has begun
		on(mode)
		s := n.order(i, reset)
		n.deliver(s)
		n.look()
		n.did()
		n.reports(s, joinv1.OrderState_ORDER_STATE_REFUSED, "STATE_DISK: the state disk of this machine has the mode")
	}
	on(metadata.DiskLUKS)
	t.Run("not if the cluster does not know", func(t *testing.T) {
		unrecorded = errors.New("no joinservice answers")
		s := n.order(2, reset)
		n.deliver(s)
		n.look()
		n.did()
		n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "no joinservice answers")
		unrecorded = nil
	})
	t.Run("not if it can't erase", func(t *testing.T) {
		fails = errors.New("no such disk")
		s := n.order(3, reset)
		n.deliver(s)
		n.look()
		n.did("erase")
		n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "no such disk")
	})
	t.Run("the machine goes down in it", func(t *testing.T) {
		fails, n.runs = nil, nil
		s := n.order(4, reset)
		n.deliver(s)
		ctx, down := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- n.process().once(ctx) }()
		n.waitFor(2)
		down()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		n.did("erase", "reboot")
		n.reports(s, joinv1.OrderState_ORDER_STATE_RUNNING, "")
	})
	t.Run("a disk that comes back was not erased", func(t *testing.T) {
		n.runs, n.boot = nil, "boot 2"
		ctx, down := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- n.process().Run(ctx) }()
		n.waitFor(2)
		down()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		n.did("erase", "reboot")
	})
}

// A program with an action's rights does nothing without an order that this machine has begun (B11).
// The owner's program learns of a reset's beginning by what a joinservice has recorded: the machine reports nothing afterwards.
func TestAResetWaitsUntilTheClusterKnows(t *testing.T) {
	n := newNode(t)
	inside := make(chan error, 1)
	n.actions[ownerorder.ActionReset] = Reset(metadata.DiskLUKS, func(ctx context.Context) error {
		go func() { inside <- AwaitRecorded(ctx, n.root, time.Millisecond) }()
		return <-inside
	}, func(context.Context) error { n.ran("erase"); return errors.New("enough") }, nil)
	before, s := n.order(1), n.order(2, reset)
	n.deliver(before)
	n.look()
	report := func(has *joinv1.OwnerOrder) {
		r, err := Report(n.root)
		if err == nil {
			err = NoteRecorded(n.root, r, has)
		}
		if err != nil {
			t.Error(err)
		}
	}
	wire := func(s ownerorder.SignedMachineOrder) *joinv1.OwnerOrder {
		return &joinv1.OwnerOrder{Text: s.Text, Signature: s.Signature}
	}
	report(wire(before)) // which is over
	n.deliver(s)
	done := make(chan error, 1)
	go func() { done <- n.process().once(t.Context()) }()
	for n.state() != joinv1.OrderState_ORDER_STATE_RUNNING {
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("the order does not begin")
		}
	}
	n.did("doctor")
	for _, has := range []*joinv1.OwnerOrder{nil, wire(before)} { // its owner has withdrawn it
		report(has)
		if _, err := os.Stat(filepath.Join(n.root, Recorded)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("with %v: %v", has, err)
		}
	}
	report(wire(s))
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	n.did("doctor", "erase")
}

func TestAnActionsProgramRunsOnlyByOrder(t *testing.T) {
	n := newNode(t)
	late := time.Duration(0)
	begun := func(action ownerorder.Action) error {
		e := n.process()
		_, _, err := Begun(n.root, e.cfg.Image, e.cfg.Journal, action, e.cfg.Now().Add(late))
		return err
	}
	if err := begun(ownerorder.ActionReset); err == nil {
		t.Error("without a journal")
	}
	inside := make(map[ownerorder.Action]error)
	n.actions[ownerorder.ActionReset] = repeatable(func(context.Context, Args) (string, error) {
		for _, a := range []ownerorder.Action{ownerorder.ActionReset, ownerorder.ActionReboot} {
			inside[a] = begun(a)
		}
		late = 2 * ownerorder.MaxMachineLife
		inside["of two days ago"] = begun(ownerorder.ActionReset)
		late = 0
		n.image.OwnerKeys = attest.OwnerKeys{make([]byte, 32)}
		inside["of another owner"] = begun(ownerorder.ActionReset)
		return "", nil
	})
	n.deliver(n.order(1, reset))
	n.look()
	if err := inside[ownerorder.ActionReset]; err != nil {
		t.Error(err)
	}
	if inside[ownerorder.ActionReboot] == nil || inside["of another owner"] == nil || inside["of two days ago"] == nil {
		t.Errorf("%v", inside)
	}
	if err := begun(ownerorder.ActionReset); err == nil || !strings.Contains(err.Error(), "no order runs") {
		t.Errorf("after its end: %v", err)
	}
}
