package orders

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const disk = "5f0c95b6-2a3d-4c7e-9f10-000000000001"

// node is a machine that takes orders; boots and processes come and go.
type node struct {
	t       *testing.T
	root    string
	owner   ed25519.PrivateKey
	image   *metadata.Image
	journal journal.Record
	now     time.Time
	boot    string
	limit   time.Duration // of an action
	actions map[ownerorder.Action]Action

	mu   sync.Mutex
	runs []string
}

func newNode(t *testing.T) *node {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{
		t: t, root: t.TempDir(), owner: private, image: &metadata.Image{OwnerKeys: attest.OwnerKeys{public}}, now: time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC), boot: "boot 1", limit: time.Minute,
		journal: journal.Record{Step: journal.StepDone, Kind: journal.KindJoin, NodeName: "w1", ClusterID: make([]byte, 32), MachineID: attest.MachineID{2}.String(), DiskID: disk},
	}
	n.actions = map[ownerorder.Action]Action{
		ownerorder.ActionDoctor: Doctor(func(context.Context) *checkup.Report {
			n.ran("doctor")
			return &checkup.Report{Findings: []checkup.Finding{{Check: "clock", Level: checkup.OK, Detail: "right"}}}
		}),
		ownerorder.ActionReboot: Reboot(func(context.Context) error { n.ran("reboot"); return nil }),
	}
	return n
}

func (n *node) ran(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.runs = append(n.runs, what)
}

func (n *node) did(want ...string) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(n.runs, want) {
		n.t.Errorf("it did %q, want %q", n.runs, want)
	}
}

// order returns an order that was signed so many seconds after noon.
func (n *node) order(second int, change ...func(*ownerorder.MachineOrder)) ownerorder.SignedMachineOrder {
	n.t.Helper()
	o := ownerorder.MachineOrder{
		Cluster: keys.ClusterID{}.String(), Node: "w1", Machine: attest.MachineID{2}, Disk: disk, Action: ownerorder.ActionDoctor,
		SignedAt: n.now.Add(time.Duration(second) * time.Second), NotAfter: n.now.Add(time.Hour),
	}
	for _, c := range change {
		c(&o)
	}
	s, err := o.Sign(n.owner)
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

func reboot(o *ownerorder.MachineOrder) { o.Action = ownerorder.ActionReboot }

func (n *node) deliver(s ownerorder.SignedMachineOrder) {
	n.t.Helper()
	if err := Deliver(n.root, &joinv1.OwnerOrder{Text: s.Text, Signature: s.Signature}); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) process() *Executor {
	n.t.Helper()
	e, err := New(Config{
		Root: n.root, Image: n.image, Journal: func() (journal.Record, error) { return n.journal, nil }, Actions: n.actions,
		Boot: func() (string, error) { return n.boot, nil }, Poll: time.Millisecond, ActionTime: n.limit, Now: func() time.Time { return n.now }, Log: slog.New(slog.NewTextHandler(n.t.Output(), nil)),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return e
}

// look has one process look into the inbox once.
func (n *node) look() {
	n.t.Helper()
	if err := n.process().once(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) reports(s ownerorder.SignedMachineOrder, want joinv1.OrderState, message string) *joinv1.OrderReport {
	n.t.Helper()
	r, err := Report(n.root)
	if err != nil {
		n.t.Fatal(err)
	}
	if hex.EncodeToString(r.GetDigest()) != s.Digest() || r.GetState() != want || !strings.Contains(r.GetMessage(), message) {
		n.t.Fatalf("it reports %v of %x: %q; want %v of %s: %q", r.GetState(), r.GetDigest(), r.GetMessage(), want, s.Digest(), message)
	}
	return r
}

func TestAnOrderIsExecutedOnce(t *testing.T) {
	n := newNode(t)
	if r, err := Report(n.root); r != nil || err != nil {
		t.Errorf("a machine without orders reports %v, %v", r, err)
	}
	n.look() // there is no inbox
	s := n.order(7)
	n.deliver(s)
	e := n.process()
	for range 3 {
		if err := e.once(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	n.look() // another process
	n.did("doctor")
	r := n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "")
	if r.GetOutput() != `{"findings":[{"check":"clock","level":"ok","detail":"right"}]}` || r.GetAction() != "doctor" || !r.GetBeganAt().IsValid() || !r.GetEndedAt().IsValid() {
		t.Errorf("it reports %v", r)
	}
	// B11: neither the same order nor one that was signed before begins, whatever was said in between.
	stranger := n.order(99)
	stranger.Signature = make([]byte, ed25519.SignatureSize)
	n.deliver(stranger)
	n.look()
	for _, old := range []ownerorder.SignedMachineOrder{s, n.order(6), n.order(7, reboot)} {
		n.deliver(old)
		n.look()
	}
	n.did("doctor")
	n.deliver(n.order(8))
	n.look()
	n.did("doctor", "doctor")
}

// B11: each of these orders is refused, and the machine says why.
func TestAnOrderThatIsNotForThisMachineIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*node)
		order  func(*node) ownerorder.SignedMachineOrder
		says   string
	}{
		"not signed by the owner": {order: func(n *node) ownerorder.SignedMachineOrder {
			s := n.order(1)
			s.Signature[0] ^= 1
			return s
		}, says: "not signed with a key of the owner"},
		"for another machine": {order: func(n *node) ownerorder.SignedMachineOrder {
			return n.order(1, func(o *ownerorder.MachineOrder) { o.Machine[0] ^= 1 })
		}, says: "it is for machine"},
		"for another name":    {change: func(n *node) { n.journal.NodeName = "cp1" }, says: "it is for node w1"},
		"for the disk before": {change: func(n *node) { n.journal.DiskID = "another" }, says: "it is for a machine with disk"},
		"for another cluster": {change: func(n *node) { n.journal.ClusterID = append(make([]byte, 31), 1) }, says: "it is for cluster"},
		"too late": {order: func(n *node) ownerorder.SignedMachineOrder {
			s := n.order(1)
			n.now = n.now.Add(2 * time.Hour)
			return s
		}, says: "the order was valid until"},
		"of an action that it does not know": {order: func(n *node) ownerorder.SignedMachineOrder {
			return n.order(1, func(o *ownerorder.MachineOrder) { o.Action = "dance" })
		}, says: `can't "dance"`},
		"without the owner's key": {change: func(n *node) { n.image.OwnerKeys = nil; n.image.NoOwnerKey = true }, says: "the owner's public key is not known here"},
		"of an owner whom only the journal names, though the image has one": {change: func(n *node) {
			n.journal.OwnerKeys = journal.OwnerKeys(n.image.OwnerKeys)
			other, _, err := ed25519.GenerateKey(nil)
			if err != nil {
				n.t.Fatal(err)
			}
			n.image.OwnerKeys = attest.OwnerKeys{other}
		}, says: "not signed with a key of the owner"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if tt.change != nil {
				tt.change(n)
			}
			s := n.order(1)
			if tt.order != nil {
				s = tt.order(n)
			}
			n.deliver(s)
			n.look()
			n.look()
			n.did()
			n.reports(s, joinv1.OrderState_ORDER_STATE_REFUSED, tt.says)
		})
	}
}

func TestAnImageWithoutAnOwnerTrustsTheOneThatTheJournalNames(t *testing.T) {
	n := newNode(t)
	n.journal.OwnerKeys, n.image.OwnerKeys, n.image.NoOwnerKey = journal.OwnerKeys(n.image.OwnerKeys), nil, true
	n.deliver(n.order(1))
	n.look()
	n.did("doctor")
}

// B11: the times of all keys of the image are one sequence. The key that is being replaced can't have a machine do what was ordered before.
func TestAnOlderOrderOfTheOtherKeyIsRefused(t *testing.T) {
	n := newNode(t)
	next, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	n.image.OwnerKeys = append(n.image.OwnerKeys, next)
	old := n.order(1)
	before := n.owner
	n.owner = private
	n.deliver(n.order(2))
	n.look()
	n.did("doctor")
	n.deliver(old)
	n.look()
	n.did("doctor")
	n.reports(old, joinv1.OrderState_ORDER_STATE_REFUSED, "has decided on one of")
	n.owner = before // a later one counts
	n.deliver(n.order(3))
	n.look()
	n.did("doctor", "doctor")
	n.image.OwnerKeys = attest.OwnerKeys{next} // the next image has dropped the old key
	dropped := n.order(4)
	n.deliver(dropped)
	n.look()
	n.did("doctor", "doctor")
	n.reports(dropped, joinv1.OrderState_ORDER_STATE_REFUSED, "not signed with a key of the owner")
}

// B11: a refusal is for good, also by another process and when what was wrong has been put right; and each signature of a text
// is an order of its own, so that a wrong one does not refuse the right one.
func TestARefusedOrderStaysRefused(t *testing.T) {
	n := newNode(t)
	good := n.order(1)
	bad := good
	bad.Signature = slices.Clone(good.Signature)
	bad.Signature[0] ^= 1
	n.deliver(bad)
	n.look()
	n.reports(bad, joinv1.OrderState_ORDER_STATE_REFUSED, "not signed")
	n.deliver(good)
	n.look()
	n.did("doctor")

	dance := n.order(2, func(o *ownerorder.MachineOrder) { o.Action = "dance" })
	n.deliver(dance)
	n.look()
	n.actions["dance"] = n.actions[ownerorder.ActionDoctor]
	n.look() // the action is known now
	n.deliver(n.order(1))
	n.look()
	n.deliver(dance)
	n.look()
	n.did("doctor")
	n.reports(dance, joinv1.OrderState_ORDER_STATE_REFUSED, "")
}

// B11: a machine whose clock is slow does not keep an order until its clock shows the order's time: by then its owner may have withdrawn it.
func TestAnOrderFromTheFutureIsRefused(t *testing.T) {
	n := newNode(t)
	s := n.order(20 * 60)
	n.deliver(s)
	n.look()
	n.reports(s, joinv1.OrderState_ORDER_STATE_REFUSED, "was signed at 2026-11-26T12:20:00Z by the owner's clock, and here it is 2026-11-26T12:00:00Z")
	n.now, n.boot = n.now.Add(20*time.Minute), "boot 2"
	n.look()
	junk := n.order(30 * 60)
	junk.Signature = make([]byte, ed25519.SignatureSize)
	for _, again := range []ownerorder.SignedMachineOrder{junk, s} {
		n.deliver(again)
		n.look()
	}
	n.did()
	n.deliver(n.order(1))
	n.look()
	n.did("doctor")

	far := n.order(0, func(o *ownerorder.MachineOrder) {
		o.SignedAt, o.NotAfter = n.now.AddDate(1, 0, 0), n.now.AddDate(1, 0, 0).Add(time.Minute)
	})
	for _, s := range []ownerorder.SignedMachineOrder{far, n.order(2)} { // of a workstation whose clock was a year ahead, and right again
		n.deliver(s)
		n.look()
	}
	n.did("doctor", "doctor")
}

// Whoever writes the annotation can put another order into the place of one that has ended. The result stays, for when the order
// is there again.
func TestAResultIsNotReplacedByWhatAnybodySends(t *testing.T) {
	n := newNode(t)
	s := n.order(1)
	n.deliver(s)
	n.look()
	junk := n.order(5)
	junk.Signature = make([]byte, ed25519.SignatureSize)
	for range 2 {
		n.deliver(junk)
		n.look()
		n.reports(junk, joinv1.OrderState_ORDER_STATE_REFUSED, "not signed")
		n.deliver(s)
		n.look()
		n.reports(s, joinv1.OrderState_ORDER_STATE_DONE, "")
		junk.Text += " "
	}
	n.did("doctor")
}

// Before the machine is a node an order is neither begun nor refused.
func TestAnOrderWaitsForTheMachinesJournal(t *testing.T) {
	n := newNode(t)
	n.journal.Step = journal.StepKubeadm
	n.deliver(n.order(1))
	n.look()
	if r, err := Report(n.root); r != nil || err != nil {
		t.Errorf("it reports %v, %v", r, err)
	}
	n.journal.Step = journal.StepDone
	n.look()
	n.did("doctor")
}

// The attester may make what it wants of the inbox.
func TestAnInboxThatIsNoFileIsLeftAlone(t *testing.T) {
	n := newNode(t)
	path := filepath.Join(n.root, Inbox)
	for name, makes := range map[string]func() error{
		"a FIFO":   func() error { return syscall.Mkfifo(path, 0o600) },
		"a folder": func() error { return os.Mkdir(path, 0o700) },
		"a link": func() error {
			n.deliver(n.order(1))
			return errors.Join(os.Rename(path, path+".target"), os.Symlink(path+".target", path))
		},
	} {
		if err := errors.Join(os.RemoveAll(filepath.Dir(path)), os.MkdirAll(filepath.Dir(path), 0o700), makes()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		n.look()
	}
	n.did()
}

// A control plane in trouble finds more than fits: its failures come first.
func TestWhatDoesNotFitIsLeftOutAndSaid(t *testing.T) {
	var r checkup.Report
	r.OK("clock", "right")
	for range 40 {
		r.Add("joinservices", checkup.Warn, "Look.", "%s", strings.Repeat("é", 1000))
	}
	r.Add("TPM", checkup.Fail, "Repair it.", "gone")
	text, err := fitting(&r, maxOutput)
	var got checkup.Report
	if err := errors.Join(err, json.Unmarshal([]byte(text), &got)); err != nil || len(text) > maxOutput {
		t.Fatalf("%d bytes, %v", len(text), err)
	}
	if len(got.Findings) != 2 || got.Findings[0].Check != "TPM" || !strings.Contains(got.Findings[1].Detail, "41 of 42 findings do not fit") {
		t.Errorf("%+v", got)
	}
}

// A joinservice takes requests of 16 KiB: a longer report would cost the machine its attestation.
func TestTheLargestReportFitsIntoARequest(t *testing.T) {
	n := newNode(t)
	n.actions[ownerorder.ActionDoctor] = Action{Run: func(context.Context, Args) (string, error) {
		return strings.Repeat("é", 1<<20), errors.New(strings.Repeat("é", 1<<20))
	}}
	s := n.order(1)
	n.deliver(s)
	n.look()
	if size := proto.Size(n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "é")); size < 5<<10 || size > 6<<10 {
		t.Errorf("a report of %d bytes", size)
	}
}

func TestAnActionThatFailsSaysWhy(t *testing.T) {
	n := newNode(t)
	n.actions[ownerorder.ActionReboot] = Action{Run: func(context.Context, Args) (string, error) {
		return "", errors.New("no way down " + strings.Repeat("é", maxMessage) + " since the door is shut")
	}}
	s := n.order(1, reboot)
	n.deliver(s)
	n.look()
	if r := n.reports(s, joinv1.OrderState_ORDER_STATE_FAILED, "no way down"); len(r.GetMessage()) > maxMessage || len(r.GetMessage()) < maxMessage-4 || !strings.HasSuffix(r.GetMessage(), "é since the door is shut") {
		t.Errorf("a message of %d bytes: %s", len(r.GetMessage()), r.GetMessage())
	}
}

func TestTheInboxTakesNothingLargerThanAnOrder(t *testing.T) {
	root := t.TempDir()
	for _, w := range []*joinv1.OwnerOrder{
		{Text: strings.Repeat("x", ownerorder.MaxMachineOrder+1), Signature: make([]byte, ed25519.SignatureSize)}, {Text: "x", Signature: make([]byte, 63)},
	} {
		if err := Deliver(root, w); err == nil {
			t.Errorf("an order of %d bytes with a signature of %d was stored", len(w.GetText()), len(w.GetSignature()))
		}
	}
	if _, err := os.Stat(filepath.Join(root, Inbox)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is an inbox: %v", err)
	}
}
