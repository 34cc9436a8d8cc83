// Command joinservice admits machines to its cluster. It runs in a pod on each control plane; see
// deploy/charts/muster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/internal/service"
	"github.com/muster-k8s/muster/services/joinservice"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/services/joinservice/token"
	"github.com/muster-k8s/muster/trust/attest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "joinservice:", err)
		os.Exit(1)
	}
}

// run is the program; change is called with the configuration from the flags.
func run(ctx context.Context, args []string, stderr io.Writer, changes ...func(*joinservice.Options)) error {
	flags := flag.NewFlagSet("joinservice", flag.ContinueOnError)
	flags.SetOutput(stderr)
	common := service.NewFlags(flags, attest.PurposeJoinservice, ":9090")
	kms := flags.String("kms", "https://muster-kms.muster-system.svc:9001", "URL of the key service")
	kmsToken := flags.String("kms-token", "/var/run/secrets/muster/kms/token", "file of the projected service-account token for the key service")
	pki := flags.String("pki", "/etc/kubernetes/pki", "folder of the control plane's PKI files")
	maxAge := flags.Duration("verdict-max-age", 15*time.Minute, "how old the last verdict on a node's machine may be when its certificates are renewed; nodes attest three times within this time, and at least every 5m")
	credential := flags.String("join-credential", string(token.CredentialCertificate), "how kubeadm discovers the cluster with a ticket: by certificate, or by token in a cluster that Muster did not initialize")
	life := flags.Duration("certificate-life", state.DefaultCertificateLife, "how long nodes' certificates live, 10m at least; not less than --cluster-signing-duration of kube-controller-manager")
	vanished := flags.Duration("vanished-after", time.Hour, "how long a node may show no sign of life before it is reported as vanished, 5m at least")
	release := flags.Duration("release-after", 25*time.Hour, "how much later the enrollment of a worker that enrolled itself, and whose Node is gone, is deleted; more than --certificate-life, or 0: never")
	first := flags.Duration("first-lease-within", enroll.DefaultLeaseTimings.First, "how long a kubelet may take to write its first Lease after its machine got a ticket or the key of its disk; a later boot of the same machine within this time is refused with BUSY, since it may be a copy of the machine; 0: no such boot is refused")
	watch := flags.Duration("lease-watch", enroll.DefaultLeaseTimings.Watch, "how long joinservice watches a node's Lease when its machine asks in a later boot; a Lease that is still renewed shows that the machine that asks is a copy. Use more than a quarter of the nodeLeaseDurationSeconds of your kubelets, their pause between two renewals")
	proxies := flags.String("proxy-protocol-from", "", "networks and addresses of load balancers in front of this listener, separated by commas, which send a header of the PROXY protocol, version 2: its client is then the source of the connection; empty: none")
	limits := joinservice.Limits
	flags.Float64Var(&limits.Rate, "source-rate", 16, "how many new connections a second one source may open (an IPv4 address, or an IPv6 /64); more for a load balancer that hides its clients and sends no header")
	flags.IntVar(&limits.Burst, "source-burst", 64, "how many of those one source may open at once")
	flags.IntVar(&limits.SetUpPerSource, "source-handshakes", 64, "how many connections of one source may be in their handshake at one time; of all sources it is 256")
	records := flags.String("audit", "/var/log/muster/audit.jsonl", "file of the audit log")
	if err := flags.Parse(args); err != nil {
		return err
	}
	join, err := token.ParseCredential(*credential)
	if err != nil {
		return fmt.Errorf("--join-credential: %w", err)
	}
	if limits.Rate <= 0 || limits.Burst <= 0 || limits.SetUpPerSource <= 0 {
		return errors.New("--source-rate, --source-burst and --source-handshakes: more than 0 each, or no machine connects")
	}
	from, err := serve.ParsePrefixes(strings.FieldsFunc(*proxies, func(r rune) bool { return r == ',' }))
	if err != nil {
		return fmt.Errorf("--proxy-protocol-from: want networks such as 10.0.0.0/24, or addresses: %w", err)
	}
	p, err := common.Open(ctx, stderr)
	if err != nil {
		return err
	}
	defer p.Close()
	auditLog, err := audit.Open(*records)
	if err != nil {
		return err
	}
	defer func() { _ = auditLog.Close() }()
	o := joinservice.Options{
		Listener: p.Listener, ProxiesFrom: from, Limits: limits, Metrics: p.Metrics, Probes: p.Probes, Attester: p.Attester, Owner: p.Owner, LowestSerial: p.LowestSerial, API: p.API, KMS: *kms, Token: *kmsToken, VerdictMaxAge: *maxAge, CertificateLife: *life, Leases: enroll.LeaseTimings{First: *first, Watch: *watch}, VanishedAfter: *vanished, ReleaseAfter: *release, Credential: join, PKI: *pki, Audit: auditLog, Log: p.Log,
	}
	for _, change := range changes {
		change(&o)
	}
	return joinservice.Run(ctx, o)
}
