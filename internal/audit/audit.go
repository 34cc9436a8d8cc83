// Package audit writes the audit records of a service's decisions.
//
// A record is one line of JSON, and [Log.Write] returns only when the line is on stable storage (J3): a service that writes
// the record before it answers can always prove later what it sent. If a record cannot be written, nothing may be sent.
//
// Records never hold secrets. Their fields are fixed, so a record cannot contain other data (K3). Their reason equals the
// one in the caller's error, the log and the metric (R1).
package audit

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Record is one decision. Empty fields are left out.
type Record struct {
	// Time of the decision; set by Write if zero. UTC, RFC 3339 with nanoseconds.
	Time time.Time `json:"time"`
	// Service that decided: joinservice or kms.
	Service string `json:"service"`
	// Event is what was decided, as in "ticket issued".
	Event string `json:"event"`
	// Reason is ACCEPTED or the reason code of the refusal.
	Reason string `json:"reason"`
	// Detail is the refusal's cause, for the operator.
	Detail string `json:"detail,omitempty"`
	// Machine is the caller's machine ID.
	Machine string `json:"machine,omitempty"`
	// Node is the requested node name.
	Node string `json:"node,omitempty"`
	// Role is the requested role.
	Role string `json:"role,omitempty"`
	// Disk is the ID of the disk concerned.
	Disk string `json:"disk,omitempty"`
	// Ticket is the ID of the join ticket.
	Ticket string `json:"ticket,omitempty"`
	// Order is the action of the owner's order to the machine, and the SHA-256 of its text and signature in hexadecimal digits.
	Order string `json:"order,omitempty"`
	// Request is the name of a CertificateSigningRequest.
	Request string `json:"request,omitempty"`
	// Serials are the serial numbers of the certificates, in hexadecimal digits.
	Serials []string `json:"serials,omitempty"`
	// Purpose is the purpose of a derived key, or which key is rotated.
	Purpose string `json:"purpose,omitempty"`
	// PolicySerial is the owner's serial of the policy that was applied.
	PolicySerial uint64 `json:"policySerial,omitempty"`
	// PolicyGeneration is the Kubernetes generation of that policy.
	PolicyGeneration int64 `json:"policyGeneration,omitempty"`
	// Evidence is the SHA-256 of the evidence, in hexadecimal digits.
	Evidence string `json:"evidence,omitempty"`
	// Image and Class are the policy's names of the machine's image and firmware.
	Image string `json:"image,omitempty"`
	Class string `json:"class,omitempty"`
}

// ErrClosed is the error of a write to a closed log.
var ErrClosed = errors.New("the audit log is closed")

// Log is an append-only file of records of actions, and a separate one of refusals. A refused peer can cause as many
// records as its rate allows ([RefusalLimits], [UnattestedRefusals]); since the refusals rotate separately, none of them
// displaces the record of a ticket, a certificate, a ban or a policy, and neither file waits for the other's disk.
//
// It is safe for concurrent use; several processes may append to one file.
type Log struct {
	done, refused *book
	now           func() time.Time
}

// book is one of the files.
type book struct {
	mu   sync.Mutex
	sink sink // nil: closed
}

// sink is the target of a book: a file, or a stream that cannot be synced.
type sink interface {
	// append writes a line and makes it stable, or leaves nothing of it.
	append(line []byte) error
	io.Closer
}

// Open opens the log at path for appending, and that of refusals at [RefusedPath]. It creates them with mode 0600 if
// needed. Their folder must exist. It completes a line that a crash cut off, so that the next record starts on a new line.
// A path that is not a regular file, like a device, takes both.
//
// A file that would grow beyond 64 MiB is renamed to path.1, the one that had this name to path.2, and so on to path.5,
// which is replaced. So both take at most 768 MiB.
func Open(path string) (*Log, error) {
	return openLog(path, maxSize)
}

// RefusedPath returns the path of the refusals of the log at path, in the same folder: audit-refused.jsonl for audit.jsonl.
func RefusedPath(path string) string {
	ext := filepath.Ext(path)
	return strings.TrimSuffix(path, ext) + "-refused" + ext
}

func openLog(path string, limit int64) (*Log, error) {
	f, err := openFile(path)
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	done := &book{sink: &file{File: f, limit: limit}}
	if info, err := f.Stat(); err == nil && !info.Mode().IsRegular() {
		return &Log{done: done, refused: done, now: time.Now}, nil
	}
	r, err := openFile(RefusedPath(path))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the audit log of refusals: %w", err), f.Close())
	}
	return &Log{done: done, refused: &book{sink: &file{File: r, limit: limit}}, now: time.Now}, nil
}

// NewStream returns a log that writes all records to w, such as a container's standard output. They are only as stable as
// the storage behind w.
func NewStream(w io.Writer) *Log {
	b := &book{sink: stream{w}}
	return &Log{done: b, refused: b, now: time.Now}
}

// Write appends r, the record of an action. It returns nil only when r is on stable storage (J3). The line has at most
// [MaxRecord] bytes; longer texts are cut off.
func (l *Log) Write(r Record) error { return l.write(l.done, r, false) }

// refuse appends r, the record of a refusal, in at most [MaxRefusal] bytes.
func (l *Log) refuse(r Record) error { return l.write(l.refused, r, true) }

func (l *Log) write(to *book, r Record, refusal bool) error {
	to.mu.Lock()
	defer to.mu.Unlock()
	if to.sink == nil {
		return ErrClosed
	}
	if r.Time.IsZero() {
		r.Time = l.now()
	}
	r.Time = r.Time.UTC()
	line, err := r.line(refusal)
	if err != nil {
		return err
	}
	return to.sink.append(line)
}

// Close closes the log. Later writes return [ErrClosed].
func (l *Log) Close() error { return errors.Join(l.done.close(), l.refused.close()) }

func (b *book) close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sink == nil {
		return nil
	}
	s := b.sink
	b.sink = nil
	return s.Close()
}

type stream struct{ io.Writer }

func (s stream) append(line []byte) error {
	if _, err := s.Write(line); err != nil {
		return fmt.Errorf("write the audit record: %w", err)
	}
	return nil
}

func (stream) Close() error { return nil }
