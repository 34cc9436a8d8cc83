// Command kms is the key service of a cluster: it derives disk keys from the root secret for attested joinservices only. It
// runs in a pod; see deploy/charts/muster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/service"
	"github.com/muster-k8s/muster/services/kms"
	"github.com/muster-k8s/muster/trust/attest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kms:", err)
		os.Exit(1)
	}
}

// run writes audit records to stdout and its log to stderr.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("kms", flag.ContinueOnError)
	flags.SetOutput(stderr)
	common := service.NewFlags(flags, attest.PurposeKMS, ":9001")
	rootDir := flags.String("root-dir", "/var/run/secrets/muster/root", "folder that the Secret muster-kms-root is mounted at")
	if err := flags.Parse(args); err != nil {
		return err
	}
	p, err := common.Open(ctx, stderr)
	if err != nil {
		return err
	}
	defer p.Close()
	return kms.Run(ctx, kms.Options{
		Listener: p.Listener, Metrics: p.Metrics, Probes: p.Probes, Attester: p.Attester, Owner: p.Owner, LowestSerial: p.LowestSerial, RootDir: *rootDir, API: p.API, Audit: audit.NewStream(stdout), Log: p.Log,
	})
}
