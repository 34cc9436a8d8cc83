package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/trust/keys"
)

func (a *app) encryptionConfigCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "encryption-config FILE",
		Short: "Write the API server's encryption configuration of this cluster into a new file",
		Long: `Writes the file ` + etcdencryption.File + ` as the first machine created it at init, from the root
secret in the owner's folder. A restore of etcd from a snapshot needs it on each control plane. It holds a key: only
its owner can read the file.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			dir, err := a.view()
			if err != nil {
				return err
			}
			defer func() { _ = dir.Close() }()
			if dir.Cluster().EncryptionKeyRotated {
				return errors.New("the key of this cluster's Secrets was rotated, so it can't be derived from the owner's folder: use encryption.yaml from a backup of the snapshot's time (muster restore does)")
			}
			s, err := dir.Secrets()
			if err != nil {
				return err
			}
			config := etcdencryption.Config(keys.NewRoot(s.Root, s.Salt).EtcdEncryption())
			if err := ownerdir.NewFile(args[0], config); err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.stdout, "%s is written. Copy it only to %s on control planes, mode 0600.\n", args[0], etcdencryption.File)
			return err
		},
	}
}
