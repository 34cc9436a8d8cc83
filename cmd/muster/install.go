package main

import "github.com/spf13/cobra"

func (a *app) installCommand() *cobra.Command {
	f := initFlags{}
	f.cluster.Adopted = true
	cmd := &cobra.Command{
		Use:   "install --name NAME --endpoint HOST:9000 --init-secret-file FILE --policy FILE …",
		Short: "Put Muster into a cluster that kubeadm made",
		Long: `Puts Muster into a cluster that was made without it. Its only control plane, which runs the bootstrapper, proves what it
booted, as at init; then it takes the node lock and gives its administrator's kubeconfig. kubeadm does not run. From then on
machines join by attestation only, with tickets that have a short-lived bootstrap token, and Nodes that are there go on.

Whoever had the cluster before has it still: only that one machine of it was appraised. docs/install.md says what to
take from them. Running the same command again goes on where it stopped.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.init(cmd.Context(), f) },
	}
	f.add(cmd)
	return cmd
}
