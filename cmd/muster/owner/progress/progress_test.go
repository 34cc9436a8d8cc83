package progress_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// output returns the report of two steps, the second of which fails, with a clock that advances by a second.
func output(format progress.Format) string {
	var out bytes.Buffer
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	r := progress.New(progress.Config{Out: &out, Format: format, Steps: 2, Width: 60, Now: func() time.Time {
		now = now.Add(time.Second)
		return now
	}})
	r.Begin("verify the machine")
	r.Update("asking")
	r.Update("asking")
	r.Update("its text \x1b[2J and more than a terminal's line can hold, so it is cut")
	r.End("machine 0123", nil)
	r.Begin("init")
	r.End("", errors.New("NODE_LOCKED"))
	r.Close()
	r.Close()
	return out.String()
}

func TestPlainIsOneLinePerEvent(t *testing.T) {
	got := output(progress.Plain)
	want := `   2.0s  verify the machine …
   3.0s  verify the machine: asking
   4.0s  verify the machine: its text  [2J and more than a terminal's line can hold, so it is cut
   5.0s  verify the machine: done in 4.0s (machine 0123)
   7.0s  init …
   8.0s  init: failed after 2.0s
`
	if got != want {
		t.Errorf("got\n%s", got)
	}
}

// A machine's text, and a node's name in a step, neither move the cursor nor hide or turn around what follows.
func TestWhatATerminalObeysOrHidesIsLeftOut(t *testing.T) {
	for name, text := range map[string]string{
		"an escape sequence": "\x1b[2J", "another line": "\n", "the line's beginning": "\r", "DEL": "\x7f", "CSI in one character": "\u009b2J",
		"text from right to left": "\u202e", "an isolate": "\u2066", "no width": "\u200b", "a tag": "\U000e0041", "a byte that is no UTF-8": "\xff",
	} {
		t.Run(name, func(t *testing.T) {
			for _, format := range []progress.Format{progress.Plain, progress.Bar} {
				var with, without bytes.Buffer
				for out, text := range map[*bytes.Buffer]string{&with: text, &without: strings.Repeat(" ", utf8.RuneCountInString(text))} {
					r := progress.New(progress.Config{Out: out, Format: format, Width: 200, Now: func() time.Time { return time.Time{} }})
					r.Begin("step" + text)
					r.Update("update" + text)
					r.End("detail"+text, nil)
					r.Close()
				}
				visible := func(s string) string { return strings.NewReplacer("[2J", "   ", "2J", "  ").Replace(s) }
				if visible(with.String()) != without.String() {
					t.Errorf("%q, want %q", with.String(), without.String())
				}
			}
		})
	}
}

func TestJSONIsOneObjectPerLine(t *testing.T) {
	var kinds []string
	for line := range strings.Lines(output(progress.JSON)) {
		var e struct{ Event, Step, Text string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		kinds = append(kinds, e.Event)
	}
	if got := strings.Join(kinds, " "); got != "step progress progress done step failed" {
		t.Error(got)
	}
}

func TestTheBarMovesAndLeavesTheStepsBehind(t *testing.T) {
	got := output(progress.Bar)
	for _, want := range []string{"[····················] 0/2", "[██████████··········] 1/2", "✓ verify the machine", "✗ init", "…"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in\n%q", want, got)
		}
	}
	if strings.Contains(got, "\x1b[2J") {
		t.Error("a machine's text reached the terminal as a command")
	}
	if !strings.HasSuffix(got, "\r\x1b[2K") {
		t.Error("the moving line was left behind")
	}
}
