package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

// draining has the flags of a drain.
type draining struct {
	wanted  bool
	options clusterapi.DrainOptions
	timeout time.Duration
}

// flags adds the flags; with optional, the node is drained only with --drain.
func (d *draining) flags(cmd *cobra.Command, optional bool) {
	name := "timeout"
	if optional {
		cmd.Flags().BoolVar(&d.wanted, "drain", false, "evict its pods before")
		name = "drain-timeout"
	}
	d.wanted = !optional
	cmd.Flags().DurationVar(&d.timeout, name, 10*time.Minute, "how long to wait until the pods have ended")
	cmd.Flags().BoolVar(&d.options.EmptyDir, "delete-emptydir-data", false, "drain: also pods with emptyDir volumes, whose data are lost")
	cmd.Flags().BoolVar(&d.options.Force, "force", false, "drain: also pods without a controller, which are lost")
}

// drainFirst drains a node if the flags ask for it. cordoned reports that it was schedulable before.
func (a *app) drainFirst(ctx context.Context, name string, d draining) (cordoned bool, err error) {
	if !d.wanted {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	err = a.withFolder(func(dir *ownerdir.Dir) (err error) {
		cordoned, err = lifecycle.Drain(ctx, dir, name, d.options, a.steps(name))
		return err
	})
	return cordoned, err
}

// withFolder calls f with the owner's folder, for reading.
func (a *app) withFolder(f func(*ownerdir.Dir) error) error {
	dir, err := a.view()
	if err != nil {
		return err
	}
	return errors.Join(f(dir), dir.Close())
}

// steps returns a function that prints the steps of a command on one node.
func (a *app) steps(name string) func(string) {
	return func(step string) { fmt.Fprintf(a.stderr, "%s: %s\n", name, step) }
}

// result prints the end of a command on one node.
func (a *app) result(name, done string) error {
	if a.output == outputJSON {
		return a.json(struct {
			Name string `json:"name"`
			Done string `json:"done"`
		}{name, done})
	}
	_, err := fmt.Fprintf(a.stdout, "%s: %s\n", name, done)
	return err
}

func (a *app) drainCommand() *cobra.Command {
	var pods draining
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Evict a node's pods, and let it take no new ones",
		Long: `Does what kubectl drain --ignore-daemonsets does, with the administrator's kubeconfig of the owner's folder: pods end within their
PodDisruptionBudgets and with their own grace periods. kubectl uncordon NODE makes the node schedulable again.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := a.drainFirst(cmd.Context(), args[0], pods); err != nil {
				return err
			}
			return a.result(args[0], "drained.")
		},
	}
	pods.flags(cmd, false)
	return cmd
}

func (a *app) banCommand() *cobra.Command {
	var l leaving
	cmd := &cobra.Command{
		Use:   "ban NODE",
		Short: "Shut a node's machine out, and keep its name reserved",
		Long: `For a machine that you no longer trust. It gets no ticket, disk key or certificate, the API server refuses its writes, and its Node and
its pods are deleted without waiting for the pods' end. Until its certificates expire, it can still read what it could read before. A
control plane had the cluster's keys, so a ban is not enough (docs/control-planes.md). Power the machine off.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !l.yes {
				look, cancel := context.WithTimeout(cmd.Context(), l.timeout)
				defer cancel()
				if err := a.withFolder(func(d *ownerdir.Dir) error { return lifecycle.MayBan(look, d, args[0]) }); err != nil {
					return err
				}
				fmt.Fprintf(a.stderr, "The machine of %s is shut out, and its pods are deleted.\n", args[0])
				if err := a.confirm(cmd.Context(), cmd.InOrStdin(), args[0]); err != nil {
					return err
				}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), l.timeout)
			defer cancel()
			if err := a.withFolder(func(d *ownerdir.Dir) error {
				return lifecycle.Ban(ctx, d, args[0], a.steps(args[0]), func() { _ = a.remember(ctx, d) }) // a failure is printed
			}); err != nil {
				return err
			}
			return a.result(args[0], "banned.")
		},
	}
	l.flags(cmd)
	return cmd
}

func (a *app) unbanCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "unban NODE",
		Short: "Lift the ban of a node's machine",
		Long: `The machine may attest and write again at once. Its kubelet creates a new Node only when it starts: restart the machine, by its power
or with muster reboot. Labels and taints of the old Node are lost.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			if err := a.withFolder(func(d *ownerdir.Dir) error {
				err := lifecycle.Unban(ctx, d, args[0])
				if err == nil {
					_ = a.remember(ctx, d) // a failure is printed
				}
				return err
			}); err != nil {
				return err
			}
			return a.result(args[0], "the ban is lifted. Restart the machine: muster reboot "+args[0]+". Its new Node has no labels and taints. A control plane gets no joinservice without them: kubectl label node "+args[0]+" node-role.kubernetes.io/control-plane= && kubectl taint node "+args[0]+" node-role.kubernetes.io/control-plane:NoSchedule")
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait for the API server")
	return cmd
}

func (a *app) resetCommand() *cobra.Command {
	var (
		l    leaving
		pods draining
		wait time.Duration
	)
	cmd := &cobra.Command{
		Use:   "reset NODE",
		Short: "Erase a node's state disk, and let its machine join as new",
		Long: `Signs an order with the owner's key. The machine gets it with its next attestation, within five minutes, erases the header of its state
disk and restarts. The cluster forgets the node, with the disk's salt: the disk's data are lost for good. At its next boot the machine
formats the disk and asks to join. A worker that the policy accepts becomes a node again without further steps; enroll a control plane
before that (muster enroll NODE --role control-plane). Only the machine's own report shows that the disk was erased: if you do not trust
the machine, ban it. The command first shows what it will do. After an interruption, run the same command again to complete it.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error { return a.reset(cmd, l, pods, wait, args[0]) },
	}
	l.flags(cmd)
	pods.flags(cmd, true)
	cmd.Flags().DurationVar(&wait, "wait", lifecycle.OrderTimeout, "how long to wait for the machine")
	return cmd
}

func (a *app) reset(cmd *cobra.Command, l leaving, pods draining, wait time.Duration, name string) error {
	dir, err := a.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	look, cancel := context.WithTimeout(cmd.Context(), l.timeout)
	defer cancel()
	r, err := lifecycle.PlanReset(look, dir, name)
	if err != nil {
		return err
	}
	if pods.wanted {
		r.Drains()
	}
	if err := a.showDeparture(cmd, l, r.Removal, name); err != nil {
		return err
	}
	if _, err := a.drainFirst(cmd.Context(), name, pods); err != nil {
		return err
	}
	removing, cancel := context.WithTimeout(cmd.Context(), 2*wait) // two orders
	defer cancel()
	// The etcd member is removed first: otherwise, of two control planes, the erased one would stop the other
	// one's etcd.
	if err := r.RemoveMember(removing, a.steps(name)); err != nil {
		return err
	}
	ordered, cancel := context.WithTimeout(cmd.Context(), wait)
	defer cancel()
	if err := r.Order(ordered, a.steps(name)); err != nil {
		return err
	}
	done, err := a.remove(cmd.Context(), l, dir, r.Removal, name)
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		return a.json(done)
	}
	return a.result(name, "its machine erases its disk, restarts, and joins as new if the policy accepts it: muster status shows it.")
}
