package orders

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/muster-k8s/muster/internal/checkup"
)

const (
	// downWithin is how long a machine may take from the order to restart until the units are told to stop.
	downWithin = 10 * time.Minute
	// diesWith is how long this process waits for its own end after systemctl has failed: in a machine that goes down, systemctl
	// may be killed before it can answer.
	diesWith = 30 * time.Second
)

// maxFinding bounds each text of a finding, in bytes.
const maxFinding = 300

// Doctor returns the action that reports the findings of examine, in JSON. What does not fit is left out, and said to be: first
// what is OK, then the warnings.
func Doctor(examine func(context.Context) *checkup.Report) Action {
	run := func(ctx context.Context) (string, error) {
		return fitting(examine(ctx), maxOutput)
	}
	return Action{Run: run, Resume: func(ctx context.Context, _ bool) (string, error) { return run(ctx) }}
}

func fitting(r *checkup.Report, limit int) (string, error) {
	drop := map[checkup.Level]bool{}
	for _, level := range []checkup.Level{"", checkup.OK, checkup.Warn, checkup.Fail} {
		drop[level] = true
		var out checkup.Report
		left := 0
		for _, f := range r.Findings {
			if drop[f.Level] {
				left++
				continue
			}
			f.Detail, f.Remedy = cut(f.Detail, maxFinding), cut(f.Remedy, maxFinding)
			out.Findings = append(out.Findings, f)
		}
		if left > 0 {
			out.Findings = append(out.Findings, checkup.Finding{Check: "report", Level: checkup.Warn, Detail: fmt.Sprintf("%d of %d findings do not fit", left, len(r.Findings)), Remedy: "Repair what is listed, and look again."})
		}
		b, err := json.Marshal(out)
		if err != nil || len(b) <= limit {
			return string(b), err
		}
	}
	return "", fmt.Errorf("%d findings do not fit into %d bytes", len(r.Findings), limit)
}

// Reboot returns the action that restarts the machine. It is done in the next boot.
func Reboot(reboot func(context.Context) error) Action {
	run := func(ctx context.Context) error {
		err := reboot(ctx)
		wait := downWithin
		if err != nil {
			wait = diesWith
		}
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err == nil {
			err = fmt.Errorf("this machine was told to restart, and still runs after %s", downWithin)
		}
		return err
	}
	return Action{
		Run: func(ctx context.Context) (string, error) { return "", run(ctx) },
		Resume: func(ctx context.Context, rebooted bool) (string, error) {
			if rebooted {
				return "", nil
			}
			return "", run(ctx)
		},
	}
}
