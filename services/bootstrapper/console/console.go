// Package console shows on a machine's screen or serial line what the machine waits for.
//
// It writes one line of plain words, and a new one only when the text changes. It is a short form of the log, for a person who can't read the log, since
// no login exists on a machine.
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
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// DefaultPath is the machine's console.
const DefaultPath = "/dev/console"

// patience bounds the time that a line may take: a stopped terminal (XOFF) must not stop a machine.
const patience = time.Second

// maxLine and maxDetail bound a line, and the text of an error in it, in bytes.
const (
	maxLine   = 800
	maxDetail = 500
)

// Console writes lines that differ from the last one. A nil one writes nothing. It is safe for concurrent use.
type Console struct {
	mu   sync.Mutex
	f    *os.File
	last string
}

// Open returns the console at an existing path. If the path is empty or does not exist, it returns one that writes nothing.
func Open(path string) (*Console, error) {
	if path == "" {
		return nil, nil //nolint:nilnil // a nil Console writes nothing
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|syscall.O_NOCTTY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // a nil Console writes nothing
	}
	if err != nil {
		return nil, fmt.Errorf("the console: %w", err)
	}
	return &Console{f: f}, nil
}

// Close closes the console.
func (c *Console) Close() error {
	if c == nil {
		return nil
	}
	return c.f.Close()
}

// Print writes a line, unless it is the same as the last one.
func (c *Console) Print(line string) { c.print(line, line) }

// print writes a line, unless the last one had the same sense. Errors are ignored, since the log has all of it.
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
	_ = c.f.SetWriteDeadline(time.Now().Add(patience)) // a regular file has no deadline
	_, _ = c.f.WriteString("muster: " + printable.ASCII(line, maxLine) + "\r\n")
}

// Wait describes the reason why a machine waits.
type Wait struct {
	// For is the phase in words: "waiting for the key of the state disk".
	For string
	// Err is why the latest attempt failed. Its text is shown only for the machine's own steps: otherwise the peer may have chosen it.
	Err error
	// Asked lists the endpoints, HOST:PORT.
	Asked []string
	// By is the endpoint that refused, or was refused, HOST:PORT; empty if none answered.
	By string
	// Also is a sentence that is always true while it waits; empty if there is none.
	Also string
	// Was reports that the machine was a node: NOT_ENROLLED then means that its enrollment has ended.
	Was bool
	// Next is the pause before the next attempt.
	Next time.Duration
}

// Waits shows what the machine waits for and why, if that has changed.
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
	case ownStep[reason] && !remote(w.Err):
		return name + words(ours, reason) + ": " + detail(w.Err)
	case w.By == "":
		return name + words(ours, reason)
	case atls.UnprovenRefusal(w.Err):
		return name + " by " + w.By + w.theirs(reason) + ", which was not attested as a joinservice"
	case remote(w.Err):
		return name + " by " + w.By + w.theirs(reason)
	}
	return "this machine does not accept what " + w.By + " answers: " + name + words(ours, reason)
}

// theirs explains the reason with which a joinservice refuses this machine.
func (w Wait) theirs(r attestv1.Reason) string {
	if w.Was && r == attestv1.Reason_REASON_NOT_ENROLLED {
		return " (" + forgotten + ")"
	}
	return words(theirs, r)
}

// forgotten explains NOT_ENROLLED to a machine that was a node.
const forgotten = "this machine is no longer enrolled, for example after muster forget: it joins as new with an empty state disk, or continues with this one if the owner enrolls it again with its disk"

// ownStep are the reasons of steps that this machine takes by itself, with its disk, its configuration and the listed files and images. They do not
// include kubeadm, whose text may name a token: the infrastructure provider reads the console.
var ownStep = map[attestv1.Reason]bool{
	attestv1.Reason_REASON_STATE_DISK:            true,
	attestv1.Reason_REASON_MACHINE_CONFIG:        true,
	attestv1.Reason_REASON_COMPONENT_HASH:        true,
	attestv1.Reason_REASON_COMPONENT_PATH:        true,
	attestv1.Reason_REASON_COMPONENT_UNAVAILABLE: true,
}

// detail returns the text of an error without its reason. Of a long one it returns the beginning, which names the object, and the end, which names the
// cause.
func detail(err error) string {
	s := err.Error()
	if r, ok := errors.AsType[*attest.Refusal](err); ok && r.Err != nil {
		s = r.Err.Error()
	}
	if len(s) <= maxDetail {
		return s
	}
	const gap = " ... "
	half := (maxDetail - len(gap)) / 2
	return s[:half] + gap + s[len(s)-half:]
}

// remote reports whether the peer refused.
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

// theirs explains the reasons with which a joinservice refuses this machine.
var theirs = map[attestv1.Reason]string{
	attestv1.Reason_REASON_POLICY_REFUSED:      "this machine's measurements are not in the owner's policy",
	attestv1.Reason_REASON_EK_UNTRUSTED:        "the owner's policy neither certifies nor lists this machine's TPM, or revokes it: muster approve lists it",
	attestv1.Reason_REASON_HARDWARE_UNTRUSTED:  "the key of this machine's hardware report has no certificate from its host, or is not a genuine processor's",
	attestv1.Reason_REASON_HARDWARE_COLLATERAL: "the owner's policy lacks current data of the processor's vendor",
	attestv1.Reason_REASON_HARDWARE_TCB:        "the firmware below this virtual machine is older than the owner's policy accepts",
	attestv1.Reason_REASON_FORMAT_NONE:         "the owner's policy has no rules for machines like this one",
	attestv1.Reason_REASON_LOCK_FOREIGN:        "this machine is locked already; reboot it",
	attestv1.Reason_REASON_CLOCK_WENT_BACK:     "this machine's TPM was cleared, or was put back to an earlier time: reboot the machine",
	attestv1.Reason_REASON_BANNED:              "the owner has banned this machine",
	attestv1.Reason_REASON_NOT_ENROLLED:        "the owner has not enrolled this control plane: muster enroll",
	attestv1.Reason_REASON_NAME_TAKEN:          "the name of this machine belongs to another one",
	attestv1.Reason_REASON_NAME_MISMATCH:       "this machine is enrolled under another name",
	attestv1.Reason_REASON_MACHINE_CLONED:      "this machine, or a copy of it, has booted since with the same TPM",
	attestv1.Reason_REASON_TPM_KNOWN:           "this machine's TPM is enrolled already, as another machine",
	attestv1.Reason_REASON_NODE_EXISTS:         "there is a node of that name that was not enrolled",
	attestv1.Reason_REASON_ROLE_REFUSED:        "this machine may not have that role",
	attestv1.Reason_REASON_DISK_ERASED:         "the cluster has no salt of this state disk: it was erased, or the salt was lost; the owner must check this before the disk is erased",
	attestv1.Reason_REASON_DISK_MISMATCH:       "this machine is enrolled with another state disk, or the disk to another machine",
	attestv1.Reason_REASON_PLAIN_STATE_REFUSED: "the owner's policy wants an encrypted state disk",
	attestv1.Reason_REASON_ADDRESS_REFUSED:     "this machine may not have one of its addresses",
	attestv1.Reason_REASON_CONTROL_PLANE_BUSY:  "another machine is about to become a control plane; this one follows after it",
	attestv1.Reason_REASON_KMS_UNAVAILABLE:     "the cluster's key service does not answer",
	attestv1.Reason_REASON_ROOT_SEALED:         "the cluster's root secret is missing",
	attestv1.Reason_REASON_API_UNAVAILABLE:     "the cluster's API server does not answer",
	attestv1.Reason_REASON_AUDIT_UNAVAILABLE:   "the control plane has no room for its audit log",
	attestv1.Reason_REASON_CERTIFICATE_PENDING: "the cluster did not sign the certificates in time",
	attestv1.Reason_REASON_NOT_READY:           "the joinservice is not ready yet, or has no policy: muster status shows it",
	attestv1.Reason_REASON_BUSY:                "too many machines ask at once, or this one reboots twice within two minutes; it tries again by itself",
	attestv1.Reason_REASON_DEADLINE:            "it did not answer in time",
}

// ours explains the reasons with which this machine refuses.
var ours = map[attestv1.Reason]string{
	attestv1.Reason_REASON_POLICY_REFUSED:   "its measurements are not in the owner's policy",
	attestv1.Reason_REASON_EK_UNTRUSTED:     "no root certifies its TPM, or the clock of this machine is wrong",
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

	attestv1.Reason_REASON_COMPONENT_HASH:        "a file is not what the list of components names",
	attestv1.Reason_REASON_COMPONENT_PATH:        "a file of the list of components can't be put in its place",
	attestv1.Reason_REASON_COMPONENT_UNAVAILABLE: "a listed file or image can't be fetched",
}

// pause rounds a duration for a reader.
func pause(d time.Duration) string {
	switch {
	case d < time.Second:
		return "1 s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Round(time.Second)/time.Second))
	}
	return fmt.Sprintf("%d min", int(d.Round(time.Minute)/time.Minute))
}
