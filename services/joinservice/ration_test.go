package joinservice

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/internal/audit"
)

// Strangers must not make the audit log, which tickets need, busy or large.
func TestRecordsOfStrangersAreRationed(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(1000, 0)
	r := &Refusals{
		audit: audit.NewStream(&out), log: slog.New(slog.DiscardHandler), dropped: prometheus.NewCounter(prometheus.CounterOpts{Name: "x"}),
		now: func() time.Time { return now }, tokens: recordBurst, at: now,
	}
	lines := func(want int) {
		t.Helper()
		if n := strings.Count(out.String(), "\n"); n != want {
			t.Fatalf("%d records, want %d", n, want)
		}
	}
	flood := func() {
		for range 1000 {
			r.take(audit.Record{Event: "connection refused"})
		}
	}
	flood()
	lines(50)
	now = now.Add(time.Second)
	flood()
	lines(60)
	r.tell()
	lines(61)
	if !strings.Contains(out.String(), "1940 more refused connections") {
		t.Error("their number is not recorded")
	}
	r.tell()
	lines(61)
}
