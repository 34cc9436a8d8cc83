package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/rollout"
	"github.com/muster-k8s/muster/internal/versions"
)

func (a *app) upgradeKubernetesCommand() *cobra.Command {
	var (
		pods        draining
		components  string
		dryRun, yes bool
		cfg         = rollout.KubernetesConfig{Stable: rollout.StableFor}
	)
	cmd := &cobra.Command{
		Use:   "kubernetes VERSION --components LIST [--dry-run]",
		Short: "Upgrade Kubernetes on all nodes, one after another",
		Long: `Upgrades the control planes one after another, then the workers: each is drained, its machine upgrades itself by an order that is signed
with the owner's key, and it must be Ready with the new version before the next one. VERSION is a newer patch of the same minor version,
or the next minor version. LIST must be complete: nodes remove what is not listed.

The command stops at the first node that fails or is unhealthy. To continue, run the same command again, also without --components: the
owner's folder keeps the list until the upgrade is complete. A downgrade is not possible.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := versions.Resolve(args[0]); err != nil {
				return usagef("%w", err)
			}
			if cfg.MaxUnavailable < 1 {
				return usagef("--max-unavailable %d: want at least 1", cfg.MaxUnavailable)
			}
			if components != "" {
				list, err := readList(components)
				if err != nil {
					return err
				}
				cfg.List = &list
			}
			open := a.open
			if dryRun {
				open = a.view
			}
			dir, err := open()
			if err != nil {
				return err
			}
			cfg.Dir, cfg.Version, cfg.Drain, cfg.DrainFor = dir, args[0], pods.options, pods.timeout
			cfg.Report = func(node, step string) { a.steps(node)(step) }
			return errors.Join(a.upgradeKubernetes(cmd, cfg, dryRun, yes), dir.Close())
		},
	}
	pods.flags(cmd, true)
	cmd.Flags().Lookup("drain").Hidden = true // it always drains
	cmd.Flags().StringVar(&components, "components", "", "the new version's list of components and images, as muster components pin writes it (default: that of the upgrade in progress)")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "show what would be done, and change nothing")
	cmd.Flags().BoolVar(&yes, "yes", false, "don't ask")
	cmd.Flags().IntVar(&cfg.MaxUnavailable, "max-unavailable", 1, "how many workers are upgraded at the same time")
	cmd.Flags().DurationVar(&cfg.Wait, "wait", rollout.UpgradeTimeout, "how long to wait for each machine, and then until it is Ready")
	return cmd
}

func (a *app) upgradeKubernetes(cmd *cobra.Command, cfg rollout.KubernetesConfig, dryRun, yes bool) error {
	plan, err := rollout.PlanKubernetes(cmd.Context(), cfg)
	if err != nil {
		return err
	}
	switch {
	case dryRun && a.output == outputJSON:
		err = a.json(plan)
	case dryRun:
		showKubernetesPlan(a.stdout, plan)
	case !yes:
		showKubernetesPlan(a.stderr, plan)
	}
	if err != nil {
		return err
	}
	if plan.Stage != rollout.KubernetesDone {
		if err := plan.Err(); err != nil {
			return err
		}
		if !dryRun && !yes {
			if err := a.confirm(cmd.Context(), cmd.InOrStdin(), plan.To); err != nil {
				return err
			}
		}
	}
	if dryRun {
		return nil
	}
	if plan, err = rollout.UpgradeKubernetes(cmd.Context(), cfg); err != nil {
		return err
	}
	_ = a.remember(cmd.Context(), cfg.Dir) // a failure is printed
	return a.result("cluster", "all nodes that accept orders run Kubernetes "+plan.To+".")
}

func showKubernetesPlan(w io.Writer, p *rollout.KubernetesPlan) {
	fmt.Fprintf(w, "Kubernetes %s -> %s: %s\n", p.From, p.To, p.Stage)
	for _, n := range p.Nodes {
		fmt.Fprintf(w, "  %-30s  %-13s  %-10s  %s\n", n.Name, n.Role, dash(n.Kubelet), n.Will)
	}
	for _, n := range p.Notes {
		fmt.Fprintf(w, "Note: %s\n", n)
	}
}
