package audit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// While one process removes a line that it could not write completely, no other process may append a record.
func TestNobodyWritesWhileAnotherProcessDoes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	other, err := os.OpenFile(path, os.O_APPEND|os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	info, err := other.Stat()
	if err != nil {
		t.Fatal(err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		t.Fatal("no inode")
	}
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := other.WriteString(`{"half a rec`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- log.Write(Record{Ticket: "one"}) }()
	for waiting, deadline := false, time.Now().Add(5*time.Minute); !waiting; {
		select {
		case err := <-done:
			t.Fatalf("a record was written beside another process's: %v", err)
		default:
		}
		locks, err := os.ReadFile("/proc/locks") // proc_locks(5): "->" is a waiting process
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(locks)) {
			waiting = waiting || strings.Contains(line, "-> FLOCK") && strings.Contains(line, fmt.Sprintf(":%d ", stat.Ino))
		}
		if time.Now().After(deadline) {
			t.Fatal("no process waits for the lock")
		}
	}
	if err := other.Truncate(0); err != nil { // as after a failed write
		t.Fatal(err)
	}
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := ticketsIn(t, path); n != 1 {
		t.Errorf("%d records, want the one", n)
	}
}
