package audit

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// UnattestedRefusals must not make the audit log, which tickets need, busy or large.
func TestRecordsOfStrangersAreRationed(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(1000, 0)
	r, err := NewUnattestedRefusals("joinservice", NewStream(&out), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
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
	lines(recordBurst)
	now = now.Add(time.Second)
	flood()
	lines(recordBurst + recordRate)
	r.report()
	lines(recordBurst + recordRate + 1)
	if !strings.Contains(out.String(), fmt.Sprintf("%d more refusals", 2000-recordBurst-recordRate)) {
		t.Error("their number is not recorded")
	}
	r.report()
	lines(recordBurst + recordRate + 1)
}
