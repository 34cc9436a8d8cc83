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
		Short: "Open the state disk of a control plane that no joinservice can help",
		Long: `For a control plane that waits for its disk's key, since no joinservice runs that could give it: after a restart of the
whole cluster, mostly. The machine proves what it booted first; only the key of its own disk is sent, and to none that the folder's policy does not
accept. It must be the machine that the cluster was made on, or that --machine-id names, with the disk that the cluster said last (known.json of the
owner's folder), or that --disk names. The machine tries the key before it answers.

A control plane whose disk was put back to an earlier copy, by what its TPM knows, starts nothing and waits at the same port. This command then shows
what that copy would revive, and asks; without a terminal, --accept-epoch N accepts it.

The machine compares the opened disk with the lists of software in the owner's folder. It starts nothing if its disk lists other software as installed:
use the newest copy of the folder, or --replace-software if this is the newest. With --uncompared, it runs what its disk has, also what an attacker who
was root on it has left there.

With --drill, proves on a cluster that is well that the owner's folder would do all this, and changes nothing. Do so every month.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if drill && len(args) > 0 {
				return usagef("--drill looks at the whole cluster: leave out the endpoint")
			}
			if drill && machine+disk != "" {
				return usagef("--drill looks at the whole cluster: leave out --machine-id and --disk")
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
	f.StringVar(&machine, "machine-id", "", "the machine that is expected there (default: the one that the cluster was made on)")
	f.StringVar(&disk, "disk", "", "UUID of its state disk, if the folder does not know it as the machine's")
	f.Uint64Var(&accept, "accept-epoch", 0, "accept that the machine goes on with an older copy of its disk, of this epoch of the cluster")
	f.BoolVar(&replace, "replace-software", false, "have the machine take the folder's lists of software, also if its disk lists other software: the folder is the newest")
	f.BoolVar(&none, "uncompared", false, "have the machine run what its disk has, without a comparison: only if all newer copies of the folder are lost")
	f.BoolVar(&drill, "drill", false, "prove on a cluster that is well that the owner's folder would recover it; changes nothing")
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
		_, err = fmt.Fprintf(a.stdout, "Machine %s goes on with epoch %d of the cluster. Once the API server answers, apply the policy, and ban, forget and erase again what is undone; muster doctor says what is missing.\n", r.Machine, r.Revived.Epoch)
		return err
	}
	text := "The state disk of machine %s is open, and the machine goes on to boot.\n"
	if r.Already {
		text = "The state disk of machine %s was open already: the key was not tried.\n"
	}
	_, err = fmt.Fprintf(a.stdout, text, r.Machine)
	return err
}

// askRevival asks at the terminal; nil: there is none.
func (a *app) askRevival() func(recovery.Revival) (bool, error) {
	ask := a.askEpoch()
	if ask == nil {
		return nil
	}
	return func(v recovery.Revival) (bool, error) { return ask(v.Lines(), v.Epoch) }
}

// askEpoch shows what the owner would accept, and asks at the terminal for the epoch's number; nil: there is none.
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
