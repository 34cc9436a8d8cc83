// Package checkup defines the report of the doctor commands, the owner's and a machine's: named checks with a level, a
// detail and a remedy.
package checkup

import (
	"fmt"
	"slices"
)

// Level is the result of a check.
type Level string

// The levels.
const (
	OK Level = "ok"
	// Warn is for something that works, but may stop working or differs from what its owner wants.
	Warn Level = "warn"
	// Fail is for something that does not work, or is not safe.
	Fail Level = "fail"
)

// Finding is the result of one check, or one of several results.
type Finding struct {
	// Check is its name, which stays the same between versions.
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Detail describes what was found.
	Detail string `json:"detail"`
	// Remedy describes what to do; empty only if Level is OK.
	Remedy string `json:"remedy,omitempty"`
}

// Report is a list of findings in the order of the checks.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Add adds a result of a check.
func (r *Report) Add(check string, level Level, remedy, detail string, args ...any) {
	r.Findings = append(r.Findings, Finding{Check: check, Level: level, Detail: fmt.Sprintf(detail, args...), Remedy: remedy})
}

// OK adds the result that a check found nothing wrong.
func (r *Report) OK(check, detail string, args ...any) { r.Add(check, OK, "", detail, args...) }

// Err adds a failure of the check with the error; it adds nothing if err is nil.
func (r *Report) Err(check, remedy string, err error) {
	if err != nil {
		r.Add(check, Fail, remedy, "%v", err)
	}
}

// Clean reports whether the check has no finding yet except OK.
func (r *Report) Clean(check string) bool {
	return !slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Check == check && f.Level != OK })
}

// Failed reports whether the check has a failure so far.
func (r *Report) Failed(check string) bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Check == check && f.Level == Fail })
}

// Count returns how many findings have a level.
func (r *Report) Count(l Level) (n int) {
	for _, f := range r.Findings {
		if f.Level == l {
			n++
		}
	}
	return n
}

// Verdict returns an error if any check failed.
func (r *Report) Verdict() error {
	if n := r.Count(Fail); n > 0 {
		return fmt.Errorf("%d of %d checks failed", n, len(r.Findings))
	}
	return nil
}

// Rows returns a table for people, its heading first.
func (r *Report) Rows() [][]string {
	rows := [][]string{{"CHECK", "", "FOUND"}}
	for _, f := range r.Findings {
		level := string(f.Level)
		if f.Level == Fail {
			level = "FAIL"
		}
		rows = append(rows, []string{f.Check, level, f.Detail})
		if f.Remedy != "" {
			rows = append(rows, []string{"", "", "→ " + f.Remedy})
		}
	}
	return rows
}

// Journal returns how to read a unit's log on a node from a workstation: a machine has no logins.
func Journal(node, unit string) string {
	return "Its log: kubectl -n kube-system debug node/" + node + " -it -q --profile=sysadmin --image=IMAGE@sha256:DIGEST -- chroot /host journalctl -u " + unit + " (which IMAGE: docs/operate.md#8-logs-and-records)."
}
