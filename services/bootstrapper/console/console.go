// Package console tells a person who looks at a machine's screen or serial line what it waits for.
//
// Think of it as a sign on a closed door: one line of plain words, and a new one only when it would
// read differently. What the log has in detail for who can read the log, the sign has in short for who can't
// log in, since there is nobody to log in as.
package console

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// DefaultPath is the machine's console.
const DefaultPath = "/dev/console"

// patience bounds the time that a line may take: a terminal that was stopped (XOFF) must not stop a machine.
const patience = time.Second

// maxLine bounds a line, in bytes.
const maxLine = 500

// Console writes lines that differ from the last. A nil one writes nothing. It is safe for concurrent use.
type Console struct {
	mu   sync.Mutex
	f    *os.File
	last string
}

// Open gives the console at a path, which must be there already; for an empty path, or if there is none, one that writes
// nothing.
func Open(path string) (*Console, error) {
	if path == "" {
		return nil, nil //nolint:nilnil // a nil one is of use
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|syscall.O_NOCTTY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // a nil one is of use
	}
	if err != nil {
		return nil, fmt.Errorf("the console: %w", err)
	}
	return &Console{f: f}, nil
}

// Close ends it.
func (c *Console) Close() error {
	if c == nil {
		return nil
	}
	return c.f.Close()
}

// Say writes a line, unless it is the last one again.
func (c *Console) Print(line string) { c.print(line, line) }

// say writes a line, unless the last one had the same sense. That a console can't be written is nobody's trouble: all
// that it is told is in the log.
func (c *Console) print(sense, line string) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if sense == c.last {
		return
	}
	c.last = sense
	_ = c.f.SetWriteDeadline(time.Now().Add(patience)) // a file has none
	_, _ = c.f.WriteString("muster: " + printable(line) + "\r\n")
}

// printable keeps what others chose, such as names in metadata, from doing more on a terminal than being text.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), maxLine)]
}

// Wait is what a machine waits for.
type Wait struct {
	// For is the phase in words: "waiting for the key of the state disk".
	For string
	// Err is why the latest try failed. Of its text nothing is shown: it may have been chosen by who answered.
	Err error
	// Asked lists whom it asks, HOST:PORT.
	Asked []string
	// By is who refused, or was refused, HOST:PORT; empty if nobody answered.
	By string
	// Also is a sentence that is always true while it waits; empty for none.
	Also string
	// Next is the pause before the next try.
	Next time.Duration
}

// Waits says what the machine waits for and why, if that has changed.
func (c *Console) Waits(w Wait) {
	why := w.why()
	line := w.For + ": " + why
	if w.Also != "" {
		line += "; " + w.Also
	}
	c.print(line, line+"; next try in "+pause(w.Next))
}

func (w Wait) why() string {
	reason := discovery.ReasonOf(w.Err)
	name := attest.ReasonName(reason)
	switch {
	case errors.Is(w.Err, discovery.ErrNoJoinservice):
		return "the metadata name no joinservice (joinEndpoints)"
	case errors.Is(w.Err, discovery.ErrUnreachable):
		return "no joinservice can be reached at " + strings.Join(w.Asked, ", ")
	case w.By == "":
		return name + words(ours, reason)
	case atls.UnprovenRefusal(w.Err):
		return name + " by " + w.By + words(theirs, reason) + ", which has not proven to be a joinservice"
	case remote(w.Err):
		return name + " by " + w.By + words(theirs, reason)
	}
	return "this machine does not accept what " + w.By + " answers: " + name + words(ours, reason)
}

// remote says whether it was the other side that refused.
func remote(err error) bool {
	r, ok := errors.AsType[*attest.Refusal](err)
	return !ok || r.Remote
}

func words(m map[attestv1.Reason]string, r attestv1.Reason) string {
	s, ok := m[r]
	if !ok {
		return ""
	}
	if r == attestv1.Reason_REASON_EK_UNTRUSTED && s == ours[r] {
		s += fmt.Sprintf(" (it shows %s)", time.Now().UTC().Format(time.DateTime))
	}
	return " (" + s + ")"
}

// theirs says what it means that a joinservice refuses this machine.
var theirs = map[attestv1.Reason]string{
	attestv1.Reason_REASON_POLICY_REFUSED:      "this machine's measurements are not in the owner's policy",
	attestv1.Reason_REASON_EK_UNTRUSTED:        "nobody in the owner's policy vouches for this machine's TPM, or the policy revokes it",
	attestv1.Reason_REASON_FORMAT_NONE:         "the owner's policy has no rules for machines like this one",
	attestv1.Reason_REASON_LOCK_FOREIGN:        "this machine is locked already; reboot it",
	attestv1.Reason_REASON_CLOCK_WENT_BACK:     "this machine's TPM was cleared, or was put back to an earlier time: reboot the machine",
	attestv1.Reason_REASON_BANNED:              "the owner has banned this machine",
	attestv1.Reason_REASON_NOT_ENROLLED:        "this machine is not enrolled, or no longer: the owner must enroll it; one that was forgotten starts over with an empty state disk",
	attestv1.Reason_REASON_NAME_TAKEN:          "the name of this machine belongs to another one",
	attestv1.Reason_REASON_NAME_MISMATCH:       "this machine is enrolled under another name",
	attestv1.Reason_REASON_MACHINE_CLONED:      "this machine, or a copy of it, has booted since with the same TPM",
	attestv1.Reason_REASON_TPM_KNOWN:           "this machine's TPM is enrolled already, as another machine",
	attestv1.Reason_REASON_NODE_EXISTS:         "there is a node of that name that was not enrolled",
	attestv1.Reason_REASON_ROLE_REFUSED:        "this machine may not have that role",
	attestv1.Reason_REASON_DISK_ERASED:         "the cluster has no salt of this state disk: it was erased, or the salt was lost; the owner looks before anybody erases the disk",
	attestv1.Reason_REASON_DISK_MISMATCH:       "this machine is enrolled with another state disk, or the disk to another machine",
	attestv1.Reason_REASON_PLAIN_STATE_REFUSED: "the owner's policy wants an encrypted state disk",
	attestv1.Reason_REASON_ADDRESS_REFUSED:     "this machine may not have one of its addresses",
	attestv1.Reason_REASON_CONTROL_PLANE_BUSY:  "another machine is about to become a control plane; this one has its turn after it",
	attestv1.Reason_REASON_KMS_UNAVAILABLE:     "the cluster's key service does not answer",
	attestv1.Reason_REASON_ROOT_SEALED:         "the cluster's root secret is missing",
	attestv1.Reason_REASON_API_UNAVAILABLE:     "the cluster's API server does not answer",
	attestv1.Reason_REASON_AUDIT_UNAVAILABLE:   "the control plane has no room for its audit log",
	attestv1.Reason_REASON_CERTIFICATE_PENDING: "the cluster did not sign the certificates in time",
	attestv1.Reason_REASON_NOT_READY:           "the joinservice is not ready yet",
	attestv1.Reason_REASON_BUSY:                "too many machines ask at once, or this one reboots twice within two minutes; it tries again by itself",
	attestv1.Reason_REASON_DEADLINE:            "it did not answer in time",
}

// ours says what it means that this machine refuses.
var ours = map[attestv1.Reason]string{
	attestv1.Reason_REASON_POLICY_REFUSED:   "its measurements are not in the owner's policy",
	attestv1.Reason_REASON_EK_UNTRUSTED:     "nobody vouches for its TPM, or the clock of this machine is wrong",
	attestv1.Reason_REASON_LOCK_FOREIGN:     "it belongs to another cluster",
	attestv1.Reason_REASON_POLICY_SIGNATURE: "its policy is not signed by the owner of this machine's image",
	attestv1.Reason_REASON_POLICY_INVALID:   "its policy is older than one that was accepted before, or than this machine's image accepts",
	attestv1.Reason_REASON_CLOCK_SKEW:       "the clock of this machine and the cluster's differ: set the wrong one",
	attestv1.Reason_REASON_STATE_DISK:       "the state disk can't be used",
	attestv1.Reason_REASON_MACHINE_CONFIG:   "the metadata or the image of this machine are wrong, or its TPM",
	attestv1.Reason_REASON_KUBEADM_FAILED:   "kubeadm failed; the journal has its lines",
	attestv1.Reason_REASON_NODE_LOCKED:      "this machine was taken by another cluster, or its journal is damaged",
	attestv1.Reason_REASON_REQUEST_INVALID:  "the ticket has not the form that this version knows",
	attestv1.Reason_REASON_DEADLINE:         "it did not answer in time",
}

// pause rounds to what a person reads.
func pause(d time.Duration) string {
	switch {
	case d < time.Second:
		return "1 s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Round(time.Second)/time.Second))
	}
	return fmt.Sprintf("%d min", int(d.Round(time.Minute)/time.Minute))
}
