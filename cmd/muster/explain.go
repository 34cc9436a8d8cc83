package main

import (
	"context"
	"crypto"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/image"
	"github.com/muster-k8s/muster/trust/attest"
)

func (a *app) explainCommand() *cobra.Command {
	var (
		policy, imagePath string
		timeout           time.Duration
	)
	cmd := &cobra.Command{
		Use:   "explain ENDPOINT|NODE|MACHINE-ID|FILE [--image muster.raw] [--policy FILE]",
		Short: "Describe how a machine's boot differs from the policy and from an image",
		Long: `Shows the image and firmware of the policy that are closest to what a machine booted, which PCRs differ, and the machine's measurements
in them. With --image it also compares the event log with the disk image's expected measurements, one by one: which file or command line
differs, is missing or was not expected.

The machine is named by the address of one that waits, by its node, or by the complete ID of one that muster approve shows. A FILE is an event
log (/sys/kernel/security/tpm0/binary_bios_measurements) or evidence (/var/log/muster-verify on a node), which is not verified. The exit code
is 1 if something differs, or if the machine is refused.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := a.policyPath(policy)
			if err != nil {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			p, err := parsePolicy(text)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			ways, err := expectedBoots(imagePath, p.Bank())
			if err != nil {
				return err
			}
			seen, err := a.seen(cmd, args[0], path, p, timeout)
			if err != nil {
				return err
			}
			e, err := appraisal.ExplainBoot(seen, text, ways)
			if err != nil {
				return err
			}
			return a.showExplanation(e)
		},
	}
	cmd.Flags().StringVar(&policy, "policy", "", "policy to compare with (default: that of the owner's folder)")
	cmd.Flags().StringVar(&imagePath, "image", "", "disk image that the machine should have booted")
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait for the machine (of a node: default 25m)")
	return cmd
}

// policyPath returns the policy of a flag, or that of the owner's folder.
func (a *app) policyPath(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	dir, err := a.view()
	if err != nil {
		return "", errors.Join(usagef("no policy to compare with: give --policy or --directory"), err)
	}
	return dir.File(ownerdir.PolicyFile), dir.Close()
}

// expectedBoots returns the measurements of an image in a bank without and with Secure Boot; nothing without an image.
func expectedBoots(path string, bank crypto.Hash) (ways [][]explain.Step, err error) {
	if path == "" {
		return nil, nil
	}
	program, err := readImage(path, &policyFlags{})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, secure := range []bool{false, true} {
		way, err := image.Steps(program, bank, secure)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		ways = append(ways, way)
	}
	return ways, nil
}

// seen returns the data about the boot of the machine that an argument names.
func (a *app) seen(cmd *cobra.Command, target, policyPath string, p *attest.Policy, timeout time.Duration) (*appraisal.Seen, error) {
	if info, err := os.Stat(target); err == nil && info.Mode().IsRegular() {
		return appraisal.SeenInFile(target, p.Bank())
	}
	if id, err := attest.ParseMachineID(target); err == nil {
		if target, err = a.waitingAt(cmd.Context(), id, timeout); err != nil {
			return nil, err
		}
	} else if mayBeNode(target) {
		wait := timeout
		if !cmd.Flags().Changed("timeout") {
			wait = lifecycle.OrderTimeout
		}
		report, err := a.verifyNode(cmd.Context(), target, policyPath, wait)
		if err != nil {
			return nil, err
		}
		if report != nil {
			return appraisal.SeenBy(report, p)
		}
	}
	cfg, err := a.target(target, policyPath, string(attest.PurposeMachine), "")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
	defer cancel()
	report, err := appraisal.Verify(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return appraisal.SeenBy(report, p)
}

// waitingAt prints the cluster's record of a machine that waits, and returns the machine's address.
func (a *app) waitingAt(ctx context.Context, id attest.MachineID, timeout time.Duration) (string, error) {
	dir, err := a.view()
	if err != nil {
		return "", err
	}
	defer func() { _ = dir.Close() }()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	w, err := policies.WaitingMachine(ctx, dir, id)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(a.stderr, "The cluster's record, which is unverified: refused with %s; image %s, firmware %s; %s\n", w.Reason, named(w.Image), named(w.Class), dash(w.Differs))
	return w.Address, nil
}

// Errors of an explanation that found a difference or a refusal.
var (
	errDiffers = errors.New("what the machine booted differs")
	errRefused = errors.New("the machine is refused for another reason than its boot")
)

func (a *app) showExplanation(e *appraisal.Explanation) error {
	differs := len(e.Differences)+len(e.Rules) > 0
	for _, f := range e.Fits {
		differs = differs || len(f.PCRs) > 0
	}
	var end error
	switch {
	case differs:
		end = &shown{errDiffers}
	case e.Refusal != nil:
		end = &shown{errRefused}
	}
	if a.output == outputJSON {
		return errors.Join(a.json(e), end)
	}
	fmt.Fprintf(a.stdout, "From  %s\n", e.From)
	if !e.Verified {
		fmt.Fprintln(a.stdout, "      It is not verified: the program that wrote it could choose its content.")
	}
	if r := e.Refusal; r != nil {
		fmt.Fprintf(a.stdout, "      Refused with %s: %s\n", r.Reason, r.Message)
	}
	for _, f := range e.Fits {
		if len(f.PCRs) == 0 {
			fmt.Fprintf(a.stdout, "\nThe PCRs are those of %s %s.\n", f.Kind, f.Name)
			continue
		}
		fmt.Fprintf(a.stdout, "\nNo %s of the policy has these PCRs. The closest is %s:\n", f.Kind, f.Name)
		for _, r := range f.PCRs {
			fmt.Fprintf(a.stdout, "  PCR %-2d  %s\n          expected %s\n          seen     %s\n", r.PCR, explain.Meanings[r.PCR], r.Expected, r.Seen)
		}
	}
	for _, r := range e.Rules {
		fmt.Fprintf(a.stdout, "\nA rule over the event log is violated: %s\n", r)
	}
	if len(e.OtherImage) > 0 {
		fmt.Fprintf(a.stdout, "\nThe file of --image is not the policy's image: it gives other values in PCR %s. Name the image from which the policy was made.\n", strings.Trim(fmt.Sprint(e.OtherImage), "[]"))
	}
	if len(e.Differences) > 0 {
		fmt.Fprintln(a.stdout, "\nCompared with the image, measurement by measurement:")
	}
	for _, d := range e.Differences {
		fmt.Fprintf(a.stdout, "  PCR %-2d  measurement %d: %s\n", d.PCR, d.Position, d.String())
		for _, side := range []struct {
			name string
			step *explain.Step
		}{{"expected", d.Expected}, {"seen    ", d.Seen}} {
			if side.step != nil {
				fmt.Fprintf(a.stdout, "          %s digest %s\n", side.name, hex.EncodeToString(side.step.Digest))
			}
		}
	}
	if len(e.Log) > 0 {
		fmt.Fprintln(a.stdout, "\nThe machine's event log has in the PCRs that differ:")
	}
	for _, s := range e.Log {
		fmt.Fprintf(a.stdout, "  PCR %-2d  %s, digest %s\n", s.PCR, s.What, hex.EncodeToString(s.Digest))
	}
	switch r := e.Refusal; {
	case differs:
	case r != nil:
		fmt.Fprintf(a.stdout, "\nThe machine's boot does not differ. The refusal above has another reason. %s\n", r.Remedy)
		if e.Hardware != "" {
			fmt.Fprintf(a.stdout, "\nHardware  %s\n", e.Hardware)
		}
	default:
		fmt.Fprintln(a.stdout, "\nNothing differs.")
	}
	return end
}
