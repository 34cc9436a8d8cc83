// Muster is the tool of a cluster's owner: it makes a cluster on a first machine, looks at
// machines before they are trusted, and keeps the policy that says which may join.
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

// app is what all commands share.
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

// told is an error that only makes the exit code: what was printed says the same.
type told struct{ error }

// complain tells what went wrong, why by its code, and what to do.
func (a *app) complain(err error) {
	p := owner.Explain(err)
	if _, told := errors.AsType[*told](err); told && a.output == outputJSON {
		return // the one object that was printed says it all
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
