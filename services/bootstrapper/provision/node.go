// Package provision turns a machine into a node once it has the node lock: it opens the state disk, installs the components, runs kubeadm and starts the
// node's units.
//
// A [Node] is the machine with its configuration and state. The packages initserver and joinclient decide on the order of its steps. Each step may be
// repeated after a crash (B3).
package provision

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/nodelock"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Timing has the bootstrapper's timeouts and pauses; see [DefaultTiming].
type Timing struct {
	// Stagger is the head start of one joinservice before the next.
	Stagger time.Duration
	// RetryMin and RetryMax bound the pause between two attempts to join.
	RetryMin, RetryMax time.Duration
	// Dial bounds the wait for a connection, Ticket the wait for a ticket.
	Dial, Ticket time.Duration
	// Linger is how long an init's result can still be fetched after it was sent once, and Unclaimed how long if it was never sent.
	Linger, Unclaimed time.Duration
	// Kubeadm bounds one run of kubeadm, Reset one clean-up, ClusterState the writing of the
	// cluster's own objects.
	Kubeadm, Reset, ClusterState time.Duration
	// Renewal is how long a node with valid certificates asks for new ones before its kubelet starts.
	Renewal time.Duration
	// LeaseRenewal is the pause between two renewals of the join lease; 0: a third of its life.
	LeaseRenewal time.Duration
}

// DefaultTiming are the waits of production.
var DefaultTiming = Timing{
	Stagger: 250 * time.Millisecond, RetryMin: 500 * time.Millisecond, RetryMax: 30 * time.Second,
	Dial: 10 * time.Second, Ticket: 90 * time.Second, Linger: 2 * time.Minute, Unclaimed: time.Hour,
	Kubeadm: 15 * time.Minute, Reset: 5 * time.Minute, ClusterState: 3 * time.Minute,
	Renewal: time.Minute,
}

// TPM is the part of the TPM that the bootstrapper uses beside evidence.
type TPM interface {
	nodelock.PCRs
	discovery.Endorser
	epoch.Counter
}

// Config lists what a [Node] needs. All fields but Console and Now are required.
type Config struct {
	// Image is the image's measured configuration.
	Image *metadata.Image
	// Metadata reads the machine's metadata; it is called each time they are needed.
	Metadata func() (*metadata.Machine, error)
	// Journal stores the machine's state across restarts.
	Journal nodelock.Journal
	// Machine runs units and kubeadm.
	Machine machine.Machine
	// Root is the root of the file system: "/" on a machine.
	Root string
	// TPM is the machine's TPM.
	TPM TPM
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// NewVerifier returns a verifier that trusts the roots.
	NewVerifier func(roots []*x509.Certificate) (attest.Verifier, error)
	// Components bounds the resources for components.
	Components component.Limits
	// Timing are the timeouts and pauses.
	Timing Timing
	// Metrics registers the metrics, which docs/metrics.md lists.
	Metrics prometheus.Registerer
	// Calls counts connections and calls of the process's servers.
	Calls *rpc.Metrics
	// Log receives all records, also details that a caller does not get.
	Log *slog.Logger
	// Console shows the progress on the machine's screen; nil if it has none.
	Console *console.Console
	// Now returns the time for checks of certificates; nil means [time.Now].
	Now func() time.Time
}

// Node is a machine that becomes a node, or is one.
type Node struct {
	Config

	Kubeadm   *kubeadm.Image
	Bank      tpm.Bank
	Lock      *nodelock.Lock
	Disk      disk.Disk
	DiskID    keys.DiskID
	MachineID attest.MachineID
	// OwnerKeys verify the owner's signatures; nil if the owner is not known.
	OwnerKeys attest.OwnerKeys
	// Attempts records the machine's calls to joinservices, for its status.
	Attempts discovery.Attempts
	// Joins counts attempts to join by reason.
	Joins *prometheus.CounterVec

	metrics  metrics
	renewing atomic.Bool // the kubelet's certificates
	older    atomic.Bool // the state disk is not the newest
	newest   atomic.Bool // set after this process has checked that the state disk is the newest, or has started a new record
}

// New reads the journal and checks the disk and the TPM. It returns an error that names the fields of cfg that are missing or wrong, or the reason why
// this machine can't continue.
func New(ctx context.Context, cfg Config) (*Node, error) {
	if err := required.Fields("provision.New", cfg, "Console", "Now"); err != nil {
		return nil, err
	}
	if !filepath.IsAbs(cfg.Root) {
		return nil, fmt.Errorf("provision.New: Root %q is not an absolute path", cfg.Root)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	n := &Node{Config: cfg}
	misconfigured := func(err error) error {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	k := cfg.Image.Kubeadm
	var err error
	if n.Kubeadm, err = kubeadm.ParseImage(k.CRISocket, k.IgnorePreflightErrors, k.ClusterConfiguration, k.KubeletConfiguration, k.KubeProxyConfiguration); err != nil {
		return nil, misconfigured(err)
	}
	if n.Bank, err = tpm.ParseBank(cfg.Image.TPM.Bank); err != nil {
		return nil, misconfigured(err)
	}
	if err := n.registerMetrics(); err != nil {
		return nil, err
	}
	state := cfg.Image.StateDisk
	if n.Disk, err = disk.Open(state.Mode, n.On(state.Path), disk.WithRoot(cfg.Root), disk.WithIntegrity(state.Integrity)); err != nil {
		return nil, err
	}
	if n.DiskID, err = n.Disk.ID(); err != nil {
		return nil, err
	}
	if n.MachineID, err = discovery.MachineID(ctx, cfg.TPM); err != nil {
		return nil, err
	}
	if n.Lock, err = nodelock.Open(cfg.Journal, cfg.TPM, n.Bank, n.MachineID.String(), n.metrics.observe); err != nil {
		return nil, err
	}
	n.OwnerKeys = discovery.OwnerKeys(cfg.Image, n.Lock.Record())
	n.Log = n.Log.With("machine", n.MachineID.String())
	return n, metadata.ReportInsecure(cfg.Metrics, cfg.Image, n.Log)
}

// On returns the path, below Root, of an absolute path on the machine.
func (n *Node) On(path string) string { return filepath.Join(n.Root, path) }

// OpenSession returns a session with the joinservice at the other end of first, which is appraised with the next call.
func (n *Node) OpenSession(ctx context.Context, endpoint string, first net.Conn) (*discovery.Session, error) {
	// The session requires the machine's cluster, if it has one; before that it accepts any cluster.
	lock := attest.AnyLock()
	if rec := n.Lock.Record(); rec.Locked() {
		lock = attest.LockedTo([32]byte(rec.ClusterID))
	}
	return discovery.Open(ctx, discovery.SessionConfig{
		Attester: n.Attester, Lock: lock, Dial: n.Timing.Dial, Log: n.Log,
		Verification: discovery.Verification{OwnerKeys: n.OwnerKeys, NoOwnerKey: n.Image.NoOwnerKey, Lowest: n.Image.LowestPolicySerial, EKRoots: n.Image.EKRoots, Bank: n.Bank, PCRs: n.TPM, NewVerifier: n.NewVerifier, Newest: n.Lock.NewestPolicy},
	}, endpoint, first)
}
