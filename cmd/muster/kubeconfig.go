package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/internal/owner"
	"github.com/muster-k8s/muster/internal/owner/ownerdir"
)

func (a *app) kubeconfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "kubeconfig", Short: "The administrator's kubeconfig in the owner's folder", Args: cobra.NoArgs}
	cmd.AddCommand(a.kubeconfigRenewCommand())
	return cmd
}

func (a *app) kubeconfigRenewCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "renew", Short: "Give the administrator's kubeconfig a new key and certificate, while it is valid",
		Long: `The administrator's certificate lives a year. This makes a new key here, has a control plane's machine sign a new
certificate for the same identity, and replaces admin.conf in the owner's folder once the API server has accepted it.
The old certificate stays valid until it ends.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := a.folder()
			if err != nil {
				return err
			}
			dir, err := ownerdir.Open(path)
			if err != nil {
				return err
			}
			defer func() { _ = dir.Close() }()
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			end, err := owner.RenewKubeconfig(ctx, dir, time.Now())
			if err != nil {
				return err
			}
			if a.output == outputJSON {
				return a.json(map[string]any{"file": dir.File(ownerdir.AdminConf), "expires": end})
			}
			_, err = fmt.Fprintf(a.stdout, "%s is renewed, and ends on %s. Keep a copy with the rest of the folder.\n", dir.File(ownerdir.AdminConf), end.UTC().Format(time.DateOnly))
			return err
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait for the cluster")
	return cmd
}
