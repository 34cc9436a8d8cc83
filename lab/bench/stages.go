package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// A stage ends with the event whose text has its mark; it began with the end of the one
// before. Stages of kubeadm's own are measured too, and named so.
type stage struct{ name, mark string }

// Stages of `muster init` until the machine is a node, from the machine's progress in the output of the CLI.
var initStages = []stage{
	{"init: verify the machine", "machine "},
	{"init: node lock", "the machine is locked"},
	{"init: state disk", "the state disk is open"},
	{"init: components", "components are installed"},
	{"init: configuration", "running kubeadm init"},
	{"init: kubeadm", "kubeadm init has finished"},
	{"init: cluster's own objects", "the cluster's own objects are written"},
	{"init: start of the node", "this machine is a node"},
}

// Stages of a join, from the bootstrapper's log.
var joinStages = []stage{
	{"join: start", "asking "},
	{"join: attested TLS", "joinservice verified"},
	{"join: ticket and node lock", "the machine is locked"},
	{"join: state disk", "the state disk is open"},
	{"join: components", "components are installed"},
	{"join: configuration", "running kubeadm join"},
	{"join: kubeadm", "kubeadm join has finished"},
	{"join: start of the node", "this machine is a node"},
}

// event is an output with its time.
type event struct {
	at   time.Time
	text string
}

// split returns the duration of each stage in seconds, or an error that names a stage without an end.
func split(start time.Time, events []event, stages []stage) (map[string]float64, error) {
	out := map[string]float64{}
	last := start
	rest := events
	for _, s := range stages {
		i := 0
		for i < len(rest) && !strings.Contains(rest[i].text, s.mark) {
			i++
		}
		if i == len(rest) {
			return nil, fmt.Errorf("no event with %q, which ends the stage %q", s.mark, s.name)
		}
		out[s.name] = rest[i].at.Sub(last).Seconds()
		last = rest[i].at
		rest = rest[i+1:]
	}
	return out, nil
}

// initStages reads the events that muster init printed. The node may become Ready before or after the command ends:
// its condition has the time, to the second, and is read by a watch that began before.
func (r *run) initStages(s *Sample, start time.Time, printed []byte) error {
	var events []event
	for line := range strings.Lines(string(printed)) {
		var e struct {
			Time    time.Time
			Event   string
			Step    string
			Text    string
			Seconds float64
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			return fmt.Errorf("muster init printed %q: %w", line, err)
		}
		events = append(events, event{e.Time, e.Text})
		if e.Event == "done" && !strings.HasPrefix(e.Step, "verify the machine") && !strings.HasPrefix(e.Step, "initialize") {
			s.Stages["init: "+e.Step] = e.Seconds
		}
	}
	stages, err := split(start, events, initStages)
	if err != nil {
		return fmt.Errorf("muster init: %w", err)
	}
	for _, st := range initStages {
		s.Stages[st.name] = stages[st.name]
		s.Init.Kubeadm += stages[st.name]
		if st.name == "init: kubeadm" {
			break
		}
	}
	for name, t := range stages {
		s.Stages[name] = t
	}
	return nil
}

// whenReady waits, beside a running muster init, until the first machine is Ready. It returns the seconds since
// start.
func (r *run) whenReady(ctx context.Context, start time.Time, admin string) (float64, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := os.Stat(filepath.Join(r.Lab.OwnerDir(), admin))
		if err == nil {
			break
		}
		if !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-tick.C:
		}
	}
	err := r.ready(ctx, admin, "node1")
	return since(start), err
}

// joinStages reads the log of the machine that joined. It began when its unit was started.
func (r *run) joinStages(ctx context.Context, s *Sample, ready time.Time) error {
	start, err := r.unitStarted("node2", "muster-bootstrapper")
	if err != nil {
		return err
	}
	lines, err := r.log(ctx, "node2")
	if err != nil {
		return err
	}
	events := make([]event, 0, len(lines))
	for _, l := range lines {
		if l.Msg == "progress" {
			l.Msg = l.Text
		}
		events = append(events, event{l.Time, l.Msg})
	}
	stages, err := split(start, events, joinStages)
	if err != nil {
		return fmt.Errorf("the bootstrapper of node2: %w", err)
	}
	for _, st := range joinStages {
		s.Stages[st.name] = stages[st.name]
		s.Join.Done += stages[st.name]
		if st.name == "join: kubeadm" {
			s.Join.Kubeadm = s.Join.Done
		}
	}
	s.Join.Ready = ready.Sub(start).Seconds()
	return nil
}

var startedLine = regexp.MustCompile(`time=(\S+) level=INFO msg=started unit=(\S+)`)

// unitStarted reads when the machine's PID 1 started a unit.
func (r *run) unitStarted(node, unit string) (time.Time, error) {
	b, err := os.ReadFile(r.Lab.InitLog(node))
	if err != nil {
		return time.Time{}, err
	}
	for _, m := range startedLine.FindAllSubmatch(b, -1) {
		if string(m[2]) == unit {
			return time.Parse(time.RFC3339, string(m[1]))
		}
	}
	return time.Time{}, fmt.Errorf("PID 1 of %s did not start %s", node, unit)
}
