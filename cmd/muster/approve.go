package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// approving has the flags of muster approve.
type approving struct {
	policies.ApproveConfig
	allFrom, from string
	count         int
	wait          time.Duration
	yes, dryRun   bool
	timeout       time.Duration
}

func (a *app) approveCommand() *cobra.Command {
	var f approving
	cmd := &cobra.Command{
		Use:   "approve [MACHINE-ID|HOST…] | --all-from CIDR | --count N --for DURATION [--from CIDR]",
		Short: "Show which machines wait, and list machines in the signed policy so that they may join",
		Long: `Without arguments, shows the machines that wait to join: why, what they booted compared with the policy, their endorsement and address.

With machine IDs or addresses, with --all-from, or with --count, it lists machines in the policy (tpm2.machineIds, bareMachineIds, or
machineIds of platformRoots or nitroRoots, by their endorsement), increments serial, signs the policy and puts it in force. It shows the machines and asks
first. It approves only machines that the policy accepts otherwise: a machine that is refused for what it booted is never approved.

This program verifies each machine itself, at port 9000 of its address. If it can't reach a machine, --trust-cluster accepts the cluster's
record of it, which an administrator of the cluster can write. A TPM without an EK certificate proves nothing over the network: name such a
machine by its complete ID, once you have compared that with the one on its console. The same applies to three other kinds: machines of AWS
and Azure, because their evidence does not name the account; machines certified by a TPM vendor's root, because such TPMs are sold to the
public; and machines that were in the cluster before.

After an interruption, run the same command again to complete the approval.`,
		RunE: func(cmd *cobra.Command, args []string) error { return a.approve(cmd, f, args) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.allFrom, "all-from", "", "approve all machines that wait now and have an address in this network, such as 10.0.0.0/24")
	fl.IntVar(&f.count, "count", 0, "approve this number of machines as they appear, for an autoscaling group; needs --for")
	fl.DurationVar(&f.wait, "for", 0, "with --count: how long to wait for them, such as 10m")
	fl.StringVar(&f.from, "from", "", "with --count: only machines with an address in this network")
	fl.BoolVar(&f.TrustCluster, "trust-cluster", false, "accept the cluster's record of machines that this computer can't reach")
	fl.BoolVar(&f.BareEK, "bare-ek", false, "also approve machines without an EK certificate that are not named by their ID: any program in the network can pose as one")
	fl.BoolVar(&f.AnyAccount, "any-account", false, "also approve machines of AWS and Azure that are not named by their ID: any customer of the cloud can run one")
	fl.BoolVar(&f.AnyTPM, "any-tpm", false, "also approve machines certified by a TPM vendor's root that are not named by their ID: such TPMs are sold to the public")
	fl.BoolVar(&f.yes, "yes", false, "don't ask")
	fl.BoolVar(&f.dryRun, "dry-run", false, "show what would be approved, and change nothing")
	fl.DurationVar(&f.timeout, "timeout", 2*time.Minute, "how long to wait for the API server and the machines; --for is not part of it")
	return cmd
}

// check refuses flags that contradict each other.
func (f *approving) check(args []string) error {
	modes := 0
	for _, set := range []bool{len(args) > 0, f.allFrom != "", f.count != 0} {
		if set {
			modes++
		}
	}
	switch {
	case modes > 1:
		return usagef("name machines, or give --all-from, or --count: only one of them")
	case f.count < 0 || f.count > 0 != (f.wait > 0):
		return usagef("--count N and --for DURATION go together, both above 0")
	case f.from != "" && f.count == 0:
		return usagef("--from goes with --count; --all-from approves those that wait now")
	case modes == 0 && (f.yes || f.dryRun):
		return usagef("approve which machines? Name them, or give --all-from or --count")
	}
	return nil
}

// network reads a flag with a network; the zero value if it is empty.
func network(flag, s string) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p != p.Masked() {
		return p, usagef("%s %q is not a network like 10.0.0.0/24", flag, s)
	}
	return p, nil
}

func (a *app) approve(cmd *cobra.Command, f approving, args []string) error {
	if err := f.check(args); err != nil {
		return err
	}
	from, err := network("--all-from", f.allFrom)
	if err == nil && f.count > 0 {
		from, err = network("--from", f.from)
	}
	if err != nil {
		return err
	}
	open := a.open
	shows := len(args) == 0 && f.allFrom == "" && f.count == 0
	if shows || f.dryRun {
		open = a.view
	}
	dir, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
	defer cancel()
	ap, err := policies.NewApprover(ctx, dir, f.ApproveConfig)
	if err != nil {
		return err
	}
	if f.count > 0 {
		return a.approveAsTheyCome(cmd, f, dir, ap, from)
	}
	var machines, left []policies.Candidate
	switch {
	case shows:
		all, err := ap.Candidates(ctx)
		if err != nil {
			return err
		}
		return a.showWaiting(all, ap.Unsent())
	case f.allFrom != "":
		all, err := ap.Candidates(ctx)
		if err != nil {
			return err
		}
		for _, c := range policies.Within(all, from) {
			if c.Problem == nil {
				machines = append(machines, c)
			} else {
				left = append(left, c)
			}
		}
	default:
		if machines, err = namedMachines(ctx, ap, args); err != nil {
			return err
		}
	}
	return a.approveThese(cmd, f, dir, ap, machines, left)
}

// namedMachines returns the machines that the arguments name, each once. It leaves out those of an interrupted approval, which is completed first.
func namedMachines(ctx context.Context, ap *policies.Approver, args []string) (out []policies.Candidate, err error) {
	seen := map[string]bool{}
	for _, l := range ap.Unsent() {
		seen[l.Machine.String()] = true
	}
	for _, arg := range args {
		var c policies.Candidate
		if id, perr := attest.ParseMachineID(arg); perr == nil {
			if seen[id.String()] {
				continue
			}
			c, err = ap.Machine(ctx, id)
		} else {
			addr, aerr := hostPort(arg, 9000)
			if aerr != nil || strings.Trim(arg, "0123456789abcdefABCDEF") == "" {
				return nil, usagef("%q is neither a complete machine ID of 64 hexadecimal digits nor an address", arg)
			}
			c, err = ap.Host(ctx, addr)
		}
		if err != nil {
			return nil, err
		}
		if !seen[c.Machine] {
			out = append(out, c)
		}
		seen[c.Machine] = true
	}
	return out, nil
}

// approveThese shows the machines, asks, and approves them.
func (a *app) approveThese(cmd *cobra.Command, f approving, dir *ownerdir.Dir, ap *policies.Approver, machines, left []policies.Candidate) error {
	unsent := ap.Unsent()
	if a.output != outputJSON {
		if err := a.showWaiting(slices.Concat(machines, left), unsent); err != nil {
			return err
		}
	}
	for _, c := range machines {
		if c.Problem != nil { // reported as the error, with its reason and remedy
			return ap.Approve(cmd.Context(), machines, a.step)
		}
	}
	if len(machines)+len(unsent) == 0 {
		if err := a.approved(nil, unsent, left, 0); err != nil || len(left) == 0 {
			return err
		}
		return &shown{fmt.Errorf("%s, but none can be approved: the reason for each is above", waits(len(left)))}
	}
	if f.dryRun {
		if a.output == outputJSON {
			return a.json(approvals{Would: machines, Left: left, Unsent: unsent})
		}
		_, err := fmt.Fprintln(a.stdout, "Nothing was changed: --dry-run.")
		return err
	}
	if err := a.agree(cmd, f.yes, fmt.Sprintf("Approve %s?", problem.Count(len(machines)+len(unsent), "machine"))); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout) // the time for the confirmation does not count
	defer cancel()
	if err := ap.Approve(ctx, machines, a.step); err != nil {
		return err
	}
	_ = a.remember(ctx, dir) // a failure is printed
	return a.approved(machines, unsent, left, ap.Serial())
}

// approveAsTheyCome approves machines of an autoscaling group.
func (a *app) approveAsTheyCome(cmd *cobra.Command, f approving, dir *ownerdir.Dir, ap *policies.Approver, from netip.Prefix) error {
	what := "from any address"
	if from.IsValid() {
		what = "with an address in " + from.String()
	}
	unsent := ap.Unsent()
	if f.dryRun {
		ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
		defer cancel()
		all, err := ap.Candidates(ctx)
		if err != nil {
			return err
		}
		return a.showWaiting(policies.Within(all, from), unsent)
	}
	if err := a.agree(cmd, f.yes, fmt.Sprintf("Approve up to %s %s that appear within %s, if they booted what the policy accepts?", problem.Count(f.count, "machine"), what, f.wait)); err != nil {
		return err
	}
	began := time.Now() // the time for the confirmation does not count
	ctx, cancel := context.WithTimeout(cmd.Context(), f.wait)
	defer cancel()
	if len(unsent) > 0 {
		if err := ap.Approve(context.WithoutCancel(ctx), nil, a.step); err != nil {
			return err
		}
		if err := a.approved(nil, unsent, nil, ap.Serial()); err != nil {
			return err
		}
	}
	done := min(len(unsent), f.count)
	var err error
	if done < f.count {
		var more int
		var printed error
		more, err = ap.Await(ctx, f.count-done, from, a.step, func(batch []policies.Candidate) {
			printed = errors.Join(printed, a.approved(batch, nil, nil, ap.Serial()))
		})
		done, err = done+more, errors.Join(err, printed)
	}
	if done > 0 {
		keep, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), f.timeout)
		defer cancel()
		_ = a.remember(keep, dir) // a failure is printed
	}
	if err == nil && done < f.count {
		err = f.unfinished(done, time.Since(began))
	}
	return err
}

// unfinished is the error if fewer machines appeared in time, or before an interruption. The command to continue has the same limits.
func (f *approving) unfinished(done int, after time.Duration) error {
	next := []string{fmt.Sprintf("muster approve --count %d --for %s", f.count-done, f.wait)}
	if f.from != "" {
		next = append(next, "--from "+f.from)
	}
	for _, o := range []struct {
		name string
		set  bool
	}{{"--trust-cluster", f.TrustCluster}, {"--bare-ek", f.BareEK}, {"--any-account", f.AnyAccount}, {"--any-tpm", f.AnyTPM}} {
		if o.set {
			next = append(next, o.name)
		}
	}
	were := "were"
	if f.count == 1 {
		were = "was"
	}
	return fmt.Errorf("%d of %s %s approved within %s; to continue: %s", done, problem.Count(f.count, "machine"), were, after.Round(time.Second), strings.Join(next, " "))
}

func waits(n int) string {
	if n == 1 {
		return "1 machine waits"
	}
	return fmt.Sprintf("%d machines wait", n)
}

func (a *app) step(s string) { fmt.Fprintln(a.stderr, s) }

// agree asks for a confirmation.
func (a *app) agree(cmd *cobra.Command, yes bool, question string) error {
	if yes {
		return nil
	}
	fmt.Fprintf(a.stderr, "%s [y/N] ", question)
	answer, err := a.answer(cmd.Context(), cmd.InOrStdin())
	if err != nil {
		return err
	}
	if answer = strings.ToLower(answer); answer != "y" && answer != "yes" {
		return errors.New("nothing was changed: the answer is not y; --yes answers the question")
	}
	return nil
}

// approvals is the output for programs.
type approvals struct {
	Approved []policies.Candidate `json:"approved,omitempty"`
	Would    []policies.Candidate `json:"wouldApprove,omitempty"`
	Left     []policies.Candidate `json:"notApproved,omitempty"`
	Unsent   []policyfile.Listing `json:"completed,omitempty"`
	Serial   uint64               `json:"policySerial,omitempty"`
}

// approved prints exactly what was approved.
func (a *app) approved(machines []policies.Candidate, unsent []policyfile.Listing, left []policies.Candidate, serial uint64) error {
	if a.output == outputJSON {
		return a.json(approvals{Approved: machines, Left: left, Unsent: unsent, Serial: serial})
	}
	if len(machines)+len(unsent) == 0 {
		_, err := fmt.Fprintln(a.stdout, "No machine was approved.")
		return err
	}
	fmt.Fprintf(a.stdout, "Approved by the policy of serial %d:\n", serial)
	rows := [][]string{{"MACHINE", "LISTED IN", "BOOTED", "VERIFIED BY"}}
	for _, l := range unsent {
		rows = append(rows, []string{l.Machine.String(), l.Field, "-", "an earlier command that was interrupted"})
	}
	for _, c := range machines {
		rows = append(rows, []string{c.Machine, c.List, c.Booted(), verifier(c)})
	}
	return a.table(rows)
}

// verifier names the program that has verified a machine's evidence.
func verifier(c policies.Candidate) string {
	if c.Verified {
		return "this computer"
	}
	return "the cluster"
}

// showWaiting prints machines that wait.
func (a *app) showWaiting(all []policies.Candidate, unsent []policyfile.Listing) error {
	if a.output == outputJSON {
		return a.json(map[string]any{"waiting": append([]policies.Candidate{}, all...), "interrupted": append([]policyfile.Listing{}, unsent...)})
	}
	for _, l := range unsent {
		fmt.Fprintf(a.stdout, "An approval was interrupted: the folder's policy lists machine %s in %s, but the cluster's does not. The next muster approve completes it.\n", l.Machine, l.Field)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(a.stdout, "No machine waits.")
		return err
	}
	now := time.Now()
	for _, c := range all {
		fmt.Fprintf(a.stdout, "Machine      %s\n", c.Machine)
		for _, l := range [][2]string{
			{"Wants to be", strings.TrimSpace(c.Node + " " + c.Role)}, {"Address", c.Address}, {"Instance", c.Instance}, {"Endorsement", c.Endorsement},
			{"Booted", c.Booted()}, {"Verified by", verifier(c)},
		} {
			if l[1] != "" {
				fmt.Fprintf(a.stdout, "%-11s  %s\n", l[0], l[1])
			}
		}
		if !c.Since.IsZero() {
			fmt.Fprintf(a.stdout, "Refused      %s, since %s, last %s\n", c.Reason, ago(c.Since, now), ago(c.Last, now))
		}
		if c.Problem == nil {
			fmt.Fprintf(a.stdout, "Approval     lists it in %s\n\n", c.List)
		} else {
			fmt.Fprintf(a.stdout, "Approval     not possible: %s\n             %s\n\n", c.Problem.Message, dash(c.Problem.Remedy))
		}
	}
	return nil
}
