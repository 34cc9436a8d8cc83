package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/install"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/rotation"
)

type ownerKeyFlags struct {
	prepare, commit, finish, dryRun, yes bool
	key                                  string
	patience, timeout                    time.Duration
}

func (a *app) rotateOwnerKeyCommand() *cobra.Command {
	var f ownerKeyFlags
	cmd := &cobra.Command{
		Use:   "owner-key --prepare|--commit|--finish [--dry-run]",
		Short: "Replace the key that signs policies and orders",
		Long: `Replaces owner.key, the key that signs policies and orders, in three steps. Machines accept the keys in their image,
so images are built and rolled out between the steps:

  --prepare  makes the new key in the owner's folder, and prints ownerKeys of an image that has both keys
  --commit   once all running nodes have such an image: the services accept both keys, the new key signs from now
             on, and the policy gets its signature and the next serial
  --finish   once all running nodes have an image with the new key: the services accept no other one

Copy the owner's folder after each step. To continue an interrupted step, run the same command again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.rotateOwnerKey(cmd, f) },
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.prepare, "prepare", false, "make the new key")
	flags.BoolVar(&f.commit, "commit", false, "sign with the new key")
	flags.BoolVar(&f.finish, "finish", false, "drop the old key")
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would be done, and change nothing")
	flags.BoolVar(&f.yes, "yes", false, "don't ask")
	flags.StringVar(&f.key, "key", "", "with --prepare: file of the new key from muster key new (default: a new key)")
	flags.DurationVar(&f.patience, "wait", 5*time.Minute, "how long the services may take to become ready before they are rolled back, and again for the rollback")
	flags.DurationVar(&f.timeout, "timeout", 15*time.Minute, "time limit of the whole command, without a rollback")
	cmd.MarkFlagsOneRequired("prepare", "commit", "finish")
	cmd.MarkFlagsMutuallyExclusive("prepare", "commit", "finish")
	return cmd
}

func (a *app) rotateOwnerKey(cmd *cobra.Command, f ownerKeyFlags) (err error) {
	cfg := rotation.OwnerKeyConfig{Step: rotation.OwnerKeyPrepare, Report: a.steps("cluster")}
	switch {
	case f.commit:
		cfg.Step = rotation.OwnerKeyCommit
	case f.finish:
		cfg.Step = rotation.OwnerKeyFinish
	}
	if f.key != "" {
		if !f.prepare {
			return usagef("--key is for --prepare")
		}
		if cfg.Key, err = ownerdir.ReadKey(f.key); err != nil {
			return err
		}
	}
	open := a.open
	if f.dryRun {
		open = a.view
	}
	if cfg.Dir, err = open(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cfg.Dir.Close()) }()
	ctx, cancel := context.WithTimeoutCause(cmd.Context(), f.timeout, fmt.Errorf("not done within %s: %w", f.timeout, context.DeadlineExceeded))
	defer cancel()
	report := a.report(install.UpgradeSteps)
	defer report.Close()
	cfg.Services = rotation.ServiceKeys{UpgradeConfig: install.UpgradeConfig{Dir: cfg.Dir, Patience: f.patience, Report: report, Log: slog.New(slog.DiscardHandler)}}
	plan, err := rotation.PlanOwnerKey(ctx, cfg)
	if err != nil {
		return err
	}
	switch {
	case f.dryRun && a.output == outputJSON:
		err = a.json(plan)
	case f.dryRun:
		showOwnerKeyPlan(a.stdout, plan)
	case !f.yes && !f.prepare:
		showOwnerKeyPlan(a.stderr, plan)
	}
	if err == nil {
		err = plan.Err()
	}
	if err != nil || f.dryRun {
		return err
	}
	if !f.yes && !f.prepare {
		if err := a.confirm(ctx, cmd.InOrStdin(), "owner-key"); err != nil {
			return err
		}
	}
	if plan, err = rotation.RotateOwnerKey(ctx, cfg); err != nil {
		return err
	}
	report.Close()
	return a.ownerKeyResult(cfg.Step, plan)
}

func (a *app) ownerKeyResult(step rotation.OwnerKeyStep, p *rotation.OwnerKeyPlan) error {
	if a.output == outputJSON {
		return a.json(struct {
			Step      rotation.OwnerKeyStep `json:"step"`
			OwnerKeys []string              `json:"ownerKeys"`
		}{step, p.ImageKeys()})
	}
	text := map[rotation.OwnerKeyStep]string{
		rotation.OwnerKeyPrepare: "The new key is in the owner's folder: copy the folder. Build an image with both keys in image.yaml, and roll it out:\n\n%s\nThen run `muster rotate owner-key --commit`.\n",
		rotation.OwnerKeyCommit:  "The new key signs: copy the owner's folder. Build an image with this key alone in image.yaml and the serial of the policy in force as lowestPolicySerial, roll it out, and remove the images with the old key from the policy (muster policy remove-image):\n\n%s\nThen run `muster rotate owner-key --finish`.\n",
		rotation.OwnerKeyFinish:  "The cluster accepts only the new key: copy the owner's folder. Remove images with the old key from the policy. image.yaml has:\n\n%s",
	}[step]
	_, err := fmt.Fprintf(a.stdout, text, imageKeys(p))
	return err
}

// imageKeys returns ownerKeys for image.yaml.
func imageKeys(p *rotation.OwnerKeyPlan) string {
	var out strings.Builder
	out.WriteString("ownerKeys:\n")
	for _, k := range p.ImageKeys() {
		fmt.Fprintf(&out, "- %q\n", k)
	}
	return out.String()
}

func showOwnerKeyPlan(w io.Writer, p *rotation.OwnerKeyPlan) {
	fmt.Fprintf(w, "Rotation of the owner's key: %s\n  signs     %s\n  next      %s\n  previous  %s\n", p.Step, p.Signs, dash(p.Next), dash(p.Previous))
	for _, n := range p.Nodes {
		state := "running"
		if !n.Running {
			state = "not running"
		}
		fmt.Fprintf(w, "  %-30s  %-11s  %d keys in its image; the new one: %t, the old one: %t\n", n.Name, state, len(n.Keys), n.New, n.Old)
	}
	for _, n := range p.Notes {
		fmt.Fprintf(w, "Note: %s\n", n)
	}
}
