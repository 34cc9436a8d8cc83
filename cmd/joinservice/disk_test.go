package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/disktest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// page is the allocation unit of a tmpfs, in bytes.
const page = 4096

// J3: the audit log's disk becomes full, at any byte of any record. What is sent has its records, and a ticket without a
// record is not sent and leaves nothing; when there is space again, tickets are issued without a restart, and no incomplete
// line stays.
func TestOnAFullDiskNoTicketLeavesWithoutItsRecord(t *testing.T) {
	disk := disktest.Small(t, 256<<10)
	s := setUp(t, auditAt(filepath.Join(disk, "audit.jsonl")))

	// The length of a ticket's records is measured first.
	s.ticketFor(t, s.machine(t), worker(t, named("w0", diskNumber(0), "192.168.77.20")))
	decided, issued := 0, 0
	for line := range bytes.Lines(s.auditText(t)) {
		var r audit.Record
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		switch r.Event {
		case "ticket decided":
			decided = len(line)
		case "ticket issued":
			issued = len(line)
		}
	}
	if decided == 0 || issued == 0 {
		t.Fatal("a ticket was given without its records")
	}

	for i, tt := range []struct {
		what string
		room int // bytes left for records
		want attestv1.Reason
	}{
		{"nothing", 0, attestv1.Reason_REASON_AUDIT_UNAVAILABLE},
		{"half of the first record", decided / 2, attestv1.Reason_REASON_AUDIT_UNAVAILABLE},
		{"the first record and a little", decided + 12, // the digits of a time vary
			attestv1.Reason_REASON_AUDIT_UNAVAILABLE},
		{"all but the end of the second", decided + issued - 40, attestv1.Reason_REASON_AUDIT_UNAVAILABLE},
		{"both records", decided + issued + 40, attestv1.Reason_REASON_ACCEPTED},
	} {
		t.Run("room for "+tt.what, func(t *testing.T) {
			m := s.machine(t)
			name, number := fmt.Sprintf("w%d", i+1), diskNumber(i+1)
			w := worker(t, named(name, number, fmt.Sprintf("192.168.77.%d", 21+i)))
			s.padAudit(t, tt.room)
			free := disktest.Fill(t, disk)
			client := s.dial(t, m.Attester(attest.PurposeMachine))
			before := s.CSRs(t)
			ticket, err := client.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
			if rpc.ReasonFrom(err) != tt.want {
				t.Errorf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			if err != nil {
				if tt.room > decided { // certificates were signed, and the requests of any caller contain them
					s.heldFor(t, m, name)
				} else {
					s.nothingOf(t, m)
					s.filedNothing(t, before)
				}
				free()
				ticket = s.ticketFor(t, m, w) // there is room again
			} else {
				free()
			}
			id := hex.EncodeToString(ticket.GetTicketId())
			for _, event := range []string{"ticket decided", "ticket issued"} {
				if !s.recorded(t, func(r audit.Record) bool { return r.Ticket == id && r.Event == event && r.Node == name }) {
					t.Errorf("ticket %s has no record that it was %q", id, event)
				}
			}
		})
	}
	// Each complete record is on a line of its own.
	for line := range bytes.Lines(s.auditText(t)) {
		if !json.Valid(line) {
			t.Errorf("torn line %q", line)
		}
	}
	if r := s.records(t); !slices.ContainsFunc(r, func(r audit.Record) bool { return r.Event == "ticket issued" }) {
		t.Error("no record at all")
	}
}

func diskNumber(n int) string { return fmt.Sprintf("5f0c95b6-2a3d-4c7e-9f10-0000000001%02d", n) }

// auditText reads the audit log, of actions and of refusals.
func (s *fixture) auditText(t *testing.T) []byte {
	t.Helper()
	done, err := os.ReadFile(s.audit)
	if err != nil {
		t.Error(err)
	}
	refused, err := os.ReadFile(audit.RefusedPath(s.audit))
	if err != nil {
		t.Error(err)
	}
	return append(done, refused...)
}

// auditSoFar returns the records of both files in the order in which they were read, each time the earlier ones first.
func (s *fixture) auditSoFar(t *testing.T) []byte {
	t.Helper()
	if s.audit == full {
		return nil
	}
	s.readSoFar.Lock()
	defer s.readSoFar.Unlock()
	for i, path := range []string{s.audit, audit.RefusedPath(s.audit)} {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
			continue
		}
		b = b[:bytes.LastIndexByte(b, '\n')+1] // whole lines
		s.readSoFar.text, s.readSoFar.at[i] = append(s.readSoFar.text, b[min(s.readSoFar.at[i], len(b)):]...), len(b)
	}
	return bytes.Clone(s.readSoFar.text)
}

// seenAudit is how far both files of the audit log were read.
type seenAudit struct {
	sync.Mutex
	text []byte
	at   [2]int
}

// sizeOfRecords returns the size of the file of actions, in bytes.
func (s *fixture) sizeOfRecords(t *testing.T) int {
	t.Helper()
	info, err := os.Stat(s.audit)
	if err != nil {
		t.Fatal(err)
	}
	return int(info.Size())
}

// padAudit appends a record of another process, so that after it room bytes are left of the last page of the file.
func (s *fixture) padAudit(t *testing.T, room int) {
	t.Helper()
	size := s.sizeOfRecords(t)
	const empty = len(`{"detail":""}` + "\n")
	n := (page-room%page-(size+empty)%page+2*page)%page + empty
	line := append(append([]byte(`{"detail":"`), bytes.Repeat([]byte("x"), n-empty)...), "\"}\n"...)
	f, err := os.OpenFile(s.audit, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(line); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if got := page - s.sizeOfRecords(t)%page; got%page != room%page {
		t.Fatalf("room for %d bytes, want %d", got, room)
	}
}
