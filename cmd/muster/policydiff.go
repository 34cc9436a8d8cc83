package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
)

// errExpels is the result of a preview that finds a running node refused.
var errExpels = errors.New("the policy would refuse running nodes, or they did not attest in time")

func (a *app) diffCommand() *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "diff [FILE]",
		Short: "Show how a policy differs from the one in force, and which running nodes it would refuse",
		Long: `Compares the policy of the owner's folder, or of FILE, with the one in force. Then the joinservices also appraise each running node by it at the
node's next attestation, within five minutes: images, machine classes with their rules over the event log, EK certificates, firmware versions of TPMs,
revocations. Nothing comes into force. The exit code is 1 if a running node would be refused, or has not attested within --wait. Nodes that the policy
in force refuses also count. As with muster policy apply, rules that FILE does not mention are kept from the folder's policy.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withFolder(func(dir *ownerdir.Dir) error {
				text, err := dir.Read(ownerdir.PolicyFile)
				if len(args) == 1 {
					text, err = a.nextPolicy(dir, args[0])
				}
				if err != nil {
					return err
				}
				return a.policyDiff(cmd.Context(), dir, text, wait)
			})
		},
	}
	cmd.Flags().DurationVar(&wait, "wait", 6*time.Minute, "how long to wait for the nodes; 0 to show only the difference")
	return cmd
}

func (a *app) policyDiff(ctx context.Context, dir *ownerdir.Dir, text []byte, wait time.Duration) error {
	look, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	d, err := policies.DiffPolicy(look, dir, text)
	if err != nil {
		return err
	}
	if a.output != outputJSON {
		fmt.Fprint(a.stdout, d)
	}
	var nodes []policies.Preview
	if wait > 0 {
		fmt.Fprintf(a.stderr, "Running nodes are appraised at their next attestation, within five minutes.\n")
		if nodes, err = policies.PreviewPolicy(ctx, dir, text, wait, func(p policies.Preview) { fmt.Fprintf(a.stderr, "%s: %s\n", p.Node, p) }); err != nil {
			return err
		}
	}
	bad := false
	for _, n := range nodes {
		bad = bad || !n.Accepted
	}
	if a.output == outputJSON {
		err = a.json(map[string]any{"diff": d, "nodes": append([]policies.Preview{}, nodes...)})
	} else {
		w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
		for _, n := range nodes {
			fmt.Fprintf(w, "%s\t%s\n", n.Node, n)
		}
		err = w.Flush()
	}
	if err == nil && bad {
		err = &shown{errExpels}
	}
	return err
}
