package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/uninstall"
)

type uninstallFlags struct {
	dryRun, yes, letBackIn bool
	unencrypted            []string
	timeout                time.Duration
}

func (a *app) uninstallCommand() *cobra.Command {
	var f uninstallFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove Muster from a cluster, which continues as a plain kubeadm cluster",
		Long: `Restores kubeadm's permissions and configuration, and removes Muster's admission policies, services, definitions and
namespace, in this order. Pods keep running. The owner's folder stays, with a backup of Muster's objects.

From then on no machine is attested: a bootstrap token is sufficient to join, and kubelets renew their certificates without attestation.

It refuses, and changes nothing, while a state disk is encrypted (nothing could open it), while a banned machine or a revoked certificate could
write again, while another command is in progress, and until each control plane's kube-controller-manager approves node certificates. You
change that, and remove Muster's units, on the machines (docs/runbooks.md#uninstall). Nodes with Muster's own image have no login: replace
them.

The command first shows what it will do. After an interruption, run the same command again to continue.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.uninstall(cmd, f) },
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.dryRun, "dry-run", false, "show the steps, and the problems that prevent them; change nothing")
	flags.BoolVar(&f.yes, "yes", false, "don't ask")
	flags.BoolVar(&f.letBackIn, "let-back-in", false, "accept that banned machines and revoked certificates can write again")
	flags.StringSliceVar(&f.unencrypted, "unencrypted", nil, "nodes with unencrypted state disks, if that is not recorded, for instance of the cluster's first machine")
	flags.DurationVar(&f.timeout, "timeout", 10*time.Minute, "time limit of the whole command")
	_ = cmd.RegisterFlagCompletionFunc("unencrypted", a.completeNodes) // the flag exists
	return cmd
}

func (a *app) uninstall(cmd *cobra.Command, f uninstallFlags) error {
	open := a.open
	if f.dryRun {
		open = a.view
	}
	dir, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	cfg := uninstall.UninstallConfig{Dir: dir, Unencrypted: f.unencrypted, LetBackIn: f.letBackIn, Log: slog.New(slog.DiscardHandler)}
	look, cancel := a.limited(cmd.Context(), f.timeout)
	defer cancel()
	p, err := uninstall.PlanUninstall(look, cfg)
	if err != nil {
		return err
	}
	if f.dryRun && a.output == outputJSON {
		if err := a.json(p); err != nil {
			return err
		}
		if err := p.Err(); err != nil {
			return &shown{err}
		}
		return nil
	}
	a.showUninstall(p)
	if err := p.Err(); err != nil {
		return err
	}
	switch {
	case len(p.Steps) == 0:
		silent, err := p.Listen(look, dir, uninstall.Silence)
		if err != nil {
			return err
		}
		if err := a.uninstalled(p, "Nothing of Muster is left in the cluster."); err != nil || len(silent) == 0 {
			return err
		}
		fmt.Fprintf(a.stderr, "Note: the kubelets of these nodes do not renew their Leases, although their Nodes are Ready: %s. To see why, run the block uninstall-machine of %s there again.\n", strings.Join(silent, ", "), uninstall.UninstallRunbook)
		return nil
	case f.dryRun:
		_, err := fmt.Fprintln(a.stdout, "Nothing was changed.")
		return err
	case !f.yes:
		if err := a.confirm(cmd.Context(), cmd.InOrStdin(), dir.Cluster().Name); err != nil {
			return err
		}
	}
	ctx, cancel := a.limited(cmd.Context(), f.timeout) // the time for the confirmation does not count
	defer cancel()
	cfg.Report = a.report(len(p.Steps))
	defer cfg.Report.Close()
	if p, err = uninstall.Uninstall(ctx, cfg); err != nil {
		return err
	}
	cfg.Report.Close()
	return a.uninstalled(p, "Muster is removed from the cluster. "+dir.Path()+" stays: it has the cluster's secrets, and a backup of Muster's objects.")
}

func (a *app) limited(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("not done within %s: %w", d, context.DeadlineExceeded))
}

// showUninstall shows the planned steps.
func (a *app) showUninstall(p *uninstall.UninstallPlan) {
	for i, s := range p.Steps {
		fmt.Fprintf(a.stderr, "%d. %s: %s\n", i+1, s.Name, s.Detail)
	}
	for _, n := range p.Notes {
		fmt.Fprintf(a.stderr, "Note: %s.\n", n)
	}
}

// uninstalled prints the result, and the remaining steps on the machines.
func (a *app) uninstalled(p *uninstall.UninstallPlan, text string) error {
	if a.output == outputJSON {
		return a.json(p)
	}
	fmt.Fprintln(a.stdout, text)
	fmt.Fprintf(a.stdout, "If a machine still has Muster's units, run the block uninstall-machine of %s there. Don't restart the machine before that:\n", uninstall.UninstallRunbook)
	rows := [][]string{{"NODE", "ROLE", "READY"}}
	for _, m := range p.Machines {
		rows = append(rows, []string{m.Node, string(m.Role), yes(m.Ready)})
	}
	return a.table(rows)
}
