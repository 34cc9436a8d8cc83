package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/muster-k8s/muster/cmd/muster/owner/doctor"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func (a *app) recoverCommand() *cobra.Command {
	var (
		machine, disk string
		drill         bool
		replace, none bool
		accept        uint64
		timeout       time.Duration
	)
	cmd := &cobra.Command{
		Use:   "recover ENDPOINT [--machine-id ID] [--disk UUID] | --drill",
		Short: "Open the state disk of a control plane while no joinservice runs",
		Long: `For a control plane that waits for its disk's key while no joinservice runs, usually after a restart of the whole cluster. First the machine proves
what it booted. Only the key of its own disk is sent, and only if the folder's policy accepts the machine. It must be the cluster's first machine,
or the one that --machine-id names, with the disk recorded in known.json of the owner's folder, or the one that --disk names. The machine tries the
key before it answers.

If a control plane's disk is an earlier copy, by its TPM's counter, the machine starts nothing and waits at the same port. This command then shows
what that copy would undo, and asks; without a terminal, --accept-epoch N accepts it.

The machine compares the opened disk with the lists of software in the owner's folder. It starts nothing if its disk lists other software: use the
newest copy of the folder, or --replace-software if this copy is the newest. With --uncompared, it runs whatever is on its disk, including changes by
an attacker with root.

With --drill, it proves on a healthy cluster that the owner's folder is sufficient for a recovery, and changes nothing. Do so every month.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if drill && len(args) > 0 {
				return usagef("--drill checks the whole cluster: omit the endpoint")
			}
			if drill && machine+disk != "" {
				return usagef("--drill checks the whole cluster: omit --machine-id and --disk")
			}
			if replace && none {
				return usagef("--replace-software and --uncompared exclude each other")
			}
			if drill {
				return nil
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, fmt.Errorf("not done within %s: %w", timeout, context.DeadlineExceeded))
			defer cancel()
			if drill {
				path, err := a.folder()
				if err != nil {
					return err
				}
				return a.showReport(doctor.Drill(ctx, doctor.Config{Folder: path}))
			}
			var accepted *uint64
			if cmd.Flags().Changed("accept-epoch") {
				accepted = &accept
			}
			return a.recover(ctx, args[0], machine, disk, recovery.RecoverConfig{AcceptEpoch: accepted, ReplaceSoftware: replace, Uncompared: none})
		},
	}
	f := cmd.Flags()
	f.StringVar(&machine, "machine-id", "", "the expected machine (default: the cluster's first one)")
	f.StringVar(&disk, "disk", "", "UUID of its state disk, if the folder records another disk, or none, for the machine")
	f.Uint64Var(&accept, "accept-epoch", 0, "let the machine continue with an older copy of its disk, of this epoch of the cluster")
	f.BoolVar(&replace, "replace-software", false, "make the machine use the folder's lists of software even if its disk lists other software; only if this copy of the folder is the newest")
	f.BoolVar(&none, "uncompared", false, "make the machine run what is on its disk, without a comparison; only if all newer copies of the folder are lost")
	f.BoolVar(&drill, "drill", false, "prove on a healthy cluster that the owner's folder can recover it; changes nothing")
	f.DurationVar(&timeout, "timeout", 10*time.Minute, "how long to wait for the machine, or for all checks together")
	return cmd
}

func (a *app) recover(ctx context.Context, endpoint, machine, disk string, cfg recovery.RecoverConfig) error {
	addr, err := hostPort(endpoint, 9999)
	if err != nil {
		return usagef("endpoint: %w", err)
	}
	cfg.Addr, cfg.Ask = addr, a.askRevival()
	if machine != "" {
		id, err := attest.ParseMachineID(machine)
		if err != nil {
			return usagef("--machine-id: %w", err)
		}
		cfg.Machine = &id
	}
	if disk != "" {
		id, err := keys.ParseDiskID(disk)
		if err != nil {
			return usagef("--disk: %w", err)
		}
		cfg.Disk = &id
	}
	if cfg.Dir, err = a.view(); err != nil {
		return err
	}
	defer func() { _ = cfg.Dir.Close() }()
	cfg.Report = a.report(recovery.RecoverSteps)
	r, err := recovery.Recover(ctx, cfg)
	cfg.Report.Close()
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		line, err := json.Marshal(struct {
			Event string `json:"event"`
			*recovery.Recovery
		}{"result", r})
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.stdout, "%s\n", line)
		return err
	}
	if r.Revived != nil {
		_, err = fmt.Fprintf(a.stdout, "Machine %s continues with epoch %d of the cluster. Once the API server answers, apply the policy, and repeat the undone bans, removals and erasures; muster doctor shows what is missing.\n", r.Machine, r.Revived.Epoch)
		return err
	}
	text := "The state disk of machine %s is open, and the machine continues to boot.\n"
	if r.Already {
		text = "The state disk of machine %s was already open: the key was not tried.\n"
	}
	_, err = fmt.Fprintf(a.stdout, text, r.Machine)
	return err
}

// askRevival asks at the terminal; nil if there is none.
func (a *app) askRevival() func(recovery.Revival) (bool, error) {
	ask := a.askEpoch()
	if ask == nil {
		return nil
	}
	return func(v recovery.Revival) (bool, error) { return ask(v.Lines(), v.Epoch) }
}

// askEpoch shows what the owner would accept, and asks at the terminal for the epoch's number; nil if there is no terminal.
func (a *app) askEpoch() func(lines []string, epoch uint64) (bool, error) {
	in, out := os.Stdin, a.stderr
	if !term.IsTerminal(int(in.Fd())) || a.output == outputJSON {
		return nil
	}
	return func(lines []string, epoch uint64) (bool, error) {
		fmt.Fprintf(out, "\n%s\n", strings.Join(lines, "\n")) // the progress bar shows one line at a time
		fmt.Fprintf(out, "To accept it, type the epoch's number (%d): ", epoch)
		line, err := bufio.NewReader(in).ReadString('\n')
		if err != nil {
			return false, err
		}
		return strings.TrimSpace(line) == strconv.FormatUint(epoch, 10), nil
	}
}
