package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func (a *app) enrollCommand() *cobra.Command {
	var (
		role, machine, disk string
		at                  expected
		addresses           []string
		timeout             time.Duration
	)
	cmd := &cobra.Command{
		Use:   "enroll NAME --role worker|control-plane --machine-id ID",
		Short: "Give a node name to a machine before it joins; control planes need it",
		Long: `From then on, the name belongs to one machine. A worker enrolls itself by passing attestation. A control plane gets
the cluster's keys, so you have to name its machine.

The command also lists a control plane in the policy and signs the policy with the next serial, because machines trust joinservice and kms
only on listed machines. The owner's folder also records the name: if the folder lacks the record of a control plane, enroll it again. Read
the ID from the machine's console, not from the cluster. After an interruption, run the same command again to complete it.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := enrollment(args[0], role, machine, disk, addresses)
			if err != nil {
				return err
			}
			open := a.view
			if spec.Role == v1alpha1.RoleControlPlane {
				open = a.open // its policy changes
			}
			dir, err := open()
			if err != nil {
				return err
			}
			defer func() { _ = dir.Close() }()
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			if err := at.verify(ctx, a, spec.MachineID, false); err != nil { // already in a cluster, so it is not a new machine
				return err
			}
			created, err := policies.Enroll(ctx, dir, args[0], spec, func(step string) { fmt.Fprintf(a.stderr, "%s: %s\n", args[0], step) })
			if err != nil {
				return err
			}
			_ = a.remember(ctx, dir) // a failure is printed
			if a.output == outputJSON {
				return a.json(map[string]any{"name": args[0], "machineID": spec.MachineID, "role": spec.Role, "created": created})
			}
			text := "%s is enrolled to machine %s as a %s.\n"
			if !created {
				text = "%s was already enrolled to machine %s as a %s.\n"
			}
			_, err = fmt.Fprintf(a.stdout, text, args[0], spec.MachineID, spec.Role)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "", "worker or control-plane")
	f.StringVar(&machine, "machine-id", "", "the machine, as its console shows it")
	f.StringVar(&disk, "disk-id", "", "UUID of its state disk (default: the disk with which it joins first)")
	f.StringSliceVar(&addresses, "address", nil, "address that its node may have (default: the addresses with which it joins first)")
	f.DurationVar(&timeout, "timeout", time.Minute, "how long to wait for the API server")
	at.flag(f)
	for _, name := range []string{"role", "machine-id"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err)
		}
	}
	return cmd
}

// expected is the address of a machine that must be the named one, and accepted by the policy, before anything is signed.
type expected struct{ endpoint string }

func (e *expected) flag(f *pflag.FlagSet) {
	f.StringVar(&e.endpoint, "endpoint", "", "address of the machine: first verify that this machine answers there, and that the policy accepts it")
}

// verify refuses a machine with another ID, and one that the policy refuses. With inCluster, it may be locked to the folder's cluster.
func (e *expected) verify(ctx context.Context, a *app, machine string, inCluster bool) error {
	if e.endpoint == "" {
		return nil
	}
	id, err := attest.ParseMachineID(machine)
	if err != nil {
		return usagef("--endpoint needs the machine's ID: %w", err)
	}
	cfg, err := a.target(e.endpoint, "", string(attest.PurposeMachine), "")
	if err != nil {
		return err
	}
	if cfg.Only = &id; !inCluster {
		cfg.Locks = []attest.Lock{attest.Unlocked()}
	}
	s, err := appraisal.Verify(ctx, cfg)
	if err == nil {
		err = s.Err
	}
	if err != nil {
		return fmt.Errorf("the machine at %s was not verified as machine %s: %w", e.endpoint, id, err)
	}
	return nil
}

func enrollment(name, role, machine, disk string, addresses []string) (v1alpha1.AttestedNodeSpec, error) {
	spec := v1alpha1.AttestedNodeSpec{Role: v1alpha1.Role(role), DiskID: disk}
	if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
		return spec, usagef("node name %q: %s", name, msgs[0])
	}
	if spec.Role != v1alpha1.RoleWorker && spec.Role != v1alpha1.RoleControlPlane {
		return spec, usagef("--role %q: want worker or control-plane", role)
	}
	id, err := attest.ParseMachineID(machine)
	if err != nil {
		return spec, usagef("--machine-id: %w", err)
	}
	spec.MachineID = id.String()
	if disk != "" {
		if _, err := keys.ParseDiskID(disk); err != nil {
			return spec, usagef("--disk-id: %w", err)
		}
	}
	for _, s := range addresses {
		ip, err := netip.ParseAddr(s)
		if err != nil || ip.Zone() != "" {
			return spec, usagef("--address %q is not an IP address", s)
		}
		spec.Addresses = append(spec.Addresses, ip.Unmap().String())
	}
	return spec, nil
}
