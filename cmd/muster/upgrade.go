package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/install"
)

type upgradeFlags struct {
	images            imageFlags
	dryRun, downgrade bool
	patience, timeout time.Duration
	leaveOut          []string
}

func (a *app) upgradeCommand() *cobra.Command {
	var f upgradeFlags
	cmd := &cobra.Command{
		Use:   "upgrade [--images FILE | --joinservice-image IMAGE --kms-image IMAGE] [--dry-run]",
		Short: "Upgrade Muster's services in the cluster to this version",
		Long: `Upgrades definitions, chart and services to the version of this program, and the services to other images. First
it backs up the present objects into the owner's folder. If the new services don't become ready, or their
evidence is not accepted, the release is rolled back automatically. After an interruption, run the same command
again to continue.

Other values are kept.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.upgrade(cmd.Context(), f) },
	}
	flags := cmd.Flags()
	leaveOut(flags, &f.leaveOut)
	f.images.add(flags)
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would change, and change nothing")
	flags.BoolVar(&f.downgrade, "allow-downgrade", false, "downgrade to the older chart of this program; definitions are kept")
	flags.DurationVar(&f.patience, "wait", 5*time.Minute, "how long the services may take to become ready before the release is rolled back, and again for the rollback")
	flags.DurationVar(&f.timeout, "timeout", 15*time.Minute, "time limit of the whole command, without a rollback")
	cmd.AddCommand(a.upgradeKubernetesCommand())
	return cmd
}

func (a *app) upgrade(ctx context.Context, f upgradeFlags) error {
	values, err := f.images.values()
	if err != nil {
		return err
	}
	open := a.open
	if f.dryRun {
		open = a.view
	}
	dir, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("not done within %s: %w", f.timeout, context.DeadlineExceeded))
	defer cancel()
	report := a.report(install.UpgradeSteps)
	defer report.Close()
	cfg := install.UpgradeConfig{
		Dir: dir, Values: values, AllowDowngrade: f.downgrade, LeaveOut: f.leaveOut, Patience: f.patience, Report: report, Log: slog.New(slog.DiscardHandler),
	}
	if f.dryRun {
		plan, err := install.PlanUpgrade(ctx, cfg)
		if err != nil {
			return err
		}
		return a.showPlan(plan)
	}
	done, err := install.Upgrade(ctx, cfg)
	report.Close()
	if err != nil {
		return err
	}
	_ = a.remember(ctx, dir) // a failure is printed
	if a.output == outputJSON {
		return a.json(done)
	}
	if done.Backup == "" {
		_, err = fmt.Fprintf(a.stdout, "Nothing to change: revision %d runs.\n", done.Revision)
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "Revision %d runs. The previous objects are in %s.\n", done.Revision, done.Backup)
	return err
}

// showPlan prints what an upgrade would change.
func (a *app) showPlan(p *clusterapi.Plan) error {
	if a.output == outputJSON {
		return a.json(p)
	}
	if p.Empty() {
		_, err := fmt.Fprintf(a.stdout, "Nothing would change: revision %d is deployed.\n", p.Revision)
		return err
	}
	fmt.Fprintf(a.stdout, "Release   revision %d, %s\nChart     %s -> %s\nVersion   %s -> %s\n", p.Revision, p.Status, p.Chart.From, p.Chart.To, p.App.From, p.App.To)
	for _, v := range p.Values {
		fmt.Fprintf(a.stdout, "Value     %s: %s -> %s\n", v.Name, dash(v.From), dash(v.To))
	}
	for _, d := range p.Definitions {
		fmt.Fprintf(a.stdout, "\n%s\n%s", d.Object, indented(d.Diff))
	}
	for _, o := range p.Objects {
		fmt.Fprintf(a.stdout, "\n%s\n%s", o.Object, indented(o.Diff))
	}
	_, err := fmt.Fprintln(a.stdout, "\nNothing was changed.")
	return err
}

func indented(text string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		out.WriteString("  " + line)
	}
	return out.String()
}
