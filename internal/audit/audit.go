// Package audit keeps the record of what a service decided.
//
// A record is one line of JSON, and [Log.Write] returns only once the line is on stable
// storage (J3): who writes the record before the answer can always tell afterwards what was
// handed out. When a record cannot be written, nothing may be handed out.
//
// Records never hold secrets. Their fields are fixed, so that a record cannot carry what its
// type has no place for (K3), and their reason is the one that the caller, the log and the
// metric get too (R1).
package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	// Node is the node name that was asked for.
	Node string `json:"node,omitempty"`
	// Role is the role that was asked for.
	Role string `json:"role,omitempty"`
	// Disk is the ID of the disk concerned.
	Disk string `json:"disk,omitempty"`
	// Ticket is the ID of the join ticket.
	Ticket string `json:"ticket,omitempty"`
	// Request is the name of a CertificateSigningRequest.
	Request string `json:"request,omitempty"`
	// Serials are the serial numbers of the certificates, in hexadecimal digits.
	Serials []string `json:"serials,omitempty"`
	// Purpose is the purpose of a derived key.
	Purpose string `json:"purpose,omitempty"`
	// PolicySerial is the owner's serial of the policy that was applied.
	PolicySerial uint64 `json:"policySerial,omitempty"`
	// PolicyGeneration is the Kubernetes generation of that policy.
	PolicyGeneration int64 `json:"policyGeneration,omitempty"`
	// Evidence is the SHA-256 of the evidence, in hexadecimal digits.
	Evidence string `json:"evidence,omitempty"`
	// Warnings are the mismatches that the policy only reports.
	Warnings []string `json:"warnings,omitempty"`
}

// maxDetail bounds what a stranger can make us write for one refusal, in bytes.
const maxDetail = 2048

// ErrClosed says that the log was closed.
var ErrClosed = errors.New("the audit log is closed")

// Log is an append-only file of records. It is safe for concurrent use; several processes
// may append to one file.
type Log struct {
	mu   sync.Mutex
	sink sink
	now  func() time.Time
}

// sink is what a Log writes to: a file, or a stream that cannot be synced.
type sink interface {
	// append writes a line and makes it stable, or leaves nothing of it.
	append(line []byte) error
	io.Closer
}

// Open opens the log at path for appending, and creates it with mode 0600 if need be. Its
// folder must exist. A line that a crash cut off is ended, so that the next record starts on a
// line of its own.
//
// A file that would grow beyond 64 MiB is renamed to path.1, the one that had this name to
// path.2, and so on to path.5, which is replaced.
func Open(path string) (*Log, error) {
	return openLog(path, maxSize)
}

func openLog(path string, limit int64) (*Log, error) {
	f, err := openFile(path)
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	return &Log{sink: &file{File: f, limit: limit}, now: time.Now}, nil
}

// NewStream gives a log that writes to w, such as a container's standard output. Its records
// are as stable as what collects w makes them.
func NewStream(w io.Writer) *Log { return &Log{sink: stream{w}, now: time.Now} }

// Write appends r. It returns nil only once r is on stable storage (J3).
func (l *Log) Write(r Record) error {
	if len(r.Detail) > maxDetail {
		r.Detail = r.Detail[:maxDetail]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sink == nil {
		return ErrClosed
	}
	if r.Time.IsZero() {
		r.Time = l.now()
	}
	r.Time = r.Time.UTC()
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("audit record: %w", err)
	}
	line = append(line, '\n')
	return l.sink.append(line)
}

// Close closes the log. Later writes give [ErrClosed].
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sink == nil {
		return nil
	}
	s := l.sink
	l.sink = nil
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
