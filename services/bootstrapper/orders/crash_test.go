package orders

import (
	"context"
	"crypto/ed25519"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// B11: what was begun is finished after a crash, and reported as what it became.
func TestAnOrderGoesOnAfterACrash(t *testing.T) {
	for name, tt := range map[string]struct {
		order  func(*ownerorder.MachineOrder)
		reboot bool
		want   []string
		state  joinv1.OrderState
		says   string
	}{
		"a doctor":                               {want: []string{"doctor", "doctor"}, state: joinv1.OrderState_ORDER_STATE_DONE},
		"a reboot":                               {order: reboot, reboot: true, want: []string{"reboot"}, state: joinv1.OrderState_ORDER_STATE_DONE},
		"a reboot, before the machine went down": {order: reboot, want: []string{"reboot", "reboot"}, state: joinv1.OrderState_ORDER_STATE_RUNNING},
		"an action that this version does not know": {order: func(o *ownerorder.MachineOrder) { o.Action = "dance" }, want: []string{"dance"}, state: joinv1.OrderState_ORDER_STATE_FAILED, says: "interrupted"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			change := tt.order
			if change == nil {
				change = func(*ownerorder.MachineOrder) {}
			}
			s := n.order(1, change)
			n.deliver(s)
			// The first process dies in the middle of the action: it writes nothing any more.
			action := ownerorder.ActionDoctor
			if tt.order != nil {
				var o ownerorder.MachineOrder
				change(&o)
				action = o.Action
			}
			genuine := n.actions[action]
			dying, die := context.WithCancel(t.Context())
			n.actions[action] = Action{Run: func(context.Context, Args) (string, error) {
				n.ran(string(action))
				die()
				return "", errors.New("killed")
			}, Resume: genuine.Resume}
			if err := n.process().once(dying); err != nil {
				t.Fatal(err)
			}
			n.reports(s, joinv1.OrderState_ORDER_STATE_RUNNING, "")
			if n.actions[action] = genuine; genuine.Run == nil {
				delete(n.actions, action)
			}
			if tt.reboot {
				n.boot = "boot 2"
			}
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			e := n.process()
			go func() { done <- e.Run(ctx) }()
			for len(n.done()) < len(tt.want) || tt.state != joinv1.OrderState_ORDER_STATE_RUNNING && n.state() == joinv1.OrderState_ORDER_STATE_RUNNING {
				select {
				case <-time.After(time.Millisecond):
				case <-t.Context().Done():
					t.Fatal("it does not go on")
				}
			}
			stop()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			n.did(tt.want...)
			n.reports(s, tt.state, tt.says)
		})
	}
}

func (n *node) done() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.runs)
}

func (n *node) state() joinv1.OrderState {
	n.t.Helper()
	r, err := Report(n.root)
	if err != nil {
		n.t.Fatal(err)
	}
	return r.GetState()
}

// B11: a process that dies in the boot after a reboot, before it has written the end, does not restart the machine again.
func TestAMachineRestartsOnce(t *testing.T) {
	n := newNode(t)
	s := n.order(1, reboot)
	n.deliver(s)
	dying, die := context.WithCancel(t.Context())
	n.actions[ownerorder.ActionReboot] = Reboot(func(context.Context) error { n.ran("reboot"); die(); return nil })
	if err := n.process().once(dying); err != nil {
		t.Fatal(err)
	}
	n.boot = "boot 2"
	for range 4 {
		gone, end := context.WithCancel(t.Context())
		end() // it is told to end before it can write
		e := n.process()
		rec, err := e.load(gone)
		if err == nil {
			err = e.resume(gone, rec)
		}
		if err != nil {
			t.Fatal(err)
		}
		n.reports(s, joinv1.OrderState_ORDER_STATE_RUNNING, "")
	}
	e := n.process()
	rec, err := e.load(t.Context())
	if err == nil {
		err = e.resume(t.Context(), rec)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.did("reboot")
	n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "")
}

// B11: a journal that can't be read may have known of every order that was signed until then.
func TestAfterADamagedJournalNoEarlierOrderBegins(t *testing.T) {
	for name, content := range map[string]string{"cut off": `{"begun":`, "not JSON": "x", "empty": ""} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			path := filepath.Join(n.root, Journal)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
				t.Fatal(err)
			}
			before, after := n.order(-1), n.order(1)
			n.deliver(before)
			n.look()
			n.did()
			n.reports(before, joinv1.OrderState_ORDER_STATE_REFUSED, "decided on one of")
			n.deliver(after)
			n.look()
			n.did("doctor")
			if b, err := os.ReadFile(path + ".damaged"); err != nil || string(b) != content {
				t.Errorf("put aside was %q, %v", b, err)
			}
		})
	}
}

// B11: without a journal an order might run twice.
func TestWithoutAJournalNothingBegins(t *testing.T) {
	n := newNode(t)
	if err := os.MkdirAll(filepath.Join(n.root, Journal), 0o700); err != nil {
		t.Fatal(err)
	}
	n.deliver(n.order(1))
	if err := n.process().Run(t.Context()); err == nil {
		t.Error("it runs")
	}
	n.did()
}

// Whoever writes the journal of a plain disk can't have an order executed that the owner has not signed.
func TestAnInventedRecordIsNotExecuted(t *testing.T) {
	n := newNode(t)
	s := n.order(1, reboot)
	s.Signature = make([]byte, ed25519.SignatureSize)
	rec := record{Last: entry{Order: order{s.Text, s.Signature}, Action: ownerorder.ActionReboot, State: Running, Boot: "boot 0", Tries: 1}}
	e := n.process()
	if err := errors.Join(e.save(rec), e.resume(t.Context(), rec)); err != nil {
		t.Fatal(err)
	}
	n.did()
	n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "not signed with a key of the owner")
}

// An action that does not end, or kills its process, does not keep the machine from its next order.
func TestAnActionThatNeverEndsIsGivenUp(t *testing.T) {
	t.Run("it ignores its context", func(t *testing.T) {
		n := newNode(t)
		n.limit = 15 * time.Millisecond
		release := make(chan struct{})
		defer close(release)
		n.actions[ownerorder.ActionDoctor] = Action{Run: func(context.Context, Args) (string, error) { <-release; return "", nil }, Resume: n.actions[ownerorder.ActionDoctor].Resume}
		s := n.order(1)
		n.deliver(s)
		if err := n.process().once(t.Context()); err == nil {
			t.Error("its process goes on")
		}
		n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "it has not ended after")
	})
	t.Run("it kills its process", func(t *testing.T) {
		n := newNode(t)
		s := n.order(1)
		n.deliver(s)
		for try := range maxTries + 1 {
			dying, die := context.WithCancel(t.Context())
			crash := func(context.Context, Args) (string, error) { n.ran("crash"); die(); return "", nil }
			n.actions[ownerorder.ActionDoctor] = repeatable(crash)
			e := n.process()
			rec, err := e.load(dying)
			switch {
			case err != nil:
			case try == 0:
				err = e.once(dying)
			default:
				err = e.resume(dying, rec)
			}
			die()
			if err != nil {
				t.Fatal(err)
			}
		}
		n.did("crash", "crash", "crash")
		n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "interrupted 3 times")
	})
}
