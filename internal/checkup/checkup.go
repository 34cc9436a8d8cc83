// Package checkup is what a doctor's report looks like, the owner's and a machine's alike: named
// checks that are ok, worth a word or failed, and what to do.
package checkup

import (
	"fmt"
	"slices"
)

// Level is how a check ended.
type Level string

// The levels.
const (
	OK Level = "ok"
	// Warn is for what works, and may not for long or as its owner wants.
	Warn Level = "warn"
	// Fail is for what does not work, or is not safe.
	Fail Level = "fail"
)

// Finding is what came of one check, or one of several things that it found.
type Finding struct {
	// Check is its name, which stays the same between versions.
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Detail says what was seen.
	Detail string `json:"detail"`
	// Remedy says what to do; empty only if Level is OK.
	Remedy string `json:"remedy,omitempty"`
}

// Report is a list of findings in the order of the checks.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Add notes what a check found.
func (r *Report) Add(check string, level Level, remedy, detail string, args ...any) {
	r.Findings = append(r.Findings, Finding{Check: check, Level: level, Detail: fmt.Sprintf(detail, args...), Remedy: remedy})
}

// OK notes that a check found nothing wrong.
func (r *Report) OK(check, detail string, args ...any) { r.Add(check, OK, "", detail, args...) }

// Err notes that a check failed for an error; it is a finding of nothing if err is nil.
func (r *Report) Err(check, remedy string, err error) {
	if err != nil {
		r.Add(check, Fail, remedy, "%v", err)
	}
}

// Clean says whether the check has no finding yet but OK.
func (r *Report) Clean(check string) bool {
	return !slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Check == check && f.Level != OK })
}

// Count gives how many findings are of a level.
func (r *Report) Count(l Level) (n int) {
	for _, f := range r.Findings {
		if f.Level == l {
			n++
		}
	}
	return n
}

// Verdict is an error if anything failed.
func (r *Report) Verdict() error {
	if n := r.Count(Fail); n > 0 {
		return fmt.Errorf("%d of %d checks failed", n, len(r.Findings))
	}
	return nil
}

// Rows gives a table for people, its heading first.
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
