package audit

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Strangers must not make the audit log, which tickets need, busy or large.
func TestRecordsOfStrangersAreRationed(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(1000, 0)
	r, err := NewStrangers("joinservice", NewStream(&out), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	r.now = func() time.Time { return now }
	lines := func(want int) {
		t.Helper()
		if n := strings.Count(out.String(), "\n"); n != want {
			t.Fatalf("%d records, want %d", n, want)
		}
	}
	flood := func() {
		for range 1000 {
			r.take(Record{Event: "connection refused"})
		}
	}
	flood()
	lines(50)
	now = now.Add(time.Second)
	flood()
	lines(55)
	r.tell()
	lines(56)
	if !strings.Contains(out.String(), "1945 more refusals") {
		t.Error("their number is not recorded")
	}
	r.tell()
	lines(56)
}
