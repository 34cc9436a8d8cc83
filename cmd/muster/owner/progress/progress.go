// Package progress reports the progress of a command to a person or a program.
//
// A command is a sequence of steps. Each one starts, may report what it is doing, and ends with a duration. On a
// terminal, this is one updated line with a bar, below the finished steps. Elsewhere it is one line for each event,
// as text or as JSON.
package progress

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/muster-k8s/muster/internal/printable"
)

// Reporter receives events. Implementations are safe for concurrent use.
type Reporter interface {
	// Begin starts the next step; the previous one has ended.
	Begin(step string)
	// Update reports what the step is doing now.
	Update(text string)
	// End ends the step; err is nil if it succeeded. detail is its result, may be empty.
	End(detail string, err error)
	// Close ends the report, and removes an updated line.
	Close()
}

// Format is the form of a report.
type Format string

// The formats.
const (
	Bar   Format = "bar"
	Plain Format = "plain"
	JSON  Format = "json"
)

// Config configures a reporter.
type Config struct {
	Out    io.Writer
	Format Format
	// Steps is the number of steps, for the bar.
	Steps int
	// Width of the terminal in columns; for Bar. 0 means 80.
	Width int
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// New returns a reporter.
func New(cfg Config) Reporter {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Width <= 0 {
		cfg.Width = 80
	}
	r := &reporter{cfg: cfg, start: cfg.Now()}
	if cfg.Format == Bar {
		r.stop, r.stopped = make(chan struct{}), make(chan struct{})
		go r.tick()
	}
	return r
}

type reporter struct {
	cfg     Config
	start   time.Time
	stop    chan struct{} // Bar only: ends tick
	stopped chan struct{}

	mu     sync.Mutex
	done   int
	step   string
	text   string
	began  time.Time
	closed bool
}

// event is one line of the format JSON.
type event struct {
	Time    time.Time `json:"time"`
	Event   string    `json:"event"` // step, progress, done or failed
	Step    string    `json:"step"`
	Text    string    `json:"text,omitempty"`
	Seconds float64   `json:"seconds"` // since the step began
	Total   float64   `json:"totalSeconds"`
}

func (r *reporter) Begin(step string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.step, r.text, r.began = printable.Line(step, len(step)), "", r.cfg.Now()
	r.show("step", "")
}

func (r *reporter) Update(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if text == r.text {
		return
	}
	r.text = printable.Line(text, len(text))
	r.show("progress", r.text)
}

func (r *reporter) End(detail string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.text = ""
	if err != nil {
		text := err.Error()
		r.show("failed", printable.Line(text, len(text)))
		return
	}
	r.done++
	r.show("done", printable.Line(detail, len(detail)))
}

func (r *reporter) Close() {
	r.mu.Lock()
	closed := r.closed
	r.closed = true
	r.mu.Unlock()
	if closed || r.stop == nil {
		return
	}
	close(r.stop)
	<-r.stopped
	fmt.Fprint(r.cfg.Out, clearLine)
}

// show writes an event; r.mu is held.
func (r *reporter) show(kind, text string) {
	now := r.cfg.Now()
	inStep, total := now.Sub(r.began), now.Sub(r.start)
	switch r.cfg.Format {
	case JSON:
		b, err := json.Marshal(event{Time: now.UTC(), Event: kind, Step: r.step, Text: text, Seconds: inStep.Seconds(), Total: total.Seconds()})
		if err == nil {
			fmt.Fprintf(r.cfg.Out, "%s\n", b)
		}
	case Bar:
		switch kind {
		case "done":
			fmt.Fprintf(r.cfg.Out, "%s✓ %-44s %8s  %s\n", clearLine, r.step, round(inStep), text)
		case "failed":
			fmt.Fprintf(r.cfg.Out, "%s✗ %-44s %8s\n", clearLine, r.step, round(inStep))
		}
		r.draw(now)
	default:
		switch kind {
		case "step":
			fmt.Fprintf(r.cfg.Out, "%7s  %s …\n", round(total), r.step)
		case "progress":
			fmt.Fprintf(r.cfg.Out, "%7s  %s: %s\n", round(total), r.step, text)
		case "done":
			fmt.Fprintf(r.cfg.Out, "%7s  %s: done in %s%s\n", round(total), r.step, round(inStep), dash(text))
		case "failed":
			fmt.Fprintf(r.cfg.Out, "%7s  %s: failed after %s\n", round(total), r.step, round(inStep))
		}
	}
}

const clearLine = "\r\x1b[2K"

// draw draws the updated line; r.mu is held.
func (r *reporter) draw(now time.Time) {
	const cells = 20
	steps := max(r.cfg.Steps, r.done, 1)
	full := cells * r.done / steps
	line := fmt.Sprintf("[%s%s] %d/%d %s %s", strings.Repeat("█", full), strings.Repeat("·", cells-full), r.done, steps, round(now.Sub(r.start)), r.step)
	if r.text != "" {
		line += ": " + r.text
	}
	fmt.Fprint(r.cfg.Out, clearLine, cut(line, r.cfg.Width-1))
}

// tick updates the clock on that line.
func (r *reporter) tick() {
	defer close(r.stopped)
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-r.stop:
			return
		case <-t.C:
			r.mu.Lock()
			r.draw(r.cfg.Now())
			r.mu.Unlock()
		}
	}
}

func dash(s string) string {
	if s == "" {
		return ""
	}
	return " (" + s + ")"
}

func round(d time.Duration) string { return fmt.Sprintf("%.1fs", d.Seconds()) }

func cut(s string, columns int) string {
	if utf8.RuneCountInString(s) <= columns {
		return s
	}
	return string([]rune(s)[:max(columns-1, 0)]) + "…"
}
