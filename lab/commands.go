package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/lab/driver"
)

func commands() *cobra.Command {
	var dir string
	root := &cobra.Command{
		Use:           "lab",
		Short:         "Machines with TPMs on one Linux machine, for real Kubernetes clusters",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&dir, "dir", driver.DefaultDir, "the lab's folder; labs in different folders don't meet")
	open := func() (*driver.Lab, error) { return driver.Open(dir, os.Stderr) }
	root.AddCommand(upCommand(open), addNodeCommand(open), execCommand(open), shellCommand(open), statusCommand(open),
		measurementsCommand(open), pushCommand(open), vmCommand(open), kubeBinariesCommand(), demoCommand(open), benchCommand(open), intruderCommand(), depsCommand())
	root.AddCommand(
		simple("down", "End everything and remove all that the lab has made", cobra.NoArgs, open,
			func(cmd *cobra.Command, l *driver.Lab, _ []string) error { return l.Down(cmd.Context()) }),
		simple("remove-node NAME", "End a machine and delete all that it had", cobra.ExactArgs(1), open,
			func(cmd *cobra.Command, l *driver.Lab, args []string) error {
				return l.RemoveNode(cmd.Context(), args[0])
			}),
		simple("kill NAME", "Cut a machine's power without notice; reboot gives it back", cobra.ExactArgs(1), open,
			func(cmd *cobra.Command, l *driver.Lab, args []string) error {
				return l.KillNode(cmd.Context(), args[0])
			}),
		simple("reboot NAME", "Cut a machine's power and boot it again from its disk", cobra.ExactArgs(1), open,
			func(cmd *cobra.Command, l *driver.Lab, args []string) error {
				_, err := l.RebootNode(cmd.Context(), args[0])
				return err
			}),
	)
	return root
}

type opener func() (*driver.Lab, error)

func simple(use, short string, args cobra.PositionalArgs, open opener, run func(*cobra.Command, *driver.Lab, []string) error) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: args, RunE: func(cmd *cobra.Command, args []string) error {
		l, err := open()
		if err != nil {
			return err
		}
		return run(cmd, l, args)
	}}
}

func upCommand(open opener) *cobra.Command {
	var u driver.Up
	cmd := simple("up", "Build the machines' image and start the lab's network and mirror", cobra.NoArgs, open,
		func(cmd *cobra.Command, l *driver.Lab, _ []string) error { return l.Up(cmd.Context(), u) })
	f := cmd.Flags()
	f.StringVar(&u.Source, "source", "", "checkout of Muster (default: the one around the working directory)")
	f.StringVar(&u.Bootstrapper, "bootstrapper", "", "program that becomes /usr/bin/bootstrapper of the image; without it machines have none")
	f.StringSliceVar(&u.Preinstalled, "preinstalled", []string{"kubelet"}, "of kubelet, kubeadm and kubectl: what the image has; the others come as components")
	f.StringVar(&u.OwnerKeys, "owner-keys", "", "owner's public keys for image.yaml (base64 Ed25519, with commas between)")
	f.StringSliceVar(&u.Images, "images", nil, "images for the registry besides the lab's own: OCI layouts, tars of them, folders of such tars")
	f.BoolVar(&u.NoPreload, "no-preload", false, "machines begin without container images")
	return cmd
}

func addNodeCommand(open opener) *cobra.Command {
	var n driver.Node
	cmd := simple("add-node NAME", "Make and boot a machine; nodeN gets 192.168.77.(10+N)", cobra.ExactArgs(1), open,
		func(cmd *cobra.Command, l *driver.Lab, args []string) error {
			n.Name = args[0]
			m, err := l.AddNode(cmd.Context(), n)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", m.Name, m.Address)
			return err
		})
	f := cmd.Flags()
	f.IntVar(&n.Number, "number", 0, "1 to 240; the address is 192.168.77.(10+number) (default: the one in the name)")
	f.StringVar(&n.Role, "role", "worker", "control-plane or worker, for its metadata and the load balancer")
	f.StringVar(&n.InitSecretHash, "init-secret-hash", "", "SHA-256 of the init secret, hex: this machine may be initialized")
	f.StringSliceVar(&n.JoinEndpoints, "join-endpoint", nil, "joinservice to ask, host:port")
	f.BoolVar(&n.TamperBootstrapper, "tamper-bootstrapper", false, "change one byte of its bootstrapper")
	f.BoolVar(&n.ForeignEK, "foreign-ek", false, "give it a TPM from a CA that no listed root certifies")
	f.BoolVar(&n.CloudKey, "cloud-key", false, "give it a TPM with an attestation key that the lab's cloud certifies")
	f.BoolVar(&n.BareEK, "bare-ek", false, "give it a TPM without EK certificates")
	f.BoolVar(&n.NoBootstrapper, "no-bootstrapper", false, "an attacker's machine: nothing of Muster, all Kubernetes programs")
	f.BoolVar(&n.KeepEtc, "keep-etc", false, "what it writes to /etc survives a reboot")
	f.BoolVar(&n.PullImages, "pull-images", false, "begin without container images")
	return cmd
}

func execCommand(open opener) *cobra.Command {
	return simple("exec NAME -- COMMAND [ARG...]", "Run a command in a machine, or on the owner's workstation", cobra.MinimumNArgs(2), open,
		func(cmd *cobra.Command, l *driver.Lab, args []string) error {
			return l.Exec(cmd.Context(), args[0], args[1:]...)
		})
}

func shellCommand(open opener) *cobra.Command {
	return simple("shell NAME", "Open a shell in a machine, or on the owner's workstation", cobra.ExactArgs(1), open,
		func(cmd *cobra.Command, l *driver.Lab, args []string) error {
			return l.Exec(cmd.Context(), args[0], "/bin/bash", "-i")
		})
}

func statusCommand(open opener) *cobra.Command {
	var output string
	cmd := simple("status", "Show what runs", cobra.NoArgs, open, func(cmd *cobra.Command, l *driver.Lab, _ []string) error {
		s, err := l.Status(cmd.Context())
		if err != nil {
			return err
		}
		switch output {
		case "json":
			e := json.NewEncoder(cmd.OutOrStdout())
			e.SetIndent("", "  ")
			return e.Encode(s)
		case "text":
		default:
			return errors.New("--output: text or json")
		}
		w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
		fmt.Fprintf(w, "NAME\tADDRESS\tROLE\tRUNNING\tPID\tLOGS\n%s\t%s\towner\t%t\t%d\t%s\n", driver.Owner, driver.OwnerAddress, s.Owner.Alive(), s.Owner.PID, l.OwnerDir())
		for _, m := range s.Machines {
			role := "worker"
			if m.ControlPlane {
				role = "control-plane"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%t\t%d\t%s\n", m.Name, m.Address, role, m.Running, m.Init.PID, m.Log)
		}
		return w.Flush()
	})
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func measurementsCommand(open opener) *cobra.Command {
	return simple("measurements", "Print what a machine of this lab will measure, computed from its image alone", cobra.NoArgs, open,
		func(cmd *cobra.Command, l *driver.Lab, _ []string) error {
			m, err := l.Measurements()
			if err != nil {
				return err
			}
			e := json.NewEncoder(cmd.OutOrStdout())
			e.SetIndent("", "  ")
			return e.Encode(m)
		})
}

func pushCommand(open opener) *cobra.Command {
	return simple("push PATH", "Put images (an OCI layout, one in a tar, or a folder of such tars) into the lab's registry", cobra.ExactArgs(1), open,
		func(cmd *cobra.Command, l *driver.Lab, args []string) error { return l.Push(cmd.Context(), args[0]) })
}

func kubeBinariesCommand() *cobra.Command {
	var source string
	var pin, pinned, previous bool
	cmd := &cobra.Command{
		Use: "kube-binaries", Short: "Build the Kubernetes programs, unless the cache has them, and print their folder", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			release := driver.CurrentRelease()
			if previous {
				release = driver.PreviousRelease()
			}
			if pin {
				return driver.PinReleaseBinaries(cmd.Context(), release, source, cmd.ErrOrStderr())
			}
			dir, err := driver.ReleaseBinaries(cmd.Context(), release, source, pinned, os.Stderr)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), dir)
			return err
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "checkout of Muster (default: the one around the working directory)")
	cmd.Flags().BoolVar(&pin, "pin", false, "rebuild the programs and write their hashes into the module's sha256sums.json, after a change of versions or of the Go release")
	cmd.Flags().BoolVar(&pinned, "pinned", false, "fail unless the module's sha256sums.json names the programs")
	cmd.Flags().BoolVar(&previous, "previous", false, "the release that tests upgrade from (tools/kube-previous), instead of tools/kube")
	cmd.MarkFlagsMutuallyExclusive("pin", "pinned")
	return cmd
}

func depsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "deps [PACKAGE…]", Short: "Install the Debian packages that the lab and the tests use, and the named ones, if any is missing", Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, more []string) error {
			return driver.EnsurePackages(cmd.Context(), cmd.ErrOrStderr(), more...)
		},
	}
}
