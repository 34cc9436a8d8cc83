package orders

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// downWithin is how long a machine may take from the reboot call until systemd stops the units.
	downWithin = 10 * time.Minute
	// diesWith is how long this process waits for its own end after systemctl has failed: in a machine that goes down, systemctl
	// may be killed before it can answer.
	diesWith = 30 * time.Second
)

// Args are an order's arguments by their names.
type Args = map[string]string

// Action executes one kind of order.
type Action struct {
	// Args are the names of its arguments: an order has all of them and no other.
	Args []string
	// Time is how long it may take; 0: [Config.ActionTime].
	Time time.Duration
	// Cannot is the reason why this machine can't execute it, or nil. Such an order is refused, so that its start is not reported to the owner.
	Cannot error
	// Run executes it, and returns the output that the owner wants.
	Run func(ctx context.Context, args Args) (output string, err error)
	// Resume continues an action that this process did not complete before it ended; rebooted reports whether the machine
	// has rebooted since.
	Resume func(ctx context.Context, args Args, rebooted bool) (output string, err error)
}

// maxFinding bounds each text of a finding, in bytes.
const maxFinding = 300

// Doctor returns the action that reports the findings of examine, in JSON. Findings that do not fit are left out, and that is
// reported: first those with OK, then the warnings.
func Doctor(examine func(context.Context) *checkup.Report) Action {
	return repeatable(func(ctx context.Context, _ Args) (string, error) { return fitting(examine(ctx), maxOutput) })
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
			err = fmt.Errorf("systemd was called to restart this machine, but it still runs after %s", downWithin)
		}
		return err
	}
	return Action{
		Run: func(ctx context.Context, _ Args) (string, error) { return "", run(ctx) },
		Resume: func(ctx context.Context, _ Args, rebooted bool) (string, error) {
			if rebooted {
				return "", nil
			}
			return "", run(ctx)
		},
	}
}

// Backup returns the action that makes a backup of the cluster, and reports it in JSON.
func Backup(save func(context.Context) (backup.Stored, error)) Action {
	return repeatable(func(ctx context.Context, _ Args) (string, error) {
		stored, err := save(ctx)
		if err != nil {
			return "", err
		}
		b, err := json.Marshal(stored)
		return string(b), err
	})
}

// repeatable returns the action that runs again from its start after an interruption.
func repeatable(run func(context.Context, Args) (string, error), args ...string) Action {
	return Action{Args: args, Run: run, Resume: func(ctx context.Context, args Args, _ bool) (string, error) { return run(ctx, args) }}
}

// Reset returns the action that erases the state disk, which has the given mode, and restarts the machine. Its end is never reported, because the
// journal is on that disk. After an interruption it runs again from its start, also in the next boot if the disk was not erased.
func Reset(mode string, recorded, erase, reboot func(context.Context) error) Action {
	restart := Reboot(reboot)
	a := repeatable(func(ctx context.Context, args Args) (string, error) {
		if err := recorded(ctx); err != nil {
			return "", err
		}
		if err := erase(ctx); err != nil {
			return "", err
		}
		out, err := restart.Run(ctx, args)
		if err != nil {
			err = fmt.Errorf("the state disk is erased; power the machine off and on: %w", err)
		}
		return out, err
	})
	if mode != metadata.DiskLUKS {
		a.Cannot = attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the state disk of this machine has the mode %q: only an encrypted one can be erased", mode)
	}
	return a
}

// RemoveEtcdMember returns the action that removes the etcd member of another node. remove returns what it has removed, as text.
func RemoveEtcdMember(node func() (string, error), remove func(ctx context.Context, member string) ([]string, error)) Action {
	return repeatable(func(ctx context.Context, args Args) (string, error) {
		member := args[ownerorder.ArgMember]
		own, err := node()
		switch {
		case err != nil:
			return "", err
		case member == "":
			return "", errors.New("the order names no member")
		case member == own:
			return "", fmt.Errorf("%s does not remove its own member: order it of another control plane", own)
		}
		removed, err := remove(ctx, member)
		if err == nil && len(removed) == 0 {
			return "etcd has no member " + member, nil
		}
		return strings.Join(removed, "; "), err
	}, ownerorder.ArgMember)
}
