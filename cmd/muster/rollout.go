package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/rollout"
)

func (a *app) rolloutCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "rollout", Short: "Roll out another image: show which node runs which, and restart nodes in turn"}
	cmd.AddCommand(a.rolloutStatusCommand(), a.rolloutRebootCommand())
	return cmd
}

func (a *app) rolloutStatusCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show which image and firmware class each node runs",
		Long: `Names the images and machine classes of the policy in force by the PCRs of each node's last evidence. An image that no node runs can be
removed from the policy (muster policy apply).`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.rollout(cmd.Context(), timeout)
			if err != nil {
				return err
			}
			if a.output == outputJSON {
				return a.json(r)
			}
			w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NODE\tROLE\tIMAGE\tCLASS\tBOOTED\tVERDICT\tNOTE")
			for _, n := range r.Nodes {
				verdict := "accepted"
				if !n.Accepted {
					verdict = "refused"
				}
				booted := "unknown"
				if !n.Since.IsZero() {
					booted = n.Since.Local().Format(time.DateTime)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", n.Node, n.Role, cmp.Or(n.Image, "none of the policy"), cmp.Or(n.Class, "none by its values"), booted, verdict, note(n))
			}
			if err := w.Flush(); err != nil {
				return err
			}
			for _, name := range slices.Sorted(maps.Keys(r.Images)) {
				if _, err := fmt.Fprintf(a.stdout, "%s: %s\n", cmp.Or(name, "no image of the policy"), problem.Count(r.Images[name], "node")); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait for the API server")
	return cmd
}

// note returns remarks about a node.
func note(n rollout.NodeImage) string {
	var out []string
	if n.Silent != "" {
		out = append(out, n.Silent)
	}
	if n.Held {
		out = append(out, "unschedulable since a command drained it")
	}
	return strings.Join(out, "; ")
}

func (a *app) rollout(ctx context.Context, timeout time.Duration) (r *rollout.Rollout, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = a.withFolder(func(d *ownerdir.Dir) (err error) {
		r, err = rollout.RolloutStatus(ctx, d)
		return err
	})
	return r, err
}

// rolledOut returns an error if one of the nodes, which restarted after began, runs the image again.
func (a *app) rolledOut(ctx context.Context, from string, nodes []string, began time.Time) error {
	r, err := a.rollout(ctx, time.Minute)
	if err != nil {
		return err
	}
	var again []string
	for _, n := range r.Nodes {
		if n.Image == from && slices.Contains(nodes, n.Node) && n.Attested.After(began) {
			again = append(again, n.Node)
		}
	}
	if len(again) > 0 {
		return fmt.Errorf("%q have booted %s again: write the new image to their disks, then run the same command again", again, from)
	}
	return nil
}

func (a *app) rolloutRebootCommand() *cobra.Command {
	var (
		pods      draining
		from      string
		yes       bool
		unchecked bool
	)
	cmd := &cobra.Command{
		Use:   "reboot NODE… | --from IMAGE",
		Short: "Restart nodes one after another, with their pods evicted before",
		Long: `For each node in turn: its pods are evicted within their PodDisruptionBudgets, its machine restarts by an order that is signed with the
owner's key, and its Node, all control planes and Muster's services must be Ready before the next node starts. The command stops at the
first node that fails, and starts none while a control plane is unhealthy.

With --from, the nodes are those whose last evidence is of that image of the policy; nodes whose machines get no orders, because they are
off, refused or banned, are named and left out. A repeated command continues, and makes nodes schedulable again that an interrupted run
has left drained. With NODE…, a repeated command restarts each of these nodes again: name only the remaining ones.`,
		ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if (from == "") == (len(args) == 0) {
				return usagef("which nodes? muster rollout reboot NODE…, or --from IMAGE")
			}
			r, began := rollout.Restarts{
				Nodes: args, Drain: pods.options, DrainFor: pods.timeout, Unchecked: unchecked, Report: func(node, step string) { a.steps(node)(step) },
			}, time.Now()
			if from != "" {
				r.Again = "muster rollout reboot --from " + from
				if err := a.outdated(cmd.Context(), from, &r); err != nil {
					return err
				}
			}
			if len(r.Nodes)+len(r.Held) == 0 {
				return a.result(from, "no node that accepts orders runs it.")
			}
			if len(r.Held) > 0 { // an administrator may have cordoned one again meanwhile
				fmt.Fprintf(a.stderr, "These nodes were drained by an interrupted command and have restarted. They are unschedulable, and are made schedulable again now: %q.\n", r.Held)
			}
			if !yes {
				if len(r.Nodes) > 0 {
					fmt.Fprintf(a.stderr, "These machines restart one after another: %q.\n", r.Nodes)
				}
				if err := a.confirm(cmd.Context(), cmd.InOrStdin(), slices.Concat(r.Nodes, r.Held)[0]); err != nil {
					return err
				}
			}
			if err := a.withFolder(func(d *ownerdir.Dir) error { return rollout.RebootInTurn(cmd.Context(), d, r) }); err != nil {
				return err
			}
			var failed error
			for _, n := range r.Held {
				failed = errors.Join(failed, a.result(n, "had restarted, and is schedulable again."))
			}
			for _, n := range r.Nodes {
				failed = errors.Join(failed, a.result(n, "restarted, and Ready."))
			}
			if from != "" && failed == nil {
				failed = a.rolledOut(cmd.Context(), from, r.Nodes, began)
			}
			return failed
		},
	}
	pods.flags(cmd, true)
	uncheckedFlag(cmd, &unchecked, "; also workers, and without waiting for control planes and services afterwards")
	cmd.Flags().Lookup("drain").Hidden = true // it always drains
	cmd.Flags().StringVar(&from, "from", "", "name of an image of the policy: the nodes that run it")
	cmd.Flags().BoolVar(&yes, "yes", false, "don't ask")
	return cmd
}

// outdated determines which nodes run an image, and names those that are left out.
func (a *app) outdated(ctx context.Context, from string, to *rollout.Restarts) error {
	r, err := a.rollout(ctx, time.Minute)
	if err != nil {
		return err
	}
	if _, known := r.Images[from]; !known {
		return usagef("the policy in force has no image %q; it has %q", from, slices.Sorted(maps.Keys(r.Images)))
	}
	if err := r.Err(); err != nil {
		return err
	}
	restart, skipped, held := r.Outdated(from)
	for _, n := range skipped {
		fmt.Fprintf(a.stderr, "%s: left out: %s. It would be refused if the policy no longer had %s.\n", n.Node, n.Silent, from)
	}
	for _, n := range restart {
		to.Nodes = append(to.Nodes, n.Node)
	}
	for _, n := range held {
		to.Held = append(to.Held, n.Node)
	}
	return nil
}
