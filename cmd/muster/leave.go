package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func (a *app) forgetCommand() *cobra.Command {
	var (
		l          leaving
		memberGone bool
		erase      bool
		disk       string
		pods       draining
	)
	cmd := &cobra.Command{
		Use:   "forget NODE [--erase] | --erase --disk UUID",
		Short: "Free a node's name: shut its machine out, and delete its Node and enrollment",
		Long: `The machine is banned, then its writes are refused and its certificates revoked, so that it can't write as the next machine with this
name. The ban ends with the enrollment: to keep the machine out, first revoke its ID in the policy (tpm2.revoked.keys). The disk stays
assigned to the machine, and no other machine gets its key. With --erase, no machine gets it: the disk's salt is deleted, so its key can
no longer be derived, and its data are lost. --disk names a disk whose node is already forgotten. With --drain, the node's pods are
evicted before. The command does not switch the machine off: do that if it runs. The etcd member of a control plane is removed by another
control plane, by an order with your signature. The command first shows what it will do. After an interruption, run the same command again
to complete it.`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if disk != "" {
				if len(args) != 0 || !erase {
					return usagef("--disk needs --erase, and replaces the node's name")
				}
				if _, err := keys.ParseDiskID(disk); err != nil {
					return usagef("--disk: %w", err)
				}
				return a.leave(cmd, l, draining{}, disk, func(ctx context.Context, d *ownerdir.Dir) (*lifecycle.Removal, error) {
					return lifecycle.PlanErase(ctx, d, disk)
				})
			}
			if len(args) == 0 {
				return usagef("which node? muster forget NODE, or muster forget --erase --disk UUID")
			}
			return a.leave(cmd, l, pods, args[0], func(ctx context.Context, d *ownerdir.Dir) (*lifecycle.Removal, error) {
				return lifecycle.PlanForget(ctx, d, args[0], memberGone, erase)
			})
		},
	}
	l.flags(cmd)
	cmd.Flags().BoolVar(&memberGone, "etcd-member-removed", false, "of a control plane: you have removed its etcd member, so no other machine is ordered to")
	cmd.Flags().BoolVar(&erase, "erase", false, "delete the salt of its disk, so that the disk's key can no longer be derived")
	cmd.Flags().StringVar(&disk, "disk", "", "with --erase: UUID of a disk whose node is banned or forgotten already")
	pods.flags(cmd, true)
	return cmd
}

func (a *app) replaceCommand() *cobra.Command {
	var (
		l  leaving
		to clusterapi.Replacement
		at expected
	)
	cmd := &cobra.Command{
		Use:   "replace NODE --tpm MACHINE-ID | --disk UUID",
		Short: "Give a node's name to another machine or disk, after a repair",
		Long: `After an exchange of the mainboard, and so of the TPM, --tpm names the new machine, which keeps name, role and disk key. After an exchange of the
disk, --disk names the new one. The name is never free for other machines meanwhile. The machine then joins as new; its console shows its ID. If the
TPM was only cleared, --tpm names the same machine, which may then attest again as the same node without a new join. For another machine, this command
lifts a ban; for the enrolled machine, lift it first. The command first shows what it will do. After an interruption, run the same command again to
complete it.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == (clusterapi.Replacement{}) {
				return usagef("what was exchanged? --tpm MACHINE-ID, --disk UUID or both")
			}
			if to.MachineID != "" {
				id, err := attest.ParseMachineID(to.MachineID)
				if err != nil {
					return usagef("--tpm: %w", err)
				}
				to.MachineID = id.String()
			}
			if to.DiskID != "" {
				if _, err := keys.ParseDiskID(to.DiskID); err != nil {
					return usagef("--disk: %w", err)
				}
			}
			return a.leave(cmd, l, draining{}, args[0], func(ctx context.Context, d *ownerdir.Dir) (*lifecycle.Removal, error) {
				if err := at.verify(ctx, a, to.MachineID, true); err != nil { // with a state disk that is not encrypted, it is locked to the cluster again
					return nil, err
				}
				return lifecycle.PlanReplace(ctx, d, args[0], to)
			})
		},
	}
	l.flags(cmd)
	cmd.Flags().StringVar(&to.MachineID, "tpm", "", "ID of the machine with its new TPM, as its console shows it")
	at.flag(cmd.Flags())
	cmd.Flags().StringVar(&to.DiskID, "disk", "", "UUID of the new state disk")
	return cmd
}

// leaving has the flags of the commands that take a name from its machine.
type leaving struct {
	yes     bool
	timeout time.Duration
}

func (l *leaving) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&l.yes, "yes", false, "don't ask")
	cmd.Flags().DurationVar(&l.timeout, "timeout", time.Minute, "how long to wait for the API server")
}

func (a *app) leave(cmd *cobra.Command, l leaving, pods draining, name string, plan func(context.Context, *ownerdir.Dir) (*lifecycle.Removal, error)) error {
	if msgs := validation.IsDNS1123Subdomain(name); len(msgs) > 0 {
		return usagef("node name %q: %s", name, msgs[0])
	}
	dir, err := a.open() // removing a control plane changes the policy
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	look, cancel := context.WithTimeout(cmd.Context(), l.timeout)
	defer cancel()
	d, err := plan(look, dir)
	if err != nil {
		return err
	}
	if pods.wanted {
		d.Drains()
	}
	if err := a.showDeparture(cmd, l, d, name); err != nil {
		return err
	}
	if !d.Nothing {
		if _, err := a.drainFirst(cmd.Context(), name, pods); err != nil {
			return err
		}
	}
	done, err := a.remove(cmd.Context(), l, dir, d, name)
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		return a.json(done)
	}
	text := "%s: done.\n"
	switch {
	case d.Nothing && done.Erased == "":
		text = "%s: nothing to do.\n"
	case done.CertificatesEnd != nil:
		text = "%s: done. The old machine's certificates end at " + done.CertificatesEnd.Format(time.RFC3339) + ".\n"
	}
	if _, err = fmt.Fprintf(a.stdout, text, name); err != nil || done.Erased == "" {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "Disk %s is erased. Remaining copies of its salt still give its key, with root-secret and salt of your folder:\n- %s\n", done.Erased, strings.Join(done.Left, "\n- "))
	return err
}

// showDeparture shows what will be done, and asks.
func (a *app) showDeparture(cmd *cobra.Command, l leaving, d *lifecycle.Removal, name string) error {
	for i, line := range d.Plan {
		fmt.Fprintf(a.stderr, "%d. %s\n", i+1, line)
	}
	for _, line := range d.Warnings {
		fmt.Fprintf(a.stderr, "Note: %s.\n", line)
	}
	if len(d.Plan) == 0 || l.yes {
		return nil
	}
	return a.confirm(cmd.Context(), cmd.InOrStdin(), name)
}

// remove executes a plan.
func (a *app) remove(ctx context.Context, l leaving, dir *ownerdir.Dir, d *lifecycle.Removal, name string) (*lifecycle.Removed, error) {
	report := func(step string) { fmt.Fprintf(a.stderr, "%s: %s\n", name, step) }
	ordered, cancel := context.WithTimeout(ctx, lifecycle.OrderTimeout)
	defer cancel()
	if err := d.RemoveMember(ordered, report); err != nil {
		return nil, err
	}
	ctx, cancel = context.WithTimeout(ctx, l.timeout) // the time for the confirmation and for other machines does not count
	defer cancel()
	done, err := d.Do(ctx, report)
	if err == nil {
		_ = a.remember(ctx, dir) // a failure is printed
	}
	return done, err
}

// confirm requires the node's name, or the disk's UUID, so that a habitual y does not forget a node.
func (a *app) confirm(ctx context.Context, in io.Reader, name string) error {
	fmt.Fprintf(a.stderr, "Type %s to continue: ", name)
	answer, err := a.answer(ctx, in)
	if err != nil {
		return err
	}
	if answer != name {
		return errors.New("nothing was changed: the answer is not the name; --yes answers the question")
	}
	return nil
}

// answer reads a line from the user.
func (a *app) answer(ctx context.Context, in io.Reader) (string, error) {
	typed := make(chan string, 1)
	go func() { // a read of a terminal can't be interrupted; it ends with the program
		line, _ := bufio.NewReader(in).ReadString('\n')
		typed <- line
	}()
	select {
	case line := <-typed:
		fmt.Fprintln(a.stderr)
		return strings.TrimSpace(line), nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}
