// Command bootstrapper runs on every machine: it makes the machine a node (run), and then provides the node's services with
// evidence of the machine (attester).
package main

import (
	"context"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/services/bootstrapper"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/hwreport"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/services/bootstrapper/reattestation"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
)

const usage = `usage: bootstrapper COMMAND [flags]

  unlock    open this machine's state disk, in the initramfs
  run       make this machine a node: the first one of a cluster, or one more
  attester  provide the services on this machine, and its cluster, with evidence of it
  accepted  check that this machine's state disk was opened under a policy not older than its journal's
  renew     renew the certificates of this node
  orders    execute the owner's orders to this machine
  reset     erase the header of this machine's state disk, if its owner has ordered it
  upgrade   upgrade this node to another release of Kubernetes, if its owner has ordered it
  rotate    do a phase of a key's rotation on this control plane, if its owner has ordered it
  doctor    find what prevents this machine from becoming a node, with remedies
  version   print the version of this build

bootstrapper COMMAND -h lists a command's flags.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "bootstrapper:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return flag.ErrHelp
	}
	flags := flag.NewFlagSet("bootstrapper "+args[0], flag.ContinueOnError)
	flags.SetOutput(stderr)
	image := flags.String("image", metadata.ImagePath, "the image's measured configuration")
	lock := flags.String("tpm-lock", tpm.DefaultLock, "file whose lock serializes the users of the TPM")
	meta := flags.String("metadata", metadata.MachinePath, "the machine's metadata")
	record := flags.String("journal", journal.DefaultPath, "the machine's journal")
	screen := flags.String("console", console.DefaultPath, "terminal that shows what the machine waits for, if there is one")
	dir, output, roots := attester.Dir, "plain", ""
	commands := map[string]func() error{
		"unlock":   func() error { return runUnlock(ctx, *image, *meta, *lock, *screen, logger(stderr)) },
		"run":      func() error { return runBootstrapper(ctx, *image, *meta, *record, *lock, *screen, logger(stderr)) },
		"attester": func() error { return runAttester(ctx, *image, *meta, *record, dir, *lock, logger(stderr)) },
		"accepted": func() error { return runAccepted(*image, *record) },
		"renew":    func() error { return runRenewal(ctx, *image, *record, *lock, logger(stderr)) },
		"orders":   func() error { return runOrders(ctx, *image, *meta, *record, *lock, logger(stderr)) },
		"reset":    func() error { return runReset(ctx, *image, *record, logger(stderr)) },
		"upgrade":  func() error { return runUpgrade(ctx, *image, *record, logger(stderr)) },
		"rotate":   func() error { return runRotate(ctx, *image, *meta, *record, *lock, logger(stderr)) },
		"doctor": func() error {
			if output != "plain" && output != "json" {
				return fmt.Errorf("--output %q: want plain or json", output)
			}
			return runDoctor(ctx, *image, *meta, *record, *lock, roots, output == "json", stdout)
		},
		"version": func() error {
			_, err := fmt.Fprintln(stdout, "bootstrapper", buildinfo.Read())
			return err
		},
	}
	do, known := commands[args[0]]
	switch args[0] {
	case "attester":
		flags.StringVar(&dir, "dir", dir, "folder of the services' sockets")
	case "doctor":
		flags.StringVar(&output, "output", output, "plain or json")
		flags.StringVar(&roots, "ek-roots", roots, "file of the authorities that the owner's policy lists, PEM (default: those of the image)")
	}
	if !known {
		fmt.Fprint(stderr, usage)
		return fmt.Errorf("there is no command %q", args[0])
	}
	if err := parse(flags, args[1:]); err != nil {
		return err
	}
	if err := noCoreDumps(); err != nil {
		return err
	}
	return do()
}

func parse(flags *flag.FlagSet, args []string) error {
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return nil
}

func logger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewJSONHandler(w, nil)).With("version", buildinfo.Read().Version)
}

// openTPM returns the machine's TPM. The folder of its lock file is on a tmpfs that is empty after each boot.
func openTPM(img *metadata.Image, lock string) (*tpm.TPM, error) {
	if err := os.MkdirAll(filepath.Dir(lock), 0o755); err != nil {
		return nil, err
	}
	return tpm.Open(img.TPM.Device, tpm.WithLock(lock)), nil
}

func newAttester(img *metadata.Image, device *tpm.TPM, p attest.Purpose) (*tpm2.Attester, error) {
	bank, err := tpm.ParseBank(img.TPM.Bank)
	if err != nil {
		return nil, err
	}
	azure := provider.This("").Cloud() == metadata.ProviderAzure
	cfg := tpm2.Config{TPM: device, Purpose: p, Bank: bank, Hardware: hwreport.New(device, azure)}
	// A machine without the file has no event log, which policies do not need: they check PCRs.
	if _, err := os.Stat(img.TPM.EventLog); err == nil {
		cfg.EventLog = img.TPM.EventLog
	}
	return tpm2.NewAttester(cfg)
}

// openConsole returns the machine's console. If it can't be opened, the machine works without one.
func openConsole(path string, log *slog.Logger) (c *console.Console, done func()) {
	c, err := console.Open(path)
	if err != nil {
		log.Warn("the console shows no messages", "err", err)
	}
	return c, func() { _ = c.Close() }
}

// noCoreDumps keeps the contents of this process's memory off the disk (K3).
func noCoreDumps() error {
	if err := syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{}); err != nil {
		return fmt.Errorf("turn core dumps off: %w", err)
	}
	return nil
}

func newVerifier(roots []*x509.Certificate) (attest.Verifier, error) {
	return tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now, KnownPairs: 64})
}

func runBootstrapper(ctx context.Context, image, meta, record, lock, screen string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	device, err := openTPM(img, lock)
	if err != nil {
		return err
	}
	own, err := newAttester(img, device, attest.PurposeMachine)
	if err != nil {
		return err
	}
	public, err := newAttester(img, device, attest.PurposePublic)
	if err != nil {
		return err
	}
	terminal, done := openConsole(screen, log)
	defer done()
	return bootstrapper.Serve(ctx, bootstrapper.Options{
		Config: bootstrapper.Config{WriteClusterState: clusterobjects.Write, CleanEtcd: etcd.Clean, Config: provision.Config{
			Image: img, Metadata: newSources(img, meta, log).start(ctx),
			Journal: journal.Open(record), Machine: machine.Real{}, Root: "/", TPM: device, Attester: own,
			NewVerifier: newVerifier, Components: component.DefaultLimits, Timing: provision.DefaultTiming, Console: terminal, Log: log,
		}},
		Public: public,
	})
}

func runAttester(ctx context.Context, image, meta, record, dir, lock string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	device, err := openTPM(img, lock)
	if err != nil {
		return err
	}
	return bootstrapper.ServeAttester(ctx, bootstrapper.AttesterOptions{
		Dir: dir, Metrics: img.Listen.AttesterMetrics, Log: log,
		NewAttester: func(p attest.Purpose) (attest.Attester, error) { return newAttester(img, device, p) },
		Reattest: reattestation.Config{
			Image: img, Metadata: func() (*metadata.Machine, error) { return metadata.LoadMachine(meta, metadata.RunPath) }, Journal: journal.Open(record).Load, Policy: journal.Open(filepath.Join(filepath.Dir(record), "attester", "policy")),
			Root: "/", TPM: device, NewVerifier: newVerifier, Timing: reattestation.DefaultTiming,
		},
	})
}
