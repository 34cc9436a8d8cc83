package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

func (a *app) verifyCommand() *cobra.Command {
	var (
		policy, purpose, clusterID string
		events                     bool
		timeout                    time.Duration
	)
	cmd := &cobra.Command{
		Use:   "verify NODE|ENDPOINT [--policy FILE] [--purpose machine|joinservice|kms]",
		Short: "Verify a machine: what it booted, and whether the policy accepts it",
		Long: `Compares a machine's evidence with the policy: image, firmware, drivers and Secure Boot, from the replayed
event log. The exit code is 0 if the machine is accepted.

With the address of a machine, it runs the exchange of attested TLS, and sends nothing else.

With the name of a running node, which serves no port, it sends the machine an order that is signed with the owner's key. The machine gets it
with its next attestation, within five minutes, and makes new evidence for it, which the cluster passes on. This program verifies the
evidence itself: the cluster can delay or refuse it, but can't substitute other evidence. If the folder has a cluster, a host name without a
dot is a node's: write an address as HOST:9000.

A machine that is not in a cluster must be unlocked. With an owner's folder or --cluster-id, a machine that is
locked to that cluster is also accepted, and the purposes joinservice and kms can be verified.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if purpose == string(attest.PurposeMachine) && clusterID == "" && mayBeNode(args[0]) {
				wait := timeout
				if !cmd.Flags().Changed("timeout") {
					wait = lifecycle.OrderTimeout
				}
				sight, err := a.verifyNode(cmd.Context(), args[0], policy, wait)
				if err != nil {
					return err
				}
				if sight != nil {
					return a.show(sight, events)
				}
			}
			cfg, err := a.target(args[0], policy, purpose, clusterID)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			sight, err := appraisal.Verify(ctx, cfg)
			if err != nil {
				return err
			}
			return a.show(sight, events)
		},
	}
	f := cmd.Flags()
	f.StringVar(&policy, "policy", "", "policy to verify with (default: that of the owner's folder)")
	f.StringVar(&purpose, "purpose", string(attest.PurposeMachine), "required purpose of the evidence")
	f.StringVar(&clusterID, "cluster-id", "", "cluster that the machine may be locked to (default: that of the owner's folder)")
	f.BoolVar(&events, "event-log", false, "show the event log")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait (of a node: default 25m)")
	return cmd
}

// target sets the values that flags leave out from the owner's folder.
func (a *app) target(endpoint, policyPath, purpose, clusterID string) (appraisal.VerifyConfig, error) {
	return a.targetBy(endpoint, policyPath, purpose, clusterID, parsePolicy)
}

func parsePolicy(text []byte) (*attest.Policy, error) {
	p, _, err := policyfile.Parse(text)
	return p, err
}

func readPolicy(path string, parse func([]byte) (*attest.Policy, error)) (*attest.Policy, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	p, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// targetBy is [target] with another parser of the policy.
func (a *app) targetBy(endpoint, policyPath, purpose, clusterID string, parse func([]byte) (*attest.Policy, error)) (appraisal.VerifyConfig, error) {
	var cfg appraisal.VerifyConfig
	port := 9000
	if attest.Purpose(purpose) == attest.PurposeJoinservice {
		port = clusterapi.Values{}.JoinPort()
	}
	addr, err := hostPort(endpoint, port)
	if err != nil {
		return cfg, usagef("endpoint: %w", err)
	}
	if dir, err := a.view(); err == nil {
		defer func() { _ = dir.Close() }()
		if clusterID == "" {
			clusterID = dir.Cluster().ClusterID
		}
		if policyPath == "" {
			policyPath = dir.File(ownerdir.PolicyFile)
		}
	} else if a.directory != "" {
		return cfg, err
	}
	if policyPath == "" {
		return cfg, usagef("no policy to verify with: give --policy or --directory")
	}
	p, err := readPolicy(policyPath, parse)
	if err != nil {
		return cfg, err
	}
	cfg.Target = peerdial.Target{Addr: addr, Purpose: attest.Purpose(purpose), Policy: p}
	if clusterID != "" {
		id, err := hex.DecodeString(clusterID)
		if err != nil || len(id) != 32 {
			return cfg, usagef("--cluster-id: want 64 hexadecimal digits")
		}
		cfg.ClusterID = (*[32]byte)(id)
		cfg.Locks = append(cfg.Locks, attest.LockedTo(*cfg.ClusterID))
	}
	switch cfg.Purpose {
	case attest.PurposeMachine:
		cfg.Locks = append(cfg.Locks, attest.Unlocked())
	case attest.PurposeJoinservice, attest.PurposeKMS:
		if cfg.ClusterID == nil {
			return cfg, usagef("--purpose %s: a service runs in a cluster: give --cluster-id or --directory", purpose)
		}
	case attest.PurposePublic, attest.PurposeOrder:
		fallthrough
	default:
		return cfg, usagef("--purpose %q: want machine, joinservice or kms", purpose)
	}
	return cfg, nil
}

// show prints the evidence, with the event log if events is set; a refused machine is an error.
func (a *app) show(s *appraisal.Report, events bool) error {
	if !events {
		s.Events = nil
	}
	if a.output == outputJSON {
		return errors.Join(a.json(s), s.Err)
	}
	disk := ""
	if s.Disk != "" {
		disk = "State disk     " + s.Disk + " (the cluster's record: unverified)\n"
	}
	if s.Machine != "" {
		fmt.Fprintf(a.stdout, "Machine        %s\nEndorsement    %s\nImage          %s\nClass          %s\nEK root        %s\nEK kind        %s\nNode lock      %s\nSecure Boot    %s\nHardware       %s\nTPM            firmware %s, %d resets, %d restarts\nAK name        %s\nEvidence       SHA-256 %s\n%s\n",
			s.Machine, endorsement(s), named(s.Image), named(s.Class), dash(s.Root), s.EKKind, s.Lock, s.SecureBoot, dash(s.Hardware), s.FirmwareVersion, s.ResetCount, s.RestartCount, s.AKName, s.EvidenceDigest, disk)
		rows := [][]string{{"EK CERTIFICATE CHAIN", "SERIAL NUMBER", "SHA-256 OF ITS KEY"}}
		for _, c := range s.Chain {
			rows = append(rows, []string{c.Subject, c.Serial, c.Key})
		}
		if err := a.table(rows); err != nil {
			return err
		}
		fmt.Fprintln(a.stdout)
		rows = [][]string{{"PCR", "SEEN (" + s.Bank + ")", "POLICY"}}
		for _, p := range s.PCRs {
			rows = append(rows, []string{fmt.Sprint(p.Index), p.Seen, pcrVerdict(p)})
		}
		if err := a.table(rows); err != nil {
			return err
		}
		fmt.Fprintln(a.stdout)
		for _, f := range s.Firmware {
			fmt.Fprintf(a.stdout, "firmware  %s\n", f)
		}
		for _, e := range s.Events {
			fmt.Fprintf(a.stdout, "event     %s\n", e)
		}
		fmt.Fprintln(a.stdout)
	}
	if r := s.Record; r != nil {
		fmt.Fprintf(a.stdout, "The cluster's record of %s, which is unverified: an attacker who controls the cluster can write it.\n\nMachine        %s\n%sVerdict        %s\n\n", s.Node, r.Machine, disk, recorded(r))
	}
	switch {
	case s.Accepted:
		fmt.Fprintf(a.stdout, "Accepted by the policy of serial %d.\n", s.PolicySerial)
	case s.Record != nil:
		fmt.Fprintln(a.stdout, "Not verified.")
	default:
		fmt.Fprintln(a.stdout, "Refused.")
	}
	return s.Err
}

// endorsement returns the endorsement with its virtual machine, if it names one.
func endorsement(s *appraisal.Report) string {
	if s.Instance == "" {
		return s.Endorsement
	}
	return s.Endorsement + ", " + s.Instance
}

// named returns the name, or a text if the policy has none.
func named(s string) string {
	if s == "" {
		return "none in the policy"
	}
	return s
}

func pcrVerdict(p appraisal.PCR) string {
	switch {
	case p.Match == nil:
		return "-"
	case *p.Match:
		return "ok"
	}
	var s []string
	if p.Expected != "" && p.Expected != p.Seen {
		s = append(s, "expected "+p.Expected)
	}
	if p.Why != "" {
		s = append(s, p.Why)
	}
	return "DIFFERS: " + strings.Join(s, "; ")
}
