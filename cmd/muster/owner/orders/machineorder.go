// Package orders signs orders to machines, and waits for their reports (docs/decisions/0013-orders.md).
package orders

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/trust/attest"
)

// UnfinishedError returns the error for a node that still has another order to execute.
func UnfinishedError(name string, o ownerorder.MachineOrder) error {
	return problem.WithRemedy(fmt.Errorf("node %s has an unfinished order %q, signed at %s", name, o.Action, o.SignedAt.Local().Format(time.DateTime)), "Run that command again to wait for it. If the machine has not started it by "+o.NotAfter.Local().Format(time.DateTime)+", it expires.")
}

// Validity is how long an order to a machine is valid: three times the pause between two attestations, 5 min, and short
// enough that a machine which returns the next day does not execute it.
const Validity = 15 * time.Minute

const (
	// FirstPoll is the first pause before a machine's report is read again.
	FirstPoll = 100 * time.Millisecond
	// ReportPoll is the longest one.
	ReportPoll = 2 * time.Second
	// MaxReport bounds a report's output, in bytes.
	MaxReport = 4 << 10
	// maxMessage bounds its message, in bytes: as much as joinservice stores.
	maxMessage = 1 << 10
)

// Execute signs an order to a node's machine, and waits for the machine's report of its end. Each change is reported to
// report. An order that failed, or that the machine refused, is an error. If the node already has the same order, unexpired
// and unfinished, Execute waits for that one. A different unfinished order is an error.
func Execute(ctx context.Context, d *ownerdir.Dir, name string, action ownerorder.Action, args map[string]string, report func(string)) (*v1alpha1.OrderReport, error) {
	_, r, err := Send(ctx, d, name, Request{Action: action, Args: Fixed(args)}, report)
	return r, err
}

// Request is what [Send] orders.
type Request struct {
	Action ownerorder.Action
	// Args returns the arguments for the machine that has the node.
	Args func(*v1alpha1.AttestedNode) (map[string]string, error)
	// Supersede: the arguments differ in each order (for example a challenge), so an unfinished order with the same action
	// is replaced.
	Supersede bool
	// UntilStarted: return when the machine reports the start, not the end.
	UntilStarted bool
}

// Fixed returns arguments that do not depend on the machine.
func Fixed(args map[string]string) func(*v1alpha1.AttestedNode) (map[string]string, error) {
	return func(*v1alpha1.AttestedNode) (map[string]string, error) { return args, nil }
}

// Send is [Execute], and also returns the order. If ctx ends, it withdraws an order that it has signed, unless the machine has started it.
func Send(ctx context.Context, d *ownerdir.Dir, name string, ask Request, report func(string)) (signed ownerorder.SignedMachineOrder, _ *v1alpha1.OrderReport, _ error) {
	kube, err := access.Connect(d)
	if err != nil {
		return signed, nil, err
	}
	key, err := d.OwnerKey()
	if err != nil {
		return signed, nil, err
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return signed, nil, err
	}
	if err := checkClock(ctx, kube); err != nil {
		return signed, nil, err
	}
	own := written{notes: map[string]bool{}}
	err = kube.PutOrder(ctx, name, func(n *v1alpha1.AttestedNode) (string, error) {
		before, err := PendingOrder(d, public, n, time.Now())
		if err != nil {
			return "", err
		}
		if err := takesKey(n, key); err != nil { // also before an order is replaced that only another folder's key verifies
			return "", err
		}
		args, err := ask.Args(n)
		if err != nil {
			return "", err
		}
		same := func(o ownerorder.MachineOrder) bool { return o.Action == ask.Action && maps.Equal(o.Args, args) }
		if before != nil {
			o, err := ownerorder.ParseMachineOrder(before.Text)
			switch {
			case err != nil:
				return "", err
			case same(o):
				signed = *before
				return before.Note(), nil
			case !ask.Supersede || o.Action != ask.Action:
				return "", UnfinishedError(name, o)
			}
		} else if s, o := RunningOrder(d, public, n, time.Now()); s != nil && same(o) {
			signed = *s // expired, but the machine started it in time
			return s.Note(), nil
		}
		if signed, err = Sign(d, n, ask.Action, args, time.Now(), key); err != nil {
			return "", err
		}
		own.notes[signed.Note()], own.over = true, n.ResourceVersion
		return signed.Note(), nil
	})
	if err != nil {
		if ctx.Err() != nil && own.notes[signed.Note()] { // the API server may have it
			err = withdraw(ctx, kube, name, ask.Action, own)
		}
		if attest.ReasonOf(err) == attestv1.Reason_REASON_NOT_ENROLLED && problem.Remedy(err) == "" {
			err = problem.WithRemedy(err, "No order was given. muster status shows the nodes.")
		}
		return signed, nil, err
	}
	if own.over = ""; !own.notes[signed.Note()] {
		own.notes = nil
	}
	r, err := await(ctx, kube, name, ask, signed, own, report)
	return signed, r, err
}

// takesKey refuses an order to a machine that reports the owner keys that it accepts, if the folder's key is not among them.
func takesKey(n *v1alpha1.AttestedNode, key ed25519.PrivateKey) error {
	takes, err := attest.ParseOwnerKeys(n.Status.OwnerKeys)
	if err != nil || takes.Has(ed25519.PublicKey(key[32:])) {
		return nil //nolint:nilerr // an image of an earlier version reports none
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "the machine of %s does not accept orders signed with this folder's owner.key", n.Name),
		"No order was given. Is this the newest copy of the cluster's folder? `muster key public FILE`, with its owner.key, prints a key that ownerKeys of the machine's image must have. If the machine has just restarted with another image, wait five minutes: it reports its keys when it attests.")
}

// written are the orders that a run has signed.
type written struct {
	notes map[string]bool // nil: another run has signed the order
	// over is the resource version of the enrollment whose order a pending write may replace; empty if the write is
	// complete.
	over string
}

// Wait waits for the machine's report of an order that another run has signed, and never withdraws it.
func Wait(ctx context.Context, kube *clusterapi.Client, name string, ask Request, signed ownerorder.SignedMachineOrder, report func(string)) (*v1alpha1.OrderReport, error) {
	return await(ctx, kube, name, ask, signed, written{}, report)
}

func await(ctx context.Context, kube *clusterapi.Client, name string, ask Request, signed ownerorder.SignedMachineOrder, own written, report func(string)) (*v1alpha1.OrderReport, error) {
	action := ask.Action
	report(fmt.Sprintf("ordered: %s; the machine gets this with its next attestation, within five minutes", action))
	var last *v1alpha1.OrderReport
	pause := retry.Backoff{Min: FirstPoll, Max: ReportPoll}
	for {
		n, err := kube.Enrollment(ctx, name)
		switch {
		case err != nil:
		case n.Annotations[v1alpha1.OwnerOrder] != signed.Note():
			if ctx.Err() == nil {
				return last, problem.WithRemedy(fmt.Errorf("%s: its order %q was replaced or removed while this command waited", name, action),
					fmt.Sprintf("Another run of muster, or an administrator of the API, did that (audit log: writes of the AttestedNode). If the machine has received the order, it may still start it up to %s after it was signed, by its own clock: muster status shows what it reports. Then run the same command again.", Validity))
			}
		default:
			if r := n.Status.Order; r != nil && r.Digest == signed.Digest() {
				if last == nil || last.State != r.State {
					pause.Reset()
					report(problem.Printable(string(r.State)))
				}
				// Untrusted: root on the machine and every writer of the API can choose these texts.
				r.Action, r.Message, r.Output = problem.Printable(r.Action), printable.ASCII(r.Message, maxMessage), printable.ASCII(r.Output, MaxReport)
				if last = r; r.State != v1alpha1.OrderRunning {
					return r, outcome(name, action, r)
				}
				if ask.UntilStarted {
					return r, nil
				}
			}
			err = retry.Wait(ctx, pause.Next(0))
		}
		if ctx.Err() != nil && last == nil && own.notes != nil { // the command ended before a report of the start
			return nil, withdraw(ctx, kube, name, action, own)
		}
		if err != nil {
			return last, problem.WithRemedy(fmt.Errorf("%s has not reported the end of the order %q: %w", name, action, err), noReport(name, last != nil))
		}
	}
}

// withdrawWithin bounds the removal of an order after an interruption.
const withdrawWithin = 10 * time.Second

// withdraw removes an order that no report shows as started. The returned error is never nil: it says that the order was
// withdrawn, or why not.
func withdraw(ctx context.Context, kube *clusterapi.Client, name string, action ownerorder.Action, own written) error {
	cause := context.Cause(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawWithin)
	defer cancel()
	switch begun, err := kube.WithdrawOrder(ctx, name, func(note string) bool { return own.notes[note] }, own.over); {
	case err != nil:
		return problem.WithRemedy(fmt.Errorf("the order %q to %s could not be withdrawn: %w", action, name, errors.Join(cause, err)), fmt.Sprintf("The machine may start it up to %s after it was signed, by its own clock. To withdraw it: kubectl annotate attestednode %s %s-", Validity, name, v1alpha1.OwnerOrder))
	case begun:
		return problem.WithRemedy(fmt.Errorf("%s has already started the order %q, and does not stop: %w", name, action, cause), noReport(name, true))
	}
	remedy := fmt.Sprintf("If the machine has already received the order, or an administrator of the API puts it back, the machine may still start it up to %s after it was signed, by its own clock: muster status shows what it reports.", Validity)
	if errors.Is(cause, context.DeadlineExceeded) {
		remedy += " " + getsOrders(name)
	}
	return problem.WithRemedy(fmt.Errorf("the order %q to %s is withdrawn: %w", action, name, cause), remedy)
}

// PendingOrder returns the node's order if the owner signed it for the machine that is enrolled under this name, and it is
// neither finished nor expired; otherwise nil.
func PendingOrder(d *ownerdir.Dir, owner attest.OwnerKeys, n *v1alpha1.AttestedNode, now time.Time) (*ownerorder.SignedMachineOrder, error) {
	if n.ShutOut() {
		return nil, attest.Refuse(attestv1.Reason_REASON_BANNED, "%s is banned, or is being removed: its machine gets no orders", n.Name)
	}
	on, err := Addressee(d, n)
	if err != nil {
		return nil, err
	}
	s, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
	if err != nil {
		return nil, nil //nolint:nilerr,nilnil // there is none
	}
	o, err := s.Genuine(owner, on)
	if err != nil || now.After(o.NotAfter) {
		return nil, nil //nolint:nilerr,nilnil // not signed for this machine, so no machine executes it
	}
	if r := n.Status.Order; r != nil && r.Digest == s.Digest() && r.State != v1alpha1.OrderRunning {
		return nil, nil //nolint:nilnil // it is finished
	}
	return &s, nil
}

// RunningOrder returns the node's order if the owner signed it, and the machine reports it as running; otherwise nil. A machine may finish a started
// order up to a day after its expiry.
func RunningOrder(d *ownerdir.Dir, owner attest.OwnerKeys, n *v1alpha1.AttestedNode, now time.Time) (*ownerorder.SignedMachineOrder, ownerorder.MachineOrder) {
	var none ownerorder.MachineOrder
	on, err := Addressee(d, n)
	if err != nil {
		return nil, none
	}
	s, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
	if err != nil {
		return nil, none
	}
	o, err := s.Genuine(owner, on)
	if r := n.Status.Order; err != nil || now.Sub(o.NotAfter) >= ownerorder.MaxMachineLife || r == nil || r.Digest != s.Digest() || r.State != v1alpha1.OrderRunning {
		return nil, none
	}
	return &s, o
}

// ActiveOrder returns the node's order that its machine may still start, or is executing; nil if there is none.
func ActiveOrder(d *ownerdir.Dir, owner attest.OwnerKeys, n *v1alpha1.AttestedNode, now time.Time) (*ownerorder.SignedMachineOrder, ownerorder.MachineOrder) {
	if s, o := RunningOrder(d, owner, n, now); s != nil {
		return s, o
	}
	s, err := PendingOrder(d, owner, n, now)
	if err != nil || s == nil { // a machine that is shut out or has not joined gets no orders
		return nil, ownerorder.MachineOrder{}
	}
	o, err := ownerorder.ParseMachineOrder(s.Text)
	if err != nil {
		return nil, o
	}
	return s, o
}

// Addressee returns the machine and the disk that an order to a node is for; NOT_ENROLLED if no machine has joined as the node yet.
func Addressee(d *ownerdir.Dir, n *v1alpha1.AttestedNode) (on ownerorder.Addressee, err error) {
	id, err := access.FolderCluster(d)
	if err != nil {
		return on, err
	}
	on = ownerorder.Addressee{Cluster: id, Node: n.Name, Disk: n.Spec.DiskID}
	if on.Machine, err = attest.ParseMachineID(n.Spec.MachineID); err != nil {
		return on, err
	}
	if on.Disk == "" {
		return on, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "no machine has joined as %s yet", n.Name)
	}
	return on, nil
}

// Sign signs an order to a node's machine, which is valid from now for [Validity].
func Sign(d *ownerdir.Dir, n *v1alpha1.AttestedNode, action ownerorder.Action, args map[string]string, now time.Time, key ed25519.PrivateKey) (ownerorder.SignedMachineOrder, error) {
	on, err := Addressee(d, n)
	if err != nil {
		return ownerorder.SignedMachineOrder{}, err
	}
	now = now.UTC()
	s, err := ownerorder.MachineOrder{
		Cluster: on.Cluster.String(), Node: on.Node, Machine: on.Machine, Disk: on.Disk, Action: action, Args: args, SignedAt: now, NotAfter: now.Add(Validity).Truncate(time.Second),
	}.Sign(key)
	if err == nil && len(s.Text) > ownerorder.MaxMachineOrder {
		err = fmt.Errorf("the order %q to %s has %d bytes, and a machine reads at most %d", action, n.Name, len(s.Text), ownerorder.MaxMachineOrder)
	}
	return s, err
}

func outcome(name string, action ownerorder.Action, r *v1alpha1.OrderReport) error {
	switch r.State {
	case v1alpha1.OrderDone:
		return nil
	case v1alpha1.OrderRefused:
		err := refusalOf(r.Message)
		remedy := "The machine accepts only orders that a key in its image's ownerKeys has signed. Check that key, the machine's clock, and that its image is not older than this muster."
		if attest.ReasonOf(err) == attestv1.Reason_REASON_STATE_DISK {
			remedy = "Nothing is erased. Power the machine off, erase its disk from a rescue system, and run muster forget " + name + "."
		}
		if attest.ReasonOf(err) == attestv1.Reason_REASON_CLOCK_SKEW {
			remedy = "Nothing was done. Set the clock that is wrong: the message has both times. Then run the same command again."
		}
		return problem.WithRemedy(fmt.Errorf("%s refused the order %q: %w", name, action, err), remedy)
	default:
		return problem.WithRemedy(fmt.Errorf("%s: %s failed: %s", name, action, r.Message), "muster doctor --node "+name+" shows what is wrong on the machine.")
	}
}

// refusalOf returns a machine's message about a refusal, with its reason code if it begins with one (R1).
func refusalOf(message string) error {
	name, rest, _ := strings.Cut(message, ": ")
	if reason, known := attestv1.Reason_value["REASON_"+name]; known {
		return attest.Refuse(attestv1.Reason(reason), "%s", rest)
	}
	return errors.New(message)
}

// noReport returns what to do about an order without a report of its end, which is not withdrawn.
func noReport(name string, begun bool) string {
	if begun {
		return "The machine has started the order. `muster status` shows when it attested last. Run the same command again to continue waiting."
	}
	return fmt.Sprintf("Another run of muster has given the order: the machine may start it up to %s after it was signed, by its own clock. To withdraw it: kubectl annotate attestednode %s %s- (the same command, run again, continues waiting). %s", Validity, name, v1alpha1.OwnerOrder, getsOrders(name))
}

func getsOrders(name string) string {
	return fmt.Sprintf("A machine gets orders when it attests: `muster status` shows when %s did last, and why it is refused. `muster-orders.service` has to run there; images of earlier versions do not have it.", name)
}

// ParseReport parses a machine's doctor report, which is untrusted input: each text is shown on one line, without control
// characters, and an empty report is an error.
func ParseReport(output string) (*checkup.Report, error) {
	var r checkup.Report
	if err := json.Unmarshal([]byte(output), &r); err != nil {
		return nil, err
	}
	for i, f := range r.Findings {
		switch f.Level {
		case checkup.OK, checkup.Warn, checkup.Fail:
		default:
			return nil, fmt.Errorf("finding %d has the level %q", i+1, f.Level)
		}
		r.Findings[i] = checkup.Finding{Check: problem.Printable(f.Check), Level: f.Level, Detail: problem.Printable(f.Detail), Remedy: problem.Printable(f.Remedy)}
	}
	if len(r.Findings) == 0 {
		return nil, errors.New("there is no finding in it")
	}
	return &r, nil
}
