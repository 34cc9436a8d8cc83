package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// limited is a RefusalLimits whose clock the test sets, with its output.
type limited struct {
	*RefusalLimits
	now time.Time
	out bytes.Buffer
}

func newLimited(t *testing.T, w func(*bytes.Buffer) io.Writer) *limited {
	t.Helper()
	r := &limited{now: time.Unix(1000, 0)}
	s, err := NewUnattestedRefusals("joinservice", NewStream(w(&r.out)), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if r.RefusalLimits, err = NewRefusalLimits(s); err != nil {
		t.Fatal(err)
	}
	r.RefusalLimits.now = func() time.Time { return r.now }
	return r
}

func plain(b *bytes.Buffer) io.Writer { return b }

func (r *limited) refuse(t *testing.T, n int, machine string) {
	t.Helper()
	for range n {
		if err := r.Write(machine, Record{Event: "ticket refused", Machine: machine}); err != nil {
			t.Fatal(err)
		}
	}
}

// lines checks the number of lines that were written since its last call.
func (r *limited) lines(t *testing.T, want int) string {
	t.Helper()
	text := r.out.String()
	r.out.Reset()
	if n := strings.Count(text, "\n"); n != want {
		t.Fatalf("%d records, want %d:\n%s", n, want, text)
	}
	return text
}

func (r *limited) dropped(t *testing.T) float64 {
	t.Helper()
	var m dto.Metric
	if err := r.beside.dropped.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}

func TestOneMachineCannotWashOutTheRecordsOfOthers(t *testing.T) {
	r := newLimited(t, plain)
	r.refuse(t, 1000, "loud")
	r.lines(t, 50)
	r.refuse(t, 3, "quiet")
	r.lines(t, 3)
	r.now = r.now.Add(time.Minute)
	r.refuse(t, 1000, "loud")
	r.lines(t, 6)
	if n := r.dropped(t); n != 1944 {
		t.Errorf("%v were counted as unrecorded, want 1944", n)
	}
	r.report()
	if sum := r.lines(t, 1); !strings.Contains(sum, `"machine":"loud"`) || !strings.Contains(sum, "1944 more refusals") || !strings.Contains(sum, `"service":"joinservice"`) {
		t.Errorf("their number is recorded as %s", sum)
	}
	r.report()
	r.lines(t, 0)
}

// A policy may accept software TPMs: then the number of machines is unlimited.
func TestAnyNumberOfMachinesStaysWithinOneRation(t *testing.T) {
	r := newLimited(t, plain)
	for i := range maxShares {
		r.refuse(t, 2, fmt.Sprint("m", i))
	}
	r.lines(t, allBurst)
	r.refuse(t, 7, "one too many")
	r.lines(t, 0)
	r.report()
	sums := r.lines(t, maxSums+1)
	if !strings.Contains(sums, fmt.Sprintf("%d more refusals of further machines", 2*maxShares-allBurst+7-2*maxSums)) {
		t.Errorf("the rest is recorded as %s", sums)
	}
	if len(r.shares) != allBurst/2 { // a machine that has used none of its share needs no share
		t.Errorf("%d machines are remembered", len(r.shares))
	}
	r.now = r.now.Add(time.Hour)
	r.refuse(t, 1, "a later one")
	r.lines(t, 1)
	r.report()
	r.now = r.now.Add(time.Hour)
	r.report()
	if len(r.shares) > 0 {
		t.Errorf("%d machines are remembered for good", len(r.shares))
	}
}

func TestNumbersAreRecordedWhenTheServiceEnds(t *testing.T) {
	r := newLimited(t, plain)
	r.refuse(t, 51, "loud")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Serve(ctx); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(r.lines(t, 51), "1 more refusals of it") {
		t.Error("the number is lost")
	}
}

type brokenWriter struct{}

var errBroken = errors.New("no space left on device")

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

// A failed write is not the machine's fault: a refusal that is repeated until it can be written is not counted against the
// machine.
func TestARecordThatCannotBeWrittenIsNotTakenFromTheRation(t *testing.T) {
	r := newLimited(t, func(*bytes.Buffer) io.Writer { return brokenWriter{} })
	for range 2 * eachBurst {
		if err := r.Write("w1", Record{}); !errors.Is(err, errBroken) {
			t.Fatalf("got %v", err)
		}
	}
	if _, err := NewRefusalLimits(nil); err == nil {
		t.Error("RefusalLimits without UnattestedRefusals were made")
	}
}
