package main

import "github.com/spf13/cobra"

func (a *app) installCommand() *cobra.Command {
	f := initFlags{}
	f.cluster.Adopted = true
	cmd := &cobra.Command{
		Use:   "install --name NAME --endpoint HOST:9000 --init-secret-file FILE --policy FILE …",
		Short: "Install Muster in a cluster that kubeadm created",
		Long: `Installs Muster in a cluster that was created without it. Its only control plane, which runs the bootstrapper, proves what
it booted, as at init. Then it takes the node lock and sends its administrator's kubeconfig. kubeadm does not run. From then
on machines join only by attestation, with tickets that have a short-lived bootstrap token. Existing Nodes keep their
access.

Earlier administrators and machines keep their access, because only that one machine was appraised. docs/install.md
lists what to revoke. Run the same command again to continue where it stopped.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.init(cmd.Context(), f) },
	}
	f.add(cmd)
	return cmd
}
