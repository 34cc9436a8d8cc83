package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/rollout"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

func (a *app) rebootCommand() *cobra.Command {
	var (
		yes       bool
		unchecked bool
		timeout   time.Duration
		pods      draining
	)
	cmd := &cobra.Command{
		Use:   "reboot NODE",
		Short: "Restart a node's machine without a login on it",
		Long: `Signs an order with the owner's key. The machine gets it with its next attestation, within five minutes, verifies the signature by the
ownerKeys of its image, and restarts. The command completes when the machine has attested in its new boot. With --drain, its pods are
evicted before, and the node is made schedulable again afterwards.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !unchecked {
				if err := a.withFolder(func(d *ownerdir.Dir) error { return rollout.MayRestart(cmd.Context(), d, args[0]) }); err != nil {
					return err
				}
			}
			if !yes {
				fmt.Fprintf(a.stderr, "The machine of %s restarts, with all its pods.\n", args[0])
				if err := a.confirm(cmd.Context(), cmd.InOrStdin(), args[0]); err != nil {
					return err
				}
			}
			pods.options.Returns = true
			cordoned, err := a.drainFirst(cmd.Context(), args[0], pods)
			if err != nil {
				return err
			}
			r, err := a.order(cmd.Context(), args[0], ownerorder.ActionReboot, timeout)
			if err != nil && cordoned {
				fmt.Fprintf(a.stderr, "%s is unschedulable until kubectl uncordon %s.\n", args[0], args[0])
			}
			if err != nil {
				return err
			}
			if cordoned {
				if err := a.withFolder(func(d *ownerdir.Dir) error { return lifecycle.Uncordon(cmd.Context(), d, args[0]) }); err != nil {
					return fmt.Errorf("%s has restarted, but is still unschedulable: kubectl uncordon %s: %w", args[0], args[0], err)
				}
			}
			if a.output == outputJSON {
				return a.json(r)
			}
			_, err = fmt.Fprintf(a.stdout, "%s has restarted.\n", args[0])
			return err
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "don't ask")
	cmd.Flags().DurationVar(&timeout, "timeout", lifecycle.OrderTimeout, "how long to wait for the machine")
	uncheckedFlag(cmd, &unchecked, "")
	pods.flags(cmd, true)
	return cmd
}

// uncheckedFlag adds the flag that lets control planes restart while others are unhealthy.
func uncheckedFlag(cmd *cobra.Command, to *bool, more string) {
	cmd.Flags().BoolVar(to, "unchecked", false, "restart a control plane also if another one is unhealthy, or if it is the only one: an encrypted cluster may then need muster recover"+more)
}

// order signs an order to a node's machine and waits for its end.
func (a *app) order(ctx context.Context, node string, action ownerorder.Action, timeout time.Duration) (*v1alpha1.OrderReport, error) {
	dir, err := a.view()
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return orders.Execute(ctx, dir, node, action, nil, func(step string) { fmt.Fprintf(a.stderr, "%s: %s\n", node, step) })
}

// doctorOf shows the findings of a node's machine.
func (a *app) doctorOf(ctx context.Context, node string, timeout time.Duration) error {
	r, err := a.order(ctx, node, ownerorder.ActionDoctor, timeout)
	if err != nil {
		return err
	}
	found, err := orders.ParseReport(r.Output)
	if err != nil {
		return fmt.Errorf("the report of bootstrapper doctor on %s can't be read: %w", node, err)
	}
	fmt.Fprintf(a.stderr, "The following report is from the machine of %s itself; an attacker with root on it could have changed it.\n", node)
	return a.showReport(found)
}
