package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/rotation"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// rotationPoll is the pause between two reads of the cluster's state.
const rotationPoll = 2 * time.Second

func (a *app) rotateCommand() *cobra.Command {
	var (
		dryRun, yes bool
		cfg         = rotation.RotationConfig{Poll: rotationPoll}
		names       []string
	)
	for _, k := range clusterinfo.RotatedKeys() {
		names = append(names, string(k))
	}
	cmd := &cobra.Command{
		Use:   "rotate " + strings.Join(names, "|") + " [--dry-run] [--finish] [--without NODE]",
		Short: "Replace a key that the control planes share",
		Long: `Replaces the key of service accounts' tokens, the key that encrypts Secrets in etcd, or the authority of the front proxy, of etcd or of the cluster.
One control plane after another gets an order that is signed with the owner's key: first all get a new key and accept it in addition to the old one,
then all use it. Each must be healthy before the next one starts. The old key stays accepted until you run the command again with --finish, which
shows what stops working then.

The command stops at the first control plane that fails or is unhealthy. To continue, run the same command again. Until then, no control plane can join.

After the rotation of the cluster's authority, all nodes get the new one when they attest. --finish is refused while a node is off, does not
trust it, or has a kubelet's certificate of the old one. --without finishes without a worker, which then gets the new authority at its first or second start.

To replace the owner's key, which is in the machines' images: muster rotate owner-key.`,
		Args:      cobra.ExactArgs(1),
		ValidArgs: names,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cfg.Key = clusterinfo.RotatedKey(args[0]); !slices.Contains(names, args[0]) {
				return usagef("%q: want one of %s", args[0], strings.Join(names, ", "))
			}
			if cfg.Early && !cfg.Finish {
				return usagef("--early is for --finish")
			}
			if len(cfg.Without) > 0 && (!cfg.Finish || cfg.Key != clusterinfo.ClusterCA) {
				return usagef("--without is for cluster-ca --finish")
			}
			open := a.open
			if dryRun {
				open = a.view
			}
			dir, err := open()
			if err != nil {
				return err
			}
			cfg.Dir = dir
			cfg.Report = func(node, step string) { a.steps(node)(step) }
			cfg.Adopt = func(ctx context.Context, ca *x509.Certificate, only bool) error {
				report := a.report(access.RenewSteps)
				defer report.Close()
				return rotation.AdoptAuthority(ctx, dir, ca, only, report)
			}
			return errors.Join(a.rotate(cmd, cfg, dryRun, yes), dir.Close())
		},
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "show what would be done, and change nothing")
	cmd.Flags().BoolVar(&yes, "yes", false, "don't ask")
	cmd.Flags().BoolVar(&cfg.Finish, "finish", false, "drop the old key")
	cmd.Flags().StringSliceVar(&cfg.Without, "without", nil, "finish without this worker, which gets the new authority at its first or second start; for cluster-ca --finish")
	cmd.Flags().BoolVar(&cfg.Early, "early", false, "finish although tokens of pods may be signed with the old key, for instance because it was stolen")
	cmd.Flags().DurationVar(&cfg.Wait, "wait", rotation.RotationTimeout, "how long to wait for each control plane")
	cmd.AddCommand(a.rotateOwnerKeyCommand())
	return cmd
}

func (a *app) rotate(cmd *cobra.Command, cfg rotation.RotationConfig, dryRun, yes bool) error {
	plan, err := rotation.PlanRotation(cmd.Context(), cfg)
	if err != nil {
		return err
	}
	switch {
	case dryRun && a.output == outputJSON:
		err = a.json(plan)
	case dryRun:
		showRotationPlan(a.stdout, plan)
	case !yes:
		showRotationPlan(a.stderr, plan)
	}
	if err != nil {
		return err
	}
	if err := plan.Err(); err != nil {
		return err
	}
	if dryRun {
		return nil
	}
	if !yes {
		if err := a.confirm(cmd.Context(), cmd.InOrStdin(), string(plan.Key)); err != nil {
			return err
		}
	}
	if plan, err = rotation.Rotate(cmd.Context(), cfg); err != nil {
		return err
	}
	if plan.Phase == "" {
		return a.result("cluster", "the control planes accept only the new "+string(plan.Key)+".")
	}
	return a.result("cluster", fmt.Sprintf("the control planes use the new %s, and accept the old one until muster rotate %s --finish.", plan.Key, plan.Key))
}

func showRotationPlan(w io.Writer, p *rotation.RotationPlan) {
	phase := string(p.Phase)
	if phase == "" {
		phase = "not begun"
	}
	fmt.Fprintf(w, "Rotation of the %s: %s\n", p.Key, phase)
	for _, n := range p.Nodes {
		has := "none"
		if len(n.Has) > 0 {
			has = fmt.Sprint(n.Has)
		}
		fmt.Fprintf(w, "  %-30s  accepts %d, uses %-16.16s  phases done: %s\n", n.Name, n.Accepts, dash(n.Uses), has)
	}
	for _, n := range p.Notes {
		fmt.Fprintf(w, "Note: %s\n", n)
	}
}
