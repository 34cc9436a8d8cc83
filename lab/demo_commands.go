package main

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/lab/demo"
	"github.com/muster-k8s/muster/lab/internal/intruder"
)

func demoCommand(open opener) *cobra.Command {
	var o demo.Options
	cmd := &cobra.Command{
		Use: "demo", Short: "Show a cluster of attested machines, and who is refused", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := open()
			if err != nil {
				return err
			}
			o.Lab, o.Out = l, cmd.OutOrStdout()
			_, err = demo.Run(cmd.Context(), o)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Bin, "bin", "bin", "folder with muster and bootstrapper")
	f.StringVar(&o.Images, "images", "dist/images", "folder that make images has written")
	f.BoolVar(&o.Keep, "keep", false, "leave the cluster up")
	return cmd
}

// intruderCommand is the command that the demonstration runs on an attacker's machine.
func intruderCommand() *cobra.Command {
	var c intruder.Config
	cmd := &cobra.Command{
		Use: "intruder", Short: "Try to become a node without evidence", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			attempts, err := intruder.Run(cmd.Context(), c)
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(attempts)
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Server, "server", "", "API server, HOST:PORT")
	f.StringVar(&c.Joinservice, "joinservice", "", "joinservice, HOST:PORT")
	f.StringVar(&c.CA, "ca", "", "the cluster's CA (PEM)")
	f.StringVar(&c.Certificate, "certificate", "", "a node's certificate without its key (PEM)")
	f.StringVar(&c.Serving, "serving", "", "its serving certificate without its key (PEM)")
	f.StringVar(&c.Ticket, "ticket", "", "its ticket's ID, hexadecimal")
	f.StringVar(&c.EKRoots, "ek-roots", "", "roots that certify TPMs (PEM)")
	f.StringVar(&c.Victim, "victim", "", "whose ticket it is")
	f.StringVar(&c.Token, "token", "", "a bootstrap token to try with")
	return cmd
}
