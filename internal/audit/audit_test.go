package audit_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/audit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEveryRecordIsOneLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	log := open(t, path)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := log.Write(audit.Record{Service: "joinservice", Event: "ticket issued", Reason: "ACCEPTED", Ticket: strconv.Itoa(i), Detail: "two\nlines"}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for _, r := range read(t, path) {
		seen[r.Ticket] = true
		if r.Time.IsZero() || r.Detail != "two lines" {
			t.Errorf("record %+v", r)
		}
	}
	if len(seen) != 20 {
		t.Errorf("%d records, want 20", len(seen))
	}
}

func TestRecordsSurviveReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	for range 2 {
		log := open(t, path)
		if err := log.Write(audit.Record{Event: "x"}); err != nil {
			t.Fatal(err)
		}
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(read(t, path)); n != 2 {
		t.Errorf("%d records, want 2", n)
	}
}

func TestALineThatACrashCutOffDoesNotSpoilTheNext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	if err := os.WriteFile(path, []byte(`{"event":"whole"}`+"\n"+`{"event":"to`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := open(t, path).Write(audit.Record{Event: "next"}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) != 3 || !strings.Contains(lines[2], `"event":"next"`) || !strings.HasPrefix(lines[2], "{") {
		t.Errorf("lines %q", lines)
	}
}

func TestOnlyTheOwnerReadsTheLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	open(t, path)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %o, want 600", info.Mode().Perm())
	}
}

// /dev/full is a device of the kernel that is always full.
func TestARecordThatIsNotOnTheDiskIsAnError(t *testing.T) {
	log := open(t, "/dev/full")
	if err := log.Write(audit.Record{Event: "x"}); err == nil {
		t.Error("a record on a full disk was reported as written")
	}
}

func TestAClosedLogTakesNoRecords(t *testing.T) {
	log := open(t, filepath.Join(t.TempDir(), "audit.jsonl"))
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	if err := log.Write(audit.Record{}); !errors.Is(err, audit.ErrClosed) {
		t.Errorf("error %v, want ErrClosed", err)
	}
	if err := log.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestAMissingFolderIsAnError(t *testing.T) {
	if _, err := audit.Open(filepath.Join(t.TempDir(), "missing", "audit.jsonl")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want one that says that the folder does not exist", err)
	}
}

func TestAStreamGetsTheSameLines(t *testing.T) {
	var out bytes.Buffer
	if err := audit.NewStream(&out).Write(audit.Record{Service: "kms", Detail: strings.Repeat("x", 10_000)}); err != nil {
		t.Fatal(err)
	}
	var r audit.Record
	if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Service != "kms" || len(r.Detail) != 512 {
		t.Errorf("record %.100q, error %v", out.String(), err)
	}
}

func open(t *testing.T, path string) *audit.Log {
	t.Helper()
	log, err := audit.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	return log
}

func read(t *testing.T, path string) []audit.Record {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []audit.Record
	for s := bufio.NewScanner(f); s.Scan(); {
		var r audit.Record
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			t.Fatalf("line %q: %v", s.Text(), err)
		}
		out = append(out, r)
	}
	return out
}
