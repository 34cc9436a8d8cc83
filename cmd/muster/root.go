package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// Values of --output.
const (
	outputAuto  = "auto"
	outputPlain = "plain"
	outputJSON  = "json"
)

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "muster",
		Short: "Make Kubernetes clusters of machines that prove what they booted",
		Long: `Muster makes Kubernetes clusters of machines that prove by attestation what they booted.

A first cluster:
  muster policy from-measurements measurements.json --ek-root ca.pem --machine-id ID --node-cidr 10.0.0.0/16 -o policy.yaml
  muster verify MACHINE:9000 --policy policy.yaml
  muster init --name prod --endpoint MACHINE:9000 --init-secret-file init.secret --policy policy.yaml …`,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if !slices.Contains([]string{outputAuto, outputPlain, outputJSON}, a.output) {
				return usagef("--output %q: want auto, plain or json", a.output)
			}
			return nil
		},
	}
	root.PersistentFlags().StringVar(&a.output, "output", outputAuto, "auto: a progress bar on a terminal, else lines; plain: lines; json: one object per line")
	root.PersistentFlags().StringVar(&a.directory, "directory", "", "owner's folder of the cluster (default: the one ./muster-* there is)")
	root.AddCommand(a.initCommand(), a.installCommand(), a.statusCommand(), a.doctorCommand(), a.drainCommand(), a.rebootCommand(), a.rolloutCommand(), a.upgradeCommand(), a.rotateCommand(), a.backupCommand(), a.restoreCommand(), a.uninstallCommand(), a.policyCommand(), a.collateralCommand(), a.verifyCommand(), a.approveCommand(), a.explainCommand(),
		a.enrollCommand(), a.banCommand(), a.unbanCommand(), a.forgetCommand(), a.replaceCommand(), a.resetCommand(), a.recoverCommand(), a.componentsCommand(), a.encryptionConfigCommand(), a.kubeconfigCommand(), a.keyCommand(), a.initSecretCommand(), a.versionCommand())
	a.completions(root)
	return root
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of this build", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			info := buildinfo.Read()
			if a.output == outputJSON {
				return a.json(info)
			}
			_, err := fmt.Fprintln(a.stdout, "muster", info)
			return err
		},
	}
}

// folder returns the path of the owner's folder.
func (a *app) folder() (string, error) {
	if a.directory != "" {
		return a.directory, nil
	}
	found, err := filepath.Glob("muster-*")
	if err != nil {
		return "", err
	}
	found = slices.DeleteFunc(found, func(p string) bool {
		_, err := os.Stat(filepath.Join(p, "cluster.json"))
		return err != nil
	})
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", usagef("there is no owner's folder ./muster-NAME here: name it by --directory, or create one with muster init")
	default:
		return "", usagef("there are several owners' folders here (%v): name one by --directory", found)
	}
}

// view opens the owner's folder for reading.
func (a *app) view() (*ownerdir.Dir, error) {
	path, err := a.folder()
	if err != nil {
		return nil, err
	}
	return ownerdir.View(path)
}

// open opens the owner's folder for reading and writing.
func (a *app) open() (*ownerdir.Dir, error) {
	path, err := a.folder()
	if err != nil {
		return nil, err
	}
	return ownerdir.Open(path)
}

// remember records the cluster's present state in the owner's folder. The command itself is already done, so an error is only printed. It returns
// only errors that an owner must not overlook: the cluster is older than the record ([recovery.ErrRolledBack], B7), its policy is not the owner's, or
// the record is damaged.
func (a *app) remember(ctx context.Context, dir *ownerdir.Dir) error {
	kube, err := access.Connect(dir)
	if err == nil {
		err = recovery.RecordState(ctx, dir, kube)
	}
	file := dir.File(ownerdir.KnownFile)
	switch {
	case err == nil:
	case errors.Is(err, recovery.ErrRolledBack):
		fmt.Fprintf(a.stderr, "%s: %v. %s\n", file, err, clusterapi.BehindRemedy)
		return err
	case attest.ReasonOf(err) == attestv1.Reason_REASON_POLICY_SIGNATURE:
		fmt.Fprintf(a.stderr, "Nothing was recorded in %s: %v. %s\n", file, err, problem.Remedy(err))
		return err
	case errors.Is(err, ownerdir.ErrUnreadable):
		fmt.Fprintf(a.stderr, "Note: %v. Nothing was recorded. %s\n", err, recovery.UnreadableRemedy)
		return err
	case errors.Is(err, recovery.ErrRestoring):
		fmt.Fprintf(a.stderr, "Note: %s: %v. %s\n", file, err, recovery.RestoreRemedy)
	default:
		fmt.Fprintf(a.stderr, "Note: %s: %v. A recovery is compared with that file; muster status writes it again.\n", file, err)
	}
	return nil
}

// report returns the reporter for --output: lines for people go to standard error, lines for programs to standard
// output.
func (a *app) report(steps int) progress.Reporter {
	if a.output == outputJSON {
		return progress.New(progress.Config{Out: a.stdout, Format: progress.JSON, Steps: steps})
	}
	if f, ok := fileBelow(a.stderr); ok && a.output == outputAuto && term.IsTerminal(int(f.Fd())) {
		width, _, err := term.GetSize(int(f.Fd()))
		if err != nil {
			width = 0
		}
		return progress.New(progress.Config{Out: f, Format: progress.Bar, Steps: steps, Width: width})
	}
	return progress.New(progress.Config{Out: a.stderr, Format: progress.Plain, Steps: steps})
}

func (a *app) json(v any) error {
	enc := json.NewEncoder(a.stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table writes rows; the first is the heading.
func (a *app) table(rows [][]string) error {
	w := tabwriter.NewWriter(a.stdout, 0, 4, 3, ' ', 0)
	for _, r := range rows {
		for i, cell := range r {
			if i > 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, cell)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// quietLibraries stops client-go and helm from writing between the command's lines; they return their relevant errors.
func quietLibraries() {
	quiet := slog.New(slog.DiscardHandler)
	klog.SetSlogLogger(quiet)
	ctrllog.SetLogger(logr.FromSlogHandler(quiet.Handler()))
	slog.SetDefault(quiet)
}
