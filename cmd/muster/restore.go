package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/install"
)

func (a *app) restoreCommand() *cobra.Command {
	var (
		cfg     install.RestoreConfig
		accept  uint64
		timeout time.Duration
		abandon bool
	)
	cmd := &cobra.Command{
		Use:   "restore FILE --url URL --endpoint HOST:9000",
		Short: "Restore a cluster that has lost all control planes, on a new machine",
		Long: `Makes a new machine the first control plane of the folder's cluster, with the state of a backup (muster backup). The machine proves what it booted
first. It fetches the encrypted file from the URL, which can be any web server: it checks the SHA-256, and gets the key of this file from the command.

The machine may have been in the cluster before. Its state disk must be empty. Its metadata must have the role control-plane, a name that no node of
the cluster has had, and the initSecretHash of the folder's init-secret. All earlier control planes must be off, and stay off: erase their disks, and
let them join as new. Workers that were not lost keep running.

Changes since the backup are undone. The command shows those that the folder records, and asks; without a terminal, --accept-epoch N accepts it. Run
the same command again to continue where it stopped. If the cluster was not lost: muster restore --abandon.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if abandon {
				return cobra.NoArgs(cmd, args)
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if abandon {
				return a.abandonRestore(cmd.Context())
			}
			if cfg.URL == "" || cfg.Endpoint == "" {
				return usagef("name the machine by --endpoint, and the file's address for the machine by --url")
			}
			var err error
			if cfg.Endpoint, err = hostPort(cfg.Endpoint, 9000); err != nil {
				return usagef("--endpoint: %w", err)
			}
			cfg.File = args[0]
			if cmd.Flags().Changed("accept-epoch") {
				cfg.AcceptEpoch = &accept
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, fmt.Errorf("not done within %s: %w", timeout, context.DeadlineExceeded))
			defer cancel()
			return a.restore(ctx, cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.URL, "url", "", "where the machine gets the same file: http or https")
	f.StringVar(&cfg.Endpoint, "endpoint", "", "HOST:PORT of the new machine's bootstrapper (default port 9000)")
	f.Uint64Var(&accept, "accept-epoch", 0, "accept the backup's state, of this epoch of the cluster")
	f.BoolVar(&cfg.StartOver, "start-over", false, "restart the restore with another backup or another machine; power the earlier machine off, and erase its state disk")
	f.DurationVar(&timeout, "timeout", time.Hour, "time limit of the whole command")
	f.BoolVar(&abandon, "abandon", false, "cancel a restore that has no result: the folder returns to its state before, and records the cluster's state again")
	for _, name := range []string{"url", "endpoint"} {
		cmd.MarkFlagsMutuallyExclusive(name, "abandon")
	}
	return cmd
}

func (a *app) abandonRestore(ctx context.Context) error {
	dir, err := a.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	asked, err := install.Abandon(ctx, dir)
	if err != nil {
		return err
	}
	done := "the restore is canceled, and the folder is in its state before. muster status records the cluster's state again."
	for _, m := range asked {
		done += fmt.Sprintf(" Machine %s (%s) may have received the cluster's keys: power it off, and erase its state disk.", m.ID, m.NodeName)
	}
	return a.result(dir.Cluster().Name, done)
}

func (a *app) restore(ctx context.Context, cfg install.RestoreConfig) (err error) {
	if cfg.Dir, err = a.open(); err != nil {
		return err
	}
	defer func() { _ = cfg.Dir.Close() }()
	cfg.Log, cfg.Ask = slog.New(slog.DiscardHandler), a.askRestore()
	cfg.Report = a.report(install.RestoreSteps)
	err = install.Restore(ctx, cfg)
	cfg.Report.Close()
	if err != nil {
		return err
	}
	_ = a.remember(ctx, cfg.Dir) // a failure is printed
	return a.result(cfg.Dir.Cluster().FirstMachine.NodeName, "the cluster is restored. Let new control planes join, and repeat the undone changes (docs/backup.md#restore).")
}

// askRestore asks at the terminal; nil if there is none.
func (a *app) askRestore() func(backups.BackupInfo) (bool, error) {
	ask := a.askEpoch()
	if ask == nil {
		return nil
	}
	return func(i backups.BackupInfo) (bool, error) { return ask(i.Lines(), i.Epoch) }
}
