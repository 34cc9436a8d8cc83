package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

// backupFlags has the flags of `muster backup`.
type backupFlags struct {
	from, to string
	latest   bool
	timeout  time.Duration
}

func (a *app) backupCommand() *cobra.Command {
	var f backupFlags
	cmd := &cobra.Command{
		Use:   "backup [--latest] [--from NODE] [--to FOLDER]",
		Short: "Make a backup of the cluster, and fetch it",
		Long: `Orders a control plane, with the owner's signature, to make a backup: a snapshot of etcd, and the certificate authorities and keys of
/etc/kubernetes/pki. The machine encrypts it to the owner's key and signs it with the cluster's certificate authority. It is then fetched
through the API server, decrypted and verified to its end. The machine gets the order with its next attestation, within five minutes.

With --latest, no backup is made: the command fetches the newest one that a control plane has made, periodically (backup.every in
image.yaml) or by an earlier order. This needs no signature. If a backup is refused, the next newest one is fetched, and the command fails
with the reason.

A backup can be read only with owner.key from the owner's folder. Keep copies of both, in different places.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.backup(cmd.Context(), f) },
	}
	cmd.Flags().StringVar(&f.from, "from", "", "the control plane that makes it (default: one that is Ready; with --latest: the one that has the newest)")
	cmd.Flags().StringVar(&f.to, "to", "", "the folder of the file (default: backups in the owner's folder)")
	cmd.Flags().BoolVar(&f.latest, "latest", false, "fetch the newest existing backup")
	cmd.Flags().DurationVar(&f.timeout, "timeout", time.Hour, "time limit of the whole command")
	_ = cmd.RegisterFlagCompletionFunc("from", a.completeNodes)
	cmd.AddCommand(a.backupVerifyCommand())
	return cmd
}

func (a *app) backup(ctx context.Context, f backupFlags) error {
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("not done within %s: %w", f.timeout, context.DeadlineExceeded))
	defer cancel()
	return a.withFolder(func(d *ownerdir.Dir) error {
		report := func(step string) { fmt.Fprintln(a.stderr, step) }
		if f.to == "" {
			f.to = filepath.Join(d.Path(), "backups")
		}
		if f.latest {
			info, err := backups.FetchLatest(ctx, d, f.from, f.to, report)
			if info == nil {
				return err
			}
			return errors.Join(err, a.showBackup(info)) // an older one, if err is not nil
		}
		node, stored, err := backups.MakeBackup(ctx, d, f.from, report)
		if err != nil {
			return err
		}
		report(fmt.Sprintf("%s: reading %s, %.1f MiB", node, stored.Name, float64(stored.Size)/(1<<20)))
		info, err := backups.FetchBackup(ctx, d, node, stored, f.to)
		if err != nil {
			return err
		}
		return a.showBackup(info)
	})
}

func (a *app) showBackup(info *backups.BackupInfo) error {
	if a.output == outputJSON {
		return a.json(info)
	}
	for _, l := range info.Lines() {
		if _, err := fmt.Fprintln(a.stdout, l); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) backupVerifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify FILE",
		Short: "Verify a backup, and show its cluster, time and contents",
		Long: `Decrypts the file with the owner's key and reads it to its end. It is refused if it is damaged, cut off, of another cluster, or not signed
by this cluster's certificate authority. The command connects to no machine. It lists the changes since the backup that the owner's folder records.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.withFolder(func(d *ownerdir.Dir) error {
				info, err := backups.VerifyBackup(d, args[0])
				if err != nil {
					return err
				}
				return a.showBackup(info)
			})
		},
	}
}
