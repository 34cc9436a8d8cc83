// Program lab makes a real Kubernetes cluster's machines on one Linux machine: namespaces with
// containerd, a kubelet and a TPM 2.0 each, on their own network. README.md in this folder
// describes how.
//
// It is several programs in one file, because a machine needs them where nothing else is installed:
// PID 1, systemctl, and the daemon that runs all of them.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/muster-k8s/muster/lab/internal/daemon"
	"github.com/muster-k8s/muster/lab/internal/machine"
)

func main() {
	if filepath.Base(os.Args[0]) == "systemctl" {
		os.Exit(machine.Systemctl(os.Args[1:], os.Stdout, os.Stderr))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, "lab:", err)
	}
	os.Exit(machine.Code(err))
}

func run(ctx context.Context, args []string) error {
	// The lab's own processes; these are not for users.
	if len(args) == 2 {
		switch args[0] {
		case "machine-enter":
			return machine.Enter(args[1])
		case "machine-init":
			return machine.Init(ctx, args[1])
		case "seat":
			return daemon.Seat(ctx, args[1])
		}
	}
	if len(args) == 3 && args[0] == "daemon" && args[1] == "--dir" {
		return daemon.Run(ctx, args[2], slog.New(slog.NewTextHandler(os.Stderr, nil)))
	}
	cmd := commands()
	cmd.SetArgs(args)
	return cmd.ExecuteContext(ctx)
}
