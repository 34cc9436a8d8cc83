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

	"github.com/muster-k8s/muster/cmd/muster/owner"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
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
		Use:   "verify ENDPOINT [--policy FILE] [--purpose machine|joinservice|kms]",
		Short: "Look at a machine: what it booted, and whether the policy accepts it",
		Long: `Runs the exchange of attested TLS with a machine, and shows what its evidence says beside what the policy
expects: image, firmware, drivers and Secure Boot, from the replayed event log. Nothing is sent but the exchange itself.
The exit code is 0 if the machine is accepted.

A machine that is in no cluster must be unlocked. With an owner's folder or --cluster-id, one that is locked to that
cluster is accepted too, and the purposes joinservice and kms can be looked at.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := a.target(args[0], policy, purpose, clusterID)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			sight, err := owner.Verify(ctx, cfg)
			if err != nil {
				return err
			}
			if !events {
				sight.Events = nil
			}
			return a.show(sight)
		},
	}
	f := cmd.Flags()
	f.StringVar(&policy, "policy", "", "policy to verify with (default: that of the owner's folder)")
	f.StringVar(&purpose, "purpose", string(attest.PurposeMachine), "what the evidence must have been made for")
	f.StringVar(&clusterID, "cluster-id", "", "cluster that the machine may be locked to (default: that of the owner's folder)")
	f.BoolVar(&events, "event-log", false, "show the event log")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait")
	return cmd
}

// target sets the values that flags leave out from the owner's folder.
func (a *app) target(endpoint, policyPath, purpose, clusterID string) (owner.VerifyConfig, error) {
	return a.targetBy(endpoint, policyPath, purpose, clusterID, func(text []byte) (*attest.Policy, error) {
		p, _, err := policyfile.Parse(text)
		return p, err
	})
}

// targetBy is target with a policy that parse reads.
func (a *app) targetBy(endpoint, policyPath, purpose, clusterID string, parse func([]byte) (*attest.Policy, error)) (owner.VerifyConfig, error) {
	var cfg owner.VerifyConfig
	port := 9000
	if attest.Purpose(purpose) == attest.PurposeJoinservice {
		port = clusterapi.Values{}.JoinPort()
	}
	addr, err := hostPort(endpoint, port)
	if err != nil {
		return cfg, usagef("endpoint: %w", err)
	}
	var text []byte
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
	if text, err = os.ReadFile(policyPath); err != nil {
		return cfg, err
	}
	p, err := parse(text)
	if err != nil {
		return cfg, fmt.Errorf("%s: %w", policyPath, err)
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
	case attest.PurposePublic:
		fallthrough
	default:
		return cfg, usagef("--purpose %q: want machine, joinservice or kms", purpose)
	}
	return cfg, nil
}

// show prints the evidence; a refused machine is an error.
func (a *app) show(s *owner.Report) error {
	if a.output == outputJSON {
		return errors.Join(a.json(s), s.Err)
	}
	if s.Machine != "" {
		fmt.Fprintf(a.stdout, "Machine        %s\nEndorsement    %s\nImage          %s\nClass          %s\nEK root        %s\nEK kind        %s\nNode lock      %s\nSecure Boot    %s\nTPM            firmware %s, %d resets, %d restarts\nAK name        %s\nEvidence       SHA-256 %s\n\n",
			s.Machine, endorsement(s), named(s.Image), named(s.Class), dash(s.Root), s.EKKind, s.Lock, s.SecureBoot, s.FirmwareVersion, s.ResetCount, s.RestartCount, s.AKName, s.EvidenceDigest)
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
	if s.Accepted {
		fmt.Fprintf(a.stdout, "Accepted by the policy of serial %d.\n", s.PolicySerial)
	} else {
		fmt.Fprintln(a.stdout, "Refused.")
	}
	return s.Err
}

// endorsement returns it with the virtual machine that it names.
func endorsement(s *owner.Report) string {
	if s.Instance == "" {
		return s.Endorsement
	}
	return s.Endorsement + ", " + s.Instance
}

// named returns a text for a name that the policy may not have.
func named(s string) string {
	if s == "" {
		return "none in the policy"
	}
	return s
}

func pcrVerdict(p owner.PCR) string {
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
