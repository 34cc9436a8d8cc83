package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/doctor"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/trust/attest"
)

func (a *app) doctorCommand() *cobra.Command {
	var (
		endpoint, policy string
		node             string
		timeout          time.Duration
	)
	cmd := &cobra.Command{
		Use: "doctor", Short: "Find problems, with remedies", Args: cobra.NoArgs,
		Long: `Checks the owner's folder, its cluster and the connection to it; with --endpoint, one machine that should become a node. It changes nothing except
known.json of the folder, where it records the cluster's state. Each check is ok, a warning (warn) or failed (FAIL), with a remedy; the exit code is 1
if any failed.

Some checks are only possible on the machine itself: "bootstrapper doctor" makes them there. For a running node, --node starts it by a signed order.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if node != "" {
				if endpoint != "" || policy != "" {
					return usagef("--node can't be combined with --endpoint or --policy: the checks run on the node itself")
				}
				if !cmd.Flags().Changed("timeout") {
					timeout = lifecycle.OrderTimeout
				}
				return a.doctorOf(cmd.Context(), node, timeout)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			if endpoint != "" {
				cfg, err := a.target(endpoint, policy, string(attest.PurposeMachine), "")
				if err != nil {
					return err
				}
				return a.showReport(doctor.ExamineMachine(ctx, cfg))
			}
			path, err := a.folder()
			if err != nil {
				return err
			}
			return a.showReport(doctor.Examine(ctx, doctor.Config{Folder: path}))
		},
	}
	cmd.Flags().StringVar(&endpoint, "endpoint", "", "check this machine, HOST[:PORT], which is not in a cluster yet (default port 9000)")
	cmd.Flags().StringVar(&policy, "policy", "", "with --endpoint: policy to verify with (default: that of the owner's folder)")
	cmd.Flags().StringVar(&node, "node", "", "run the checks on this node's machine, and show its findings (default timeout 25m)")
	if err := cmd.RegisterFlagCompletionFunc("node", a.completeNodes); err != nil {
		panic(err)
	}
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long all checks together may take")
	return cmd
}

func (a *app) showReport(r *checkup.Report) error {
	if a.output == outputJSON {
		if err := a.json(r); err != nil {
			return err
		}
		return failed(r)
	}
	if err := a.table(r.Rows()); err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "\n%d ok, %d warnings, %d failed.\n", r.Count(checkup.OK), r.Count(checkup.Warn), r.Count(checkup.Fail))
	return failed(r)
}

// failed returns an error if a check failed.
func failed(r *checkup.Report) error {
	if err := r.Verdict(); err != nil {
		return &shown{err}
	}
	return nil
}
