package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A Process is one process for good: its pid and the moment it started, in clock
// ticks since boot (/proc/PID/stat, field 22). A later process that got the same pid
// is another Process.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// ProcessOf returns the identity of a running process.
func ProcessOf(pid int) (Process, error) {
	start, _, err := stat(pid)
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return Process{PID: pid, Start: start}, nil
}

// Alive reports whether the process still runs. A zombie doesn't, unless it is only the
// first thread that has ended: PID 1 of a namespace ends like that, and another of its
// threads then waits for the end of everything in there.
func (p Process) Alive() bool {
	if p.PID <= 0 {
		return false
	}
	start, state, err := stat(p.PID)
	if err != nil || start != p.Start || state == 'X' {
		return false
	}
	if state != 'Z' {
		return true
	}
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(p.PID) + "/task")
	return err == nil && len(threads) > 1
}

// Signal sends sig if the process is still the same one.
func (p Process) Signal(sig syscall.Signal) error {
	if !p.Alive() {
		return nil
	}
	if err := syscall.Kill(p.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// Wait returns when the process has ended, or ctx.
func (p Process) Wait(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for p.Alive() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("process %d still runs: %w", p.PID, ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}

func stat(pid int) (start uint64, state byte, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	_, rest, ok := strings.Cut(string(b[max(0, strings.LastIndexByte(string(b), ')')):]), " ")
	f := strings.Fields(rest) // f[0] is field 3, the state
	if !ok || len(f) < 20 {
		return 0, 0, errors.New("unreadable stat")
	}
	start, err = strconv.ParseUint(f[19], 10, 64)
	return start, f[0][0], err
}
