// Muster is the command line of a cluster's owner: it initializes a cluster on a first machine, verifies machines
// before they are trusted, and maintains the policy that decides which may join.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
)

// Exit codes; docs/operate.md lists them.
const (
	exitFailed      = 1 // a check found a problem, or the command failed in another way
	exitUsage       = 2 // wrong command line; nothing was done
	exitRefused     = 3 // a machine, a service or the cluster was refused or refuses; the error has a reason code
	exitUnreachable = 4 // the other side does not answer, or is not ready
)

func main() {
	quietLibraries()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	a := &app{stdout: os.Stdout, stderr: os.Stderr}
	err := a.run(ctx, os.Args[1:])
	stop()
	if err != nil {
		a.complain(err)
		os.Exit(exitCode(err))
	}
}

// app is the state that all commands share.
type app struct {
	stdout, stderr io.Writer
	output         string
	directory      string
	// began is true once a command runs: an earlier error is one of the command line.
	began bool
}

func (a *app) run(ctx context.Context, args []string) error {
	a.stdout, a.stderr = visible(a.stdout), visible(a.stderr)
	root := a.command()
	a.mark(root)
	root.SetArgs(args)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return nil
	}
	if !a.began {
		err = &usageError{err: err}
	}
	if u, ok := errors.AsType[*usageError](err); ok {
		u.command = cmd.CommandPath()
	}
	return err
}

// mark makes each command set began.
func (a *app) mark(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		a.mark(c)
	}
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			a.began = true
			return run(cmd, args)
		}
	}
}

// usageError is an error of the command line.
type usageError struct {
	err     error
	command string
}

func (u *usageError) Error() string { return u.err.Error() }
func (u *usageError) Unwrap() error { return u.err }

func usagef(format string, args ...any) error { return &usageError{err: fmt.Errorf(format, args...)} }

func exitCode(err error) int {
	if _, usage := errors.AsType[*usageError](err); usage {
		return exitUsage
	}
	switch {
	case problem.Unreachable(err):
		return exitUnreachable
	case problem.Explain(err).Reason != "":
		return exitRefused
	}
	return exitFailed
}

// shown is an error that only sets the exit code: its content is already printed.
type shown struct{ error }

// complain prints an error with its reason code and its remedy.
func (a *app) complain(err error) {
	p := problem.Explain(err)
	if u, ok := errors.AsType[*usageError](err); ok && p.Remedy == "" {
		p.Remedy = u.command + " --help shows its arguments."
	}
	if _, shown := errors.AsType[*shown](err); shown && a.output == outputJSON {
		return // the printed object contains the error
	}
	if a.output == outputJSON {
		line := struct {
			Event string `json:"event"`
			problem.Problem
		}{"error", p}
		if b, err := json.Marshal(line); err == nil {
			fmt.Fprintf(a.stdout, "%s\n", b)
		}
		return
	}
	fmt.Fprintf(a.stderr, "Error: %s\n", p.Message)
	if p.Reason != "" {
		fmt.Fprintf(a.stderr, "Reason: %s\n", p.Reason)
	}
	if p.Remedy != "" {
		fmt.Fprintf(a.stderr, "What to do: %s\n", p.Remedy)
	}
}
