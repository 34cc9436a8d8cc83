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

	"github.com/muster-k8s/muster/cmd/muster/owner"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	a := &app{stdout: os.Stdout, stderr: os.Stderr}
	err := a.run(ctx, os.Args[1:])
	stop()
	if err != nil {
		a.complain(err)
		os.Exit(1)
	}
}

// app is the state that all commands share.
type app struct {
	stdout, stderr io.Writer
	output         string
	directory      string
}

func (a *app) run(ctx context.Context, args []string) error {
	quietLibraries()
	root := a.command()
	root.SetArgs(args)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	return root.ExecuteContext(ctx)
}

// shown is an error that only sets the exit code: its content is already printed.
type shown struct{ error }

// complain prints an error with its reason code and its remedy.
func (a *app) complain(err error) {
	p := owner.Explain(err)
	if _, shown := errors.AsType[*shown](err); shown && a.output == outputJSON {
		return // the printed object contains it
	}
	if a.output == outputJSON {
		line := struct {
			Event string `json:"event"`
			owner.Problem
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
