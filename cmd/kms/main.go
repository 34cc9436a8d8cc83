// Command kms is the key service of a cluster: it derives disk keys from the root secret for attested
// joinservices, and for nobody else. It runs in a pod; see deploy/charts/muster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/muster-k8s/muster/internal/attester"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/internal/member"
	"github.com/muster-k8s/muster/services/kms"
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
	listen := flags.String("listen", ":9001", "address of the RPCs, over attested TLS")
	metrics := flags.String("metrics", ":9464", "address of metrics and probes, in plain HTTP: pod network or loopback only")
	socket := flags.String("attester", "/run/muster/attest/kms/attest.sock", "socket of this machine's attester for the purpose kms")
	owner := flags.String("owner-key", "", "the cluster owner's Ed25519 public key, 32 bytes in base64 (required)")
	rootDir := flags.String("root-dir", "/var/run/secrets/muster/root", "folder that the Secret muster-kms-root is mounted at")
	node := flags.String("node-name", "", "name of the node that this pod runs on, for the log")
	kubeconfig := flags.String("kubeconfig", "", "kubeconfig of the cluster; empty: that of the pod")
	if err := flags.Parse(args); err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(stderr, nil)).With("service", "kms", "node", *node)
	key, err := member.ParseOwnerKey(*owner)
	if err != nil {
		return fmt.Errorf("--owner-key: %w", err)
	}
	api, err := member.API(*kubeconfig)
	if err != nil {
		return err
	}
	api.UserAgent = "muster-kms/" + buildinfo.Read().Version
	client, err := attester.New(*socket)
	if err != nil {
		return err
	}
	defer client.Close()
	probes, err := new(net.ListenConfig).Listen(ctx, "tcp", *metrics)
	if err != nil {
		return fmt.Errorf("--metrics: %w", err)
	}
	rpcs, err := new(net.ListenConfig).Listen(ctx, "tcp", *listen)
	if err != nil {
		return errors.Join(fmt.Errorf("--listen: %w", err), probes.Close())
	}
	log.Info("starting", "version", buildinfo.Read().String(), "listen", rpcs.Addr().String(), "metrics", probes.Addr().String())
	return kms.Run(ctx, kms.Options{
		Listener: rpcs, Metrics: probes, Attester: client, Owner: key, RootDir: *rootDir, API: api, Audit: audit.NewStream(stdout), Log: log,
	})
}
