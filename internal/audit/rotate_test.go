package audit

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// ticketsIn counts the records with a ticket in the file.
func ticketsIn(t *testing.T, path string) (n int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte(`"ticket":`))
}

func TestAFullFileIsRenamedAndNoRecordLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	log, err := openLog(path, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	other, err := openLog(path, 1000) // of another process
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	const records = 30
	for i := range records {
		l := log
		if i%3 == 0 {
			l = other
		}
		if err := l.Write(Record{Service: "joinservice", Event: "ticket issued", Ticket: fmt.Sprintf("%04d", i)}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) < 3 || len(files) > 6 {
		t.Fatalf("files %v, %v", files, err)
	}
	total := 0
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil || info.Size() > 1000 || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, info, err)
		}
		total += ticketsIn(t, f)
	}
	if total != records {
		t.Errorf("%d records in %v, want %d", total, files, records)
	}
	for i := range 200 {
		if err := log.Write(Record{Ticket: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if files, _ := filepath.Glob(path + "*"); len(files) != 6 {
		t.Errorf("%d files, want 6", len(files))
	}
}

// If a file cannot be renamed, it grows: a ticket is never refused for that.
func TestAFileThatCannotBeRenamedGrows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	if err := os.MkdirAll(filepath.Join(path+".5", "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".4", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := openLog(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	for i := range 10 {
		if err := log.Write(Record{Ticket: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if n := ticketsIn(t, path); n != 10 {
		t.Errorf("%d records, want 10", n)
	}
}
