package main

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

func (a *app) keyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Create an owner's key before there is a cluster",
		Long: `If an image has the owner's public key (ownerKeys in its configuration), its machines verify joinservice by
the owner's signed policy. The key must then exist before the image is built.`,
	}
	cmd.AddCommand(&cobra.Command{
		Use: "new FILE", Short: "Create a key in a new file, and print the public key for the image", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			public, err := ownerdir.NewKeyFile(args[0])
			if err != nil {
				return err
			}
			return a.printKey(public)
		},
	}, &cobra.Command{
		Use: "public FILE", Short: "Print the public key of a key file", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			key, err := ownerdir.ReadKey(args[0])
			if err != nil {
				return err
			}
			public, ok := key.Public().(ed25519.PublicKey)
			if !ok {
				return fmt.Errorf("%s: not an Ed25519 key", args[0])
			}
			return a.printKey(public)
		},
	})
	return cmd
}

func (a *app) printKey(public ed25519.PublicKey) error {
	_, err := fmt.Fprintln(a.stdout, base64.StdEncoding.EncodeToString(public))
	return err
}

func (a *app) initSecretCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "init-secret FILE",
		Short: "Create an init secret in a new file, and print its hash for the machine's metadata",
		Long: `A holder of the init secret may initialize a cluster on the machine. The machine's metadata has only
its SHA-256 (initSecretHash), so readers of the metadata can't initialize one.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			secret, err := ownerdir.NewInitSecretFile(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.stdout, "%x\n", sha256.Sum256(secret[:]))
			return err
		},
	}
}
