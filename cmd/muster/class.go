package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// classPCRs are the registers for which a machine class without rules has values.
var classPCRs = []int{0, 2, 3, 7}

func (a *app) addClassCommand() *cobra.Command {
	var (
		from, policy, machine string
		eventLog              bool
		timeout               time.Duration
	)
	cmd := &cobra.Command{
		Use:   "add-class NAME --from MACHINE:9000 [--machine-id ID] [--policy FILE]",
		Short: "Accept the firmware that a machine has, as a machine class of the policy",
		Long: `Runs the exchange of attested TLS with a machine, shows its values of PCR 0, 2, 3 and 7 and describes what its firmware
measured. It writes these values into the policy as a machine class, or with --event-log its present drivers, and its Secure
Boot keys if Secure Boot is on. So take the class from a machine that you trust: only you have handled it, or its maker
publishes the same values. At an address, another machine of the same provider can answer: --machine-id names the expected
one.

The policy must already accept the machine's TPM, image and node lock. The policy's serial is incremented. Compare the values
before muster init or muster policy apply puts the policy in force: until then the class accepts no machine. To discard the
class, remove it from the file.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if from == "" {
				return usagef("--from is missing: name the machine, MACHINE:9000")
			}
			var want *attest.MachineID
			if machine != "" {
				id, err := attest.ParseMachineID(machine)
				if err != nil {
					return usagef("--machine-id: %w", err)
				}
				want = &id
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return a.addClass(ctx, args[0], from, policy, want, eventLog)
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "the machine: HOST, or HOST:PORT of its bootstrapper (default port 9000)")
	f.StringVar(&machine, "machine-id", "", "the machine that must answer there, as the machine's console shows it (default: any that the policy's TPM roots certify)")
	f.StringVar(&policy, "policy", "", "policy to change (default: that of the owner's folder)")
	f.BoolVar(&eventLog, "event-log", false, "make rules over the event log, for machines whose firmware changes often: only its present drivers, and Secure Boot on with its keys if it is on; the firmware's own code (PCR 0) is then not checked")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait")
	return cmd
}

func (a *app) addClass(ctx context.Context, name, from, path string, machine *attest.MachineID, eventLog bool) error {
	cfg, err := a.targetBy(from, path, string(attest.PurposeMachine), "", policyfile.ParseForClass)
	if err != nil {
		return err
	}
	claims, sight, err := appraisal.Look(ctx, cfg)
	if err != nil {
		return err
	}
	if got := claims.Machine(); machine != nil && got != *machine {
		return attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "%s is the machine %s, not %s: check the address. Nothing was written", from, got, *machine)
	}
	c, err := policyfile.ClassOf(name, claims, eventLog)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	values := map[string]string{}
	for _, i := range classPCRs {
		values[strconv.Itoa(i)] = hex.EncodeToString(claims.PCR(i))
	}
	if a.output != outputJSON {
		a.showFirmware(sight, values)
	}
	if l := c.GetEventLog(); l != nil && l.GetSecureBoot() == nil {
		fmt.Fprintf(a.stderr, "Warning: Secure Boot is off on this machine, so class %s requires nothing about Secure Boot: it accepts machines with Secure Boot off, and on with any keys.\n", name)
	}
	path, serial, err := a.changePolicy(path, func(text []byte, serial uint64) ([]byte, error) { return policyfile.AddClass(text, serial, c) })
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		return a.json(map[string]any{"class": name, "policy": path, "serial": serial, "machine": sight.Machine, "secureBoot": sight.SecureBoot, "bank": sight.Bank, "pcrs": values, "firmware": sight.Firmware})
	}
	_, err = fmt.Fprintf(a.stdout, "Class %s is in %s, whose serial is now %d. Compare the values above before muster policy apply or muster init puts it in force.\n", name, path, serial)
	return err
}

// showFirmware prints the values that the owner compares with those that the machine's maker publishes.
func (a *app) showFirmware(sight *appraisal.Report, values map[string]string) {
	fmt.Fprintf(a.stdout, "Machine      %s\nSecure Boot  %s\nBank         %s\n", sight.Machine, sight.SecureBoot, sight.Bank)
	for _, i := range classPCRs {
		fmt.Fprintf(a.stdout, "PCR %d        %s\n", i, values[strconv.Itoa(i)])
	}
	for _, line := range sight.Firmware {
		fmt.Fprintf(a.stdout, "firmware     %s\n", line)
	}
}
