package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

func (a *app) policyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "policy", Short: "Make, check, sign and apply the policy that decides which machines may join"}
	cmd.AddCommand(a.fromMeasurementsCommand(), a.fromImageCommand(), a.addClassCommand(), a.addImageCommand(), a.removeImageCommand(), a.checkCommand(), a.diffCommand(), a.signCommand(), a.applyCommand())
	return cmd
}

func (a *app) checkCommand() *cobra.Command {
	return &cobra.Command{
		Use: "check FILE", Short: "Check whether services would accept a policy, and warn of its risks", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := os.ReadFile(args[0])
			if err != nil {
				return err
			}
			p, found, err := policyfile.Check(text, time.Now())
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			if a.output == outputJSON {
				return a.json(map[string]any{"serial": p.Serial(), "findings": append([]policyfile.Finding{}, found...)})
			}
			for _, f := range found {
				fmt.Fprintf(a.stdout, "%-8s  %s: %s\n", f.Level, f.Field, f.Text)
			}
			_, err = fmt.Fprintf(a.stdout, "%s: valid, serial %d, %d findings\n", args[0], p.Serial(), len(found))
			return err
		},
	}
}

func (a *app) signCommand() *cobra.Command {
	var key string
	cmd := &cobra.Command{
		Use:   "sign FILE --owner-key-file FILE",
		Short: "Print the AttestationPolicy object of a policy, signed; kubectl apply puts it into a cluster",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := os.ReadFile(args[0])
			if err != nil {
				return err
			}
			_, b, err := policyfile.Parse(text)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			owner, err := ownerdir.ReadKey(key)
			if err != nil {
				return err
			}
			signed := attest.SignPolicy(owner, b)
			return a.json(map[string]any{
				"apiVersion": "muster.dev/v1alpha1", "kind": "AttestationPolicy", "metadata": map[string]any{"name": "default"},
				"spec": map[string]any{"policy": string(signed.GetPolicy()), "signature": base64.StdEncoding.EncodeToString(signed.GetSignature())},
			})
		},
	}
	cmd.Flags().StringVar(&key, "owner-key-file", "", "owner's key, owner.key of the owner's folder")
	if err := cmd.MarkFlagRequired("owner-key-file"); err != nil {
		panic(err)
	}
	return cmd
}

func (a *app) applyCommand() *cobra.Command {
	var (
		timeout time.Duration
		consent policies.Consent
		dry     bool
		out     []string
	)
	cmd := &cobra.Command{
		Use:   "apply [FILE]",
		Short: "Sign the policy of the owner's folder and put it in force; FILE replaces it first",
		Long: `Refuses a policy that running nodes do not match. This check uses the PCRs and machine IDs that the cluster has stored from their
last evidence. muster policy diff lets the cluster appraise the nodes by all rules of the policy.

With --dry-run, it makes all its checks, shows what would change and which running nodes would be refused, and writes nothing. The exit
code is 1 if there is such a node (unless --expel is given), or if a list of machines became empty (unless --any-machine is given).`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dry {
				return a.withFolder(func(dir *ownerdir.Dir) error { return a.dryApply(cmd.Context(), dir, args, consent, timeout, out) })
			}
			path, err := a.folder()
			if err != nil {
				return err
			}
			dir, err := ownerdir.Open(path)
			if err != nil {
				return err
			}
			defer func() { _ = dir.Close() }()
			var text []byte
			if len(args) == 1 {
				if text, err = a.nextPolicy(dir, args[0]); err != nil {
					return err
				}
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, fmt.Errorf("the services said nothing within %s: %w", timeout, context.DeadlineExceeded))
			defer cancel()
			p, err := policies.ApplyPolicy(ctx, dir, text, consent, out...)
			if err != nil {
				return err
			}
			_ = a.remember(ctx, dir) // a failure is printed
			if a.output == outputJSON {
				return a.json(p.Status)
			}
			_, err = fmt.Fprintf(a.stdout, "The policy of serial %d is in force (generation %d).%s\n", p.Status.Serial, p.Status.Generation, insecure(clusterapi.Insecure(p)))
			return err
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait for the services")
	leaveOut(cmd.Flags(), &out)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only show what would change, and which running nodes would be refused")
	cmd.Flags().BoolVar(&consent.AnyMachine, "any-machine", false, "also if a list of machines became empty: it then accepts every machine that its authorities certify")
	cmd.Flags().BoolVar(&consent.Expel, "expel", false, "also if running nodes do not match the policy: they get no key and no certificate from then on")
	return cmd
}

// errWouldExpel is the result of a dry run that finds a running node refused.
var errWouldExpel = errors.New("running nodes do not match the policy, so muster policy apply refuses it without --expel; nothing was changed")

// errWouldOpen is the result of a dry run that finds an empty list.
var errWouldOpen = errors.New("a list of machines is empty, and accepts every machine, so muster policy apply refuses the policy without --any-machine; nothing was changed")

// dryApply shows what muster policy apply would do.
func (a *app) dryApply(ctx context.Context, dir *ownerdir.Dir, args []string, consent policies.Consent, timeout time.Duration, leaveOut []string) error {
	text, err := dir.Read(ownerdir.PolicyFile)
	if len(args) == 1 {
		text, err = a.nextPolicy(dir, args[0])
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	plan, err := policies.PlanPolicy(ctx, dir, text, leaveOut...)
	if err != nil {
		return err
	}
	diff, err := policies.DiffPolicy(ctx, dir, text)
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		err = a.json(map[string]any{"serial": plan.Policy.Serial(), "diff": diff, "refused": append([]policies.Expelled{}, plan.Refused...), "opened": append([]string{}, plan.Opened...)})
	} else {
		fmt.Fprint(a.stdout, diff)
		if plan.NoneAttests {
			fmt.Fprintf(a.stdout, "Note: %s, so the policy was compared with all nodes that were accepted before. %s\n", policies.NoneHasAttested, policies.WhyNoneAttests)
		}
		for _, n := range plan.Refused {
			fmt.Fprintf(a.stdout, "%s would be refused: %s\n", n.Node, n.Why)
		}
		for _, l := range plan.Opened {
			fmt.Fprintf(a.stdout, "%s would be empty: every machine that its authorities certify could join\n", l)
		}
		what := "would be put in force"
		if diff == "" {
			what = "equals the one in force"
		}
		_, err = fmt.Fprintf(a.stdout, "The policy of serial %d %s. Nothing was changed.\n", plan.Policy.Serial(), what)
	}
	switch {
	case err != nil:
	case len(plan.Opened) > 0 && !consent.AnyMachine:
		err = &shown{errWouldOpen}
	case len(plan.Refused) > 0 && !consent.Expel:
		err = &shown{errWouldExpel}
	}
	return err
}

// leaveOut adds the flag for control planes in the cluster that are not the owner's.
func leaveOut(f *pflag.FlagSet, names *[]string) {
	f.StringSliceVar(names, "leave-out", nil, "a control plane in the cluster that is not yours: it may be missing in the policy")
}

// nextPolicy reads the policy that is to replace the folder's. A policy from from-measurements gets the control planes, classes and rules about TPMs
// of the previous one.
func (a *app) nextPolicy(dir *ownerdir.Dir, path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if text, err = a.keepRules(dir, path, text); err != nil {
		return nil, err
	}
	p, _, err := policyfile.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	before, err := dir.Read(ownerdir.PolicyFile)
	if err != nil {
		return nil, err
	}
	dropped, err := policyfile.DroppedMachines(before, text)
	if err != nil {
		return nil, err
	}
	opened, err := policyfile.OpenedLists(before, text)
	if err != nil {
		return nil, err
	}
	for _, l := range opened {
		fmt.Fprintf(a.stderr, "Warning: %s lists no machine in %s, but the policy in the folder does: every machine that its authorities certify would be accepted.\n", path, l)
	}
	for _, l := range dropped {
		if len(opened) > 0 && l.Field != "tpm2.bareMachineIds" {
			continue // an empty list may accept it
		}
		fmt.Fprintf(a.stderr, "Warning: %s does not list machine %s, which the policy in the folder has in %s: it will be refused unless another rule accepts it.\n", path, l.Machine, l.Field)
	}
	older, err := policyfile.OlderCollateral(before, text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, o := range older {
		fmt.Fprintf(a.stderr, "Warning: the collateral of %s is worse than that of the policy in the folder: %s. To keep the folder's, remove hardware.collateral from the file.\n", path, o)
	}
	if len(p.ControlPlanes()) == 0 {
		kept, err := policies.ControlPlanesOf(dir)
		if err != nil {
			return nil, err
		}
		if len(kept) > 0 {
			if text, err = policyfile.ListControlPlanes(text, p.Serial(), kept, nil); err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			fmt.Fprintf(a.stderr, "%s lists no control planes: the previous %d stay listed.\n", path, len(kept))
		}
	}
	return text, nil
}

// keepRules returns text with those rules of the folder's policy that text does not contain.
func (a *app) keepRules(dir *ownerdir.Dir, path string, text []byte) ([]byte, error) {
	before, err := dir.Read(ownerdir.PolicyFile)
	if err != nil {
		return nil, err
	}
	text, kept, err := policyfile.KeepRules(text, before)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, k := range kept {
		fmt.Fprintf(a.stderr, "%s does not mention these rules, so they are kept: %s.\n", path, k)
	}
	return text, nil
}

func insecure(on []string) string {
	if len(on) == 0 {
		return ""
	}
	return " Insecure switches that are on: " + strings.Join(on, ", ") + "."
}
