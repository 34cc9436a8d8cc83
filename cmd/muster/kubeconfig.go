package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

func (a *app) kubeconfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "kubeconfig", Short: "The administrator's kubeconfig in the owner's folder", Args: cobra.NoArgs}
	cmd.AddCommand(a.kubeconfigRenewCommand())
	return cmd
}

func (a *app) kubeconfigRenewCommand() *cobra.Command {
	var (
		joinservice string
		timeout     time.Duration
	)
	cmd := &cobra.Command{
		Use: "renew [--joinservice HOST:PORT]", Short: "Renew the key and the certificate of the administrator's kubeconfig, also after its expiry",
		Long: `The administrator's certificate is valid for a year. This command makes a new key on this computer, lets a control
plane's machine sign a new certificate for the same identity, and replaces admin.conf in the owner's folder after the
API server has accepted it. The old certificate stays valid until it expires.

While the old one is valid, it authenticates the request. After its expiry, or with --joinservice, the owner's key signs an order to a
joinservice instead. Before that, the joinservice's machine proves what it booted, and that the policy lists it as a control plane.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg := access.RenewConfig{Now: time.Now}
			if joinservice != "" {
				addr, err := hostPort(joinservice, clusterapi.Values{}.JoinPort())
				if err != nil {
					return usagef("--joinservice: %w", err)
				}
				cfg.Joinservices = []string{addr}
			}
			var err error
			if cfg.Dir, err = a.open(); err != nil {
				return err
			}
			defer func() { _ = cfg.Dir.Close() }()
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, fmt.Errorf("not done within %s: %w", timeout, context.DeadlineExceeded))
			defer cancel()
			cfg.Report = a.report(access.RenewSteps)
			end, err := access.RenewKubeconfig(ctx, cfg)
			cfg.Report.Close()
			if err != nil {
				return err
			}
			file := cfg.Dir.File(ownerdir.AdminConf)
			if a.output == outputJSON {
				return json.NewEncoder(a.stdout).Encode(map[string]any{"event": "result", "file": file, "expires": end})
			}
			_, err = fmt.Fprintf(a.stdout, "%s is renewed, and expires on %s. Keep a copy with the rest of the folder.\n", file, end.UTC().Format(time.DateOnly))
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&joinservice, "joinservice", "", "send the owner's order to the joinservice there, also while the kubeconfig is valid (default after its expiry: port 30090 of the first machine, of the address given to muster init --endpoint, and of the API server's host)")
	f.DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait for the cluster")
	return cmd
}
