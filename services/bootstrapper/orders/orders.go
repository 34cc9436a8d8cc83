// Package orders executes on a machine what its owner has ordered with a signature (B11).
//
// An order comes with the answer to the machine's attestation, so no port is open for it. The attester only stores it in a
// file. The process of this package, which listens nowhere, verifies it, writes to a file of its own that it begins, and
// executes it. The attester reports that file with the next attestation.
package orders

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// The files, below the machine's root.
const (
	// Inbox has the latest order that a joinservice passed on. The attester writes it.
	Inbox = "/var/lib/muster/attester/order"
	// Recorded names the order of which a joinservice has recorded that it runs. The attester writes it.
	Recorded = "/var/lib/muster/attester/recorded"
	// Journal has what was done with the latest order.
	Journal = "/var/lib/muster/orders/journal"
)

const (
	// maxFile bounds the files, in bytes: two orders of [ownerorder.MaxMachineOrder] with messages and outputs, each byte of which may need six in JSON.
	maxFile = 512 << 10
	// maxMessage and maxOutput bound a report's texts, in bytes. A joinservice takes requests of 16 KiB: of a longer one the attestation would be
	// refused, too.
	maxMessage = 1 << 10
	maxOutput  = 4 << 10
	// maxTries limits how often an order is started again after a crash.
	maxTries = 3
	// Poll is how often the inbox is read.
	Poll = 2 * time.Second
	// ActionTime is how long an action may take that has no time of its own.
	ActionTime = 15 * time.Minute
)

// State is how far an order is.
type State string

// The states.
const (
	Running State = "running"
	Done    State = "done"
	Failed  State = "failed"
	Refused State = "refused"
)

var wireStates = map[State]joinv1.OrderState{
	Running: joinv1.OrderState_ORDER_STATE_RUNNING, Done: joinv1.OrderState_ORDER_STATE_DONE,
	Failed: joinv1.OrderState_ORDER_STATE_FAILED, Refused: joinv1.OrderState_ORDER_STATE_REFUSED,
}

// record is the content of [Journal].
type record struct {
	// Begun is the latest signature time of the genuine orders that this machine has started or refused. No order that was signed earlier starts.
	Begun time.Time `json:"begun"`
	// Last is the latest started order, Refused the latest refused one, kept separately so that forged orders do not replace a result.
	Last    entry `json:"last"`
	Refused entry `json:"refused"`
}

// entry is what was done with an order; it is zero if there is none.
type entry struct {
	Order  order             `json:"order"`
	Action ownerorder.Action `json:"action,omitempty"` // empty if the signature is not the owner's
	State  State             `json:"state,omitempty"`
	// Boot is the boot of its first start, Tries the number of its starts.
	Boot    string     `json:"boot,omitempty"`
	Tries   int        `json:"tries,omitempty"`
	Message string     `json:"message,omitempty"`
	Output  string     `json:"output,omitempty"`
	BeganAt *time.Time `json:"beganAt,omitempty"`
	EndedAt *time.Time `json:"endedAt,omitempty"`
}

// order is the content of [Inbox].
type order struct {
	Text      string `json:"text"`
	Signature []byte `json:"signature"`
}

func (o order) signed() ownerorder.SignedMachineOrder {
	return ownerorder.SignedMachineOrder{Text: o.Text, Signature: o.Signature}
}

func (o order) equal(other order) bool {
	return o.Text == other.Text && bytes.Equal(o.Signature, other.Signature)
}

// Deliver puts an order from a joinservice into the inbox, unless it is there. It checks nothing but the size.
func Deliver(root string, w *joinv1.OwnerOrder) error {
	if len(w.GetText()) > ownerorder.MaxMachineOrder || len(w.GetSignature()) != ed25519.SignatureSize {
		return fmt.Errorf("the joinservice sends an order of %d bytes with a signature of %d", len(w.GetText()), len(w.GetSignature()))
	}
	path := filepath.Join(root, Inbox)
	next := order{w.GetText(), w.GetSignature()}
	var have order
	if err := read(path, &have); err == nil && have.equal(next) {
		return nil
	}
	b, err := json.Marshal(next)
	if err != nil {
		return err
	}
	return machine.WriteFile(path, b, 0o600, 0o700)
}

// Report returns the machine's report about the order in its inbox, or otherwise about the latest one that it has started; nil
// if it never had one.
func Report(root string) (*joinv1.OrderReport, error) {
	var rec record
	if err := read(filepath.Join(root, Journal), &rec); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil //nolint:nilnil // there is none
		}
		return nil, err
	}
	e := rec.Last
	var in order
	if err := read(filepath.Join(root, Inbox), &in); err == nil && in.equal(rec.Refused.Order) && !in.equal(rec.Last.Order) {
		e = rec.Refused
	}
	if e.State == "" {
		return nil, nil //nolint:nilnil // there is none
	}
	digest, err := hex.DecodeString(e.Order.signed().Digest())
	if err != nil {
		return nil, err
	}
	at := func(t *time.Time) *timestamppb.Timestamp {
		if t == nil {
			return nil
		}
		return timestamppb.New(*t)
	}
	return &joinv1.OrderReport{Digest: digest, Action: string(e.Action), State: wireStates[e.State], Message: e.Message, Output: e.Output, BeganAt: at(e.BeganAt), EndedAt: at(e.EndedAt)}, nil
}

// read reads a file in JSON. It follows no link and waits for no writer: the attester may make what it wants of the inbox.
func read(path string, into any) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return fmt.Errorf("%s: not a file: %w", path, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return nil
}

// errDamaged is of a file that is no JSON of ours.
var errDamaged = errors.New("it is damaged")

// Config lists what an [Executor] needs. All fields are required.
type Config struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// Image is the image's measured configuration.
	Image *metadata.Image
	// Journal reads the machine's journal.
	Journal func() (journal.Record, error)
	// Actions execute orders.
	Actions map[ownerorder.Action]Action
	// Boot returns the ID of this boot: the kernel's boot_id.
	Boot func() (string, error)
	// Poll is how often the inbox is read: [Poll]. ActionTime is how long an action may take: [ActionTime].
	Poll, ActionTime time.Duration
	Now              func() time.Time
	Log              *slog.Logger
}

// Executor executes orders, one at a time.
type Executor struct {
	cfg    Config
	logged order // what is in the inbox and waits, once the log has it
}

// New returns an Executor, or an error that names the missing field of cfg.
func New(cfg Config) (*Executor, error) {
	if err := required.Fields("orders.New", cfg); err != nil {
		return nil, err
	}
	return &Executor{cfg: cfg}, nil
}

// Run executes orders until ctx ends. It first continues an order that an earlier process or boot has left unfinished. It
// returns an error if it can't read or write its journal, because without it an order could run twice, or if an action does not
// end.
func (e *Executor) Run(ctx context.Context) error {
	rec, err := e.load(ctx)
	if err != nil {
		return err
	}
	if rec.Last.State == Running {
		if err := e.resume(ctx, rec); err != nil {
			return err
		}
	}
	for ctx.Err() == nil {
		if err := e.once(ctx); err != nil {
			return err
		}
		if retry.Wait(ctx, e.cfg.Poll) != nil {
			break
		}
	}
	return nil //nolint:nilerr // stopped by its caller
}

// load reads the journal. A damaged one is kept beside: it may have known of any order that was signed until now, so none of
// those begins.
func (e *Executor) load(ctx context.Context) (record, error) {
	path := filepath.Join(e.cfg.Root, Journal)
	var r record
	err := read(path, &r)
	switch {
	case err == nil:
		return r, nil
	case errors.Is(err, fs.ErrNotExist):
		return record{}, nil
	case !errors.Is(err, errDamaged):
		return record{}, err
	}
	e.cfg.Log.ErrorContext(ctx, "the journal of orders is damaged, and is replaced; orders that were signed before now are refused", "err", err)
	if err := os.Remove(path + ".damaged"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return record{}, err
	}
	if err := os.Link(path, path+".damaged"); err != nil {
		return record{}, err
	}
	r = record{Begun: e.cfg.Now()}
	return r, e.save(r) // it replaces the damaged one by rename
}

func (e *Executor) save(r record) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return machine.WriteFile(filepath.Join(e.cfg.Root, Journal), append(b, '\n'), 0o600, 0o700)
}

// once looks into the inbox, and executes what is new there.
func (e *Executor) once(ctx context.Context) error {
	var in order
	if err := read(filepath.Join(e.cfg.Root, Inbox), &in); err != nil || len(in.Text) > ownerorder.MaxMachineOrder || len(in.Signature) > ed25519.SignatureSize {
		return nil //nolint:nilerr // there is none, or the attester wrote something else: nothing to execute
	}
	rec, err := e.load(ctx)
	if err != nil {
		return err
	}
	if in.equal(rec.Last.Order) || in.equal(rec.Refused.Order) { // B11: orders that were started or refused stay so
		return nil
	}
	log := e.cfg.Log.With("order", in.signed().Digest())
	owner, on, err := addressee(e.cfg.Image, e.cfg.Journal)
	if err != nil {
		e.waits(ctx, in, err)
		return nil
	}
	o, err := in.signed().Genuine(owner, on)
	next := entry{Order: in, Action: o.Action, BeganAt: e.now()}
	if err == nil {
		err = e.may(o, rec.Begun)
		// B11: a genuine order is decided on once, also one from the future: by a slow clock it would outlive its expiry and its withdrawal. An order of a
		// workstation that was days ahead must not refuse all others until then.
		if o.SignedAt.After(rec.Begun) && o.SignedAt.Sub(e.cfg.Now()) <= ownerorder.MaxMachineLife {
			rec.Begun = o.SignedAt
		}
	}
	if err != nil {
		log.WarnContext(ctx, "order refused", "action", string(o.Action), "reason", attest.ReasonName(attest.ReasonOf(err)), "err", err)
		next.State, next.Message, next.BeganAt, next.EndedAt = Refused, cut(err.Error(), maxMessage), nil, e.now()
		rec.Refused = next
		return e.save(rec)
	}
	log.InfoContext(ctx, "order begins", "action", string(o.Action))
	rec.Last = next
	run := e.cfg.Actions[o.Action].Run
	return e.execute(ctx, rec, func(ctx context.Context) (string, error) { return run(ctx, o.Args) })
}

// waits logs once why the order in the inbox is not decided on yet.
func (e *Executor) waits(ctx context.Context, in order, err error) {
	if !in.equal(e.logged) {
		e.logged = in
		e.cfg.Log.WarnContext(ctx, "order waits", "order", in.signed().Digest(), "err", err)
	}
}

// addressee returns the owner whom this machine obeys, and what its orders have to name.
func addressee(image *metadata.Image, load func() (journal.Record, error)) (attest.OwnerKeys, ownerorder.Addressee, error) {
	rec, err := load()
	if err != nil {
		return nil, ownerorder.Addressee{}, err
	}
	id, err := attest.ParseMachineID(rec.MachineID)
	if err != nil || rec.Step != journal.StepDone || len(rec.ClusterID) != len(keys.ClusterID{}) {
		return nil, ownerorder.Addressee{}, errors.Join(errors.New("this machine is no node yet"), err)
	}
	return discovery.OwnerKeys(image, rec), ownerorder.Addressee{Cluster: keys.ClusterID(rec.ClusterID), Node: rec.NodeName, Machine: id, Disk: rec.DiskID}, nil
}

// may returns nil if a genuine order may start now.
func (e *Executor) may(o ownerorder.MachineOrder, begun time.Time) error {
	if err := o.Timely(e.cfg.Now()); err != nil {
		return err
	}
	if !o.SignedAt.After(begun) {
		return fmt.Errorf("the order was signed at %s, and this machine has decided on one of %s", stamp(o.SignedAt), stamp(begun))
	}
	a, known := e.cfg.Actions[o.Action]
	if !known {
		return fmt.Errorf("this version of the bootstrapper can't %q", o.Action)
	}
	if a.Cannot != nil {
		return a.Cannot
	}
	if have, want := slices.Sorted(maps.Keys(o.Args)), slices.Sorted(slices.Values(a.Args)); !slices.Equal(have, want) {
		return fmt.Errorf("%q has the arguments %q here, and not %q", o.Action, want, have)
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// Begun returns the order that this machine has started and not finished, with its digest, or an error if there is none with this action, or if it expired
// more than [ownerorder.MaxMachineLife] ago. Programs with the rights for an action check it, so that the right to start their unit is not a right to give orders (B11).
func Begun(root string, image *metadata.Image, load func() (journal.Record, error), action ownerorder.Action, now time.Time) (o ownerorder.MachineOrder, digest string, err error) {
	var rec record
	if err := read(filepath.Join(root, Journal), &rec); err != nil {
		return ownerorder.MachineOrder{}, "", err
	}
	if rec.Last.State != Running {
		return ownerorder.MachineOrder{}, "", errors.New("no order runs on this machine")
	}
	owner, on, err := addressee(image, load)
	if err != nil {
		return ownerorder.MachineOrder{}, "", err
	}
	o, err = rec.Last.Order.signed().Genuine(owner, on)
	switch {
	case err != nil:
	case o.Action != action:
		err = fmt.Errorf("the order that runs on this machine is %q, not %q", o.Action, action)
	case now.Sub(o.NotAfter) > ownerorder.MaxMachineLife: // B11: who can write the journal of a plain disk can put an old one back
		err = fmt.Errorf("the order that runs on this machine was valid until %s", stamp(o.NotAfter))
	}
	return o, rec.Last.Order.signed().Digest(), err
}

// resume continues a started order, within a day of its expiry. It verifies the signature again, so that an attacker who can
// write the journal of a plain disk can't forge one.
func (e *Executor) resume(ctx context.Context, rec record) error {
	owner, on, err := addressee(e.cfg.Image, e.cfg.Journal)
	if err != nil {
		return err // the next process tries again
	}
	boot, err := e.cfg.Boot()
	if err != nil {
		return err
	}
	rebooted := boot != rec.Last.Boot
	o, err := rec.Last.Order.signed().Genuine(owner, on)
	a, known := e.cfg.Actions[o.Action]
	switch {
	case err != nil:
		err = fmt.Errorf("it was interrupted: %w", err)
	case !known:
		err = fmt.Errorf("it was interrupted, and this version of the bootstrapper can't continue %q", o.Action)
	case e.cfg.Now().Sub(o.NotAfter) > ownerorder.MaxMachineLife:
		err = fmt.Errorf("it was interrupted, and was valid until %s", stamp(o.NotAfter))
	case rec.Last.Tries >= maxTries && (!rebooted || o.Action != ownerorder.ActionReboot): // a reboot that has happened is finished
		err = fmt.Errorf("it was interrupted %d times", rec.Last.Tries)
	}
	e.cfg.Log.InfoContext(ctx, "order continues", "order", rec.Last.Order.signed().Digest(), "action", string(rec.Last.Action), "rebooted", rebooted, "err", err)
	if err != nil {
		return e.end(ctx, rec, "", err)
	}
	return e.execute(ctx, rec, func(ctx context.Context) (string, error) { return a.Resume(ctx, o.Args, rebooted) })
}

// execute writes that the latest order runs, runs it, and writes its end.
func (e *Executor) execute(ctx context.Context, rec record, run func(context.Context) (string, error)) error {
	if rec.Last.Tries == 0 { // the first boot of several: a reboot is finished in each later one
		boot, err := e.cfg.Boot()
		if err != nil {
			return err
		}
		rec.Last.State, rec.Last.Boot = Running, boot
	}
	rec.Last.Tries++
	if err := e.save(rec); err != nil { // B11: before it starts
		return err
	}
	limit := e.cfg.ActionTime
	if own := e.cfg.Actions[rec.Last.Action].Time; own > 0 {
		limit = own
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type result struct {
		output string
		err    error
	}
	got := make(chan result, 1)
	go func() {
		output, err := run(limited)
		got <- result{output, err}
	}()
	select {
	case r := <-got:
		return e.end(ctx, rec, r.output, r.err)
	case <-limited.Done():
	}
	grace := time.NewTimer(limit / 15)
	defer grace.Stop()
	select {
	case r := <-got:
		return e.end(ctx, rec, r.output, r.err)
	case <-grace.C: // it ignores its context: only the end of this process ends it
		err := fmt.Errorf("it has not ended after %s", limit)
		return errors.Join(err, e.end(ctx, rec, "", err))
	}
}

// end writes the result, unless this process is being stopped: then the next process continues.
func (e *Executor) end(ctx context.Context, rec record, output string, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // stopped by its caller
	}
	l := &rec.Last
	l.State, l.Output, l.EndedAt = Done, cut(output, maxOutput), e.now()
	if err != nil {
		l.State, l.Message = Failed, ends(err.Error(), maxMessage)
	}
	e.cfg.Log.InfoContext(ctx, "order ends", "order", l.Order.signed().Digest(), "action", string(l.Action), "state", string(l.State), "message", l.Message)
	return e.save(rec)
}

func (e *Executor) now() *time.Time { return new(e.cfg.Now().UTC().Truncate(time.Second)) }

// ends returns the beginning and the end of a text, limit bytes at most: of a program's output, the last lines have the cause.
func ends(text string, limit int) string {
	const first, gap = 256, " … "
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:first], "") + gap + strings.ToValidUTF8(text[len(text)-(limit-first-len(gap)):], "")
}

// cut returns at most n bytes of a text.
func cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "")
}
