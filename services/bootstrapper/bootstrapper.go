// Package bootstrapper turns a freshly booted machine into a node: into the first one of a
// new cluster, if its owner says so over init.v1, or into one more of a running cluster,
// if a joinservice gives it a ticket.
//
// Both are tried at the same time, and whoever takes the node lock first is the one. Three
// things hold, and the code that keeps one names it:
//
//	B1  unlocked becomes locked, once;
//	B2  init and join never both proceed;
//	B3  killed at any step, the machine ends as a node, or cleanly retryable, or locked
//	    with a named way out.
//
// B3 is kept by a journal that is written before what can't be repeated and after what
// can: whatever the journal says, the next step is safe to take again. Once the machine is
// a node the bootstrapper has nothing left to do, and ends.
package bootstrapper

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterstate"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/services/bootstrapper/seek"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/tpm"
)

// TPM is what the bootstrapper needs of it beside evidence.
type TPM interface {
	PCRs
	EndorsementKey(ctx context.Context) (tpm.EK, error)
	epoch.Counter
}

// Journal is the machine's memory: [journal.File].
type Journal interface {
	Load() (journal.Record, error)
	Save(r journal.Record) error
}

// Timing are the bootstrapper's waits. [DefaultTiming] are those of production.
type Timing struct {
	// Stagger is the head start of one joinservice before the next.
	Stagger time.Duration
	// RetryMin and RetryMax bound the pause between two tries to join.
	RetryMin, RetryMax time.Duration
	// Dial bounds the wait for a connection, Ticket that for a ticket.
	Dial, Ticket time.Duration
	// Linger is how long an init's result can still be fetched after it was sent once, and
	// Unclaimed how long if it was not.
	Linger, Unclaimed time.Duration
	// Kubeadm bounds one run of kubeadm, Reset one clean-up, ClusterState the writing of the
	// cluster's own objects.
	Kubeadm, Reset, ClusterState time.Duration
	// Renewal is how long a node that has valid certificates asks for new ones before its kubelet starts.
	Renewal time.Duration
}

// DefaultTiming are the waits of production.
var DefaultTiming = Timing{
	Stagger: 250 * time.Millisecond, RetryMin: 500 * time.Millisecond, RetryMax: 30 * time.Second,
	Dial: 10 * time.Second, Ticket: 90 * time.Second, Linger: 2 * time.Minute, Unclaimed: time.Hour,
	Kubeadm: 15 * time.Minute, Reset: 5 * time.Minute, ClusterState: 3 * time.Minute,
	Renewal: time.Minute,
}

// Config lists what a Bootstrapper needs. All fields but Console and Now are required.
type Config struct {
	// Image is the image's measured configuration.
	Image *metadata.Image
	// Metadata reads the machine's metadata; it is called whenever they are needed.
	Metadata func() (*metadata.Machine, error)
	// Journal is the machine's memory.
	Journal Journal
	// Machine runs units and kubeadm.
	Machine machine.Machine
	// Root stands for the root of the file system: "/" on a machine.
	Root string
	// TPM is the machine's.
	TPM TPM
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// NewVerifier gives a verifier that trusts the roots.
	NewVerifier func(roots []*x509.Certificate) (attest.Verifier, error)
	// WriteClusterState writes the cluster's own objects: [clusterstate.Write].
	WriteClusterState func(ctx context.Context, kubeconfig []byte, s clusterstate.State) error
	// CleanEtcd removes members that unfinished joins left in the cluster's etcd: [etcd.Clean].
	CleanEtcd func(ctx context.Context, t etcd.Target) ([]etcd.Member, error)
	// Components bounds what components may take.
	Components component.Limits
	// Timing are the waits.
	Timing Timing
	// Metrics takes what docs/metrics.md lists.
	Metrics prometheus.Registerer
	// Calls counts connections and calls of the process's servers.
	Calls *rpc.Metrics
	// Log is where everything is told that a caller does not learn.
	Log *slog.Logger
	// Console is told what a person should know; nil: nobody is.
	Console *console.Console
	// Now is the machine's clock, by which certificates are valid or not; nil means [time.Now].
	Now func() time.Time
}

// Bootstrapper is the phase machine around init and join. [Bootstrapper.Init] serves
// init.v1; [Bootstrapper.Run] joins, and ends when the machine is a node.
type Bootstrapper struct {
	cfg       Config
	image     *kubeadm.Image
	bank      tpm.Bank
	lock      *nodeLock
	disk      disk.Disk
	diskID    keys.DiskID
	machineID attest.MachineID
	ownerKey  ed25519.PublicKey // nil: unknown
	metrics   *metrics
	tries     seek.Tries
	steps     steps
	renewing  atomic.Bool // the kubelet's certificates
	older     atomic.Bool // the state disk is not the newest
	newest    atomic.Bool // the state disk was found to be the newest, or a new record was begun, since this process started
	log       *slog.Logger

	running chan struct{}   // closed once Run has set ctx
	ctx     context.Context //nolint:containedctx // of Run: an init outlives its client's connection
	work    sync.WaitGroup

	initMu   sync.Mutex // guards what follows
	wrong    int        // wrong init secrets so far, at most maxAttempts
	run      *initRun   // the init under way or finished, nil if none
	finished chan struct{}
	sent     chan struct{}
	sentOnce sync.Once
}

// New reads the journal and looks at disk and TPM. It returns an error that says which part
// of cfg is missing or wrong, or why this machine can't go on.
func New(ctx context.Context, cfg Config) (*Bootstrapper, error) {
	if cfg.Image == nil || cfg.Metadata == nil || cfg.Journal == nil || cfg.Machine == nil || !filepath.IsAbs(cfg.Root) || cfg.TPM == nil ||
		cfg.Attester == nil || cfg.NewVerifier == nil || cfg.WriteClusterState == nil || cfg.CleanEtcd == nil || cfg.Metrics == nil || cfg.Calls == nil || cfg.Log == nil || cfg.Timing == (Timing{}) || cfg.Components == (component.Limits{}) {
		return nil, errors.New("bootstrapper: New: every field of Config but Console and Now is required")
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	k := cfg.Image.Kubeadm
	image, err := kubeadm.ParseImage(k.CRISocket, k.IgnorePreflightErrors, k.ClusterConfiguration, k.KubeletConfiguration, k.KubeProxyConfiguration)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	m, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, err
	}
	b := &Bootstrapper{
		cfg: cfg, image: image, metrics: m, log: cfg.Log, ownerKey: cfg.Image.OwnerKey,
		running: make(chan struct{}), finished: make(chan struct{}), sent: make(chan struct{}),
	}
	if b.bank, err = tpm.ParseBank(cfg.Image.TPM.Bank); err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	state := cfg.Image.StateDisk
	if b.disk, err = disk.Open(state.Mode, b.on(state.Path), disk.WithRoot(cfg.Root), disk.WithIntegrity(state.Integrity)); err != nil {
		return nil, err
	}
	if b.diskID, err = b.disk.ID(); err != nil {
		return nil, err
	}
	if b.machineID, err = seek.MachineID(ctx, cfg.TPM); err != nil {
		return nil, err
	}
	if b.lock, err = openLock(cfg.Journal, cfg.TPM, b.bank, b.machineID.String(), func(r journal.Record) { m.seen(r); b.steps.seen(r) }); err != nil {
		return nil, err
	}
	if b.ownerKey == nil && cfg.Image.NoOwnerKey { // it knew its owner with an earlier image
		b.ownerKey = ed25519.PublicKey(b.lock.record().OwnerKey)
	}
	b.log = b.log.With("machine", b.machineID.String())
	tellInsecure(m.insecure, cfg.Image, b.log)
	return b, nil
}

// on gives the real place of an absolute path on the machine.
func (b *Bootstrapper) on(path string) string { return filepath.Join(b.cfg.Root, path) }

// Run joins a cluster unless an init comes first, and returns nil once the machine is a
// node. Inits under way end before it returns.
func (b *Bootstrapper) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		b.initMu.Lock()   // an init that was admitted meanwhile is in work now
		b.initMu.Unlock() //nolint:staticcheck // a barrier
		b.work.Wait()
	}()
	if err := b.recall(); err != nil {
		return err
	}
	// After a reboot PCR 15 is zero; services prove with it which cluster they belong to.
	if err := b.lock.relock(ctx); err != nil {
		return err
	}
	moved, err := b.lock.moved()
	if err != nil {
		return err
	}
	if err := b.checkState(ctx); err != nil { // B8: whatever the journal says
		return fmt.Errorf("compare what is on the state disk with the cluster's list: %w", err)
	}
	b.ctx = ctx
	close(b.running)
	rec := b.lock.record()
	if moved {
		b.log.WarnContext(ctx, "the node on this disk had another TPM: joining anew", "node", rec.NodeName, "remedy", "If you exchanged it: `muster replace "+rec.NodeName+" --tpm "+b.machineID.String()+"`")
	}
	b.log.InfoContext(ctx, "bootstrapper is running", "step", rec.Step.String(), "lock", string(rec.Kind))
	if rec.Step == journal.StepDone {
		if err := b.notRolledBack(ctx); err != nil { // B7: before etcd and the API server start
			return err
		}
		if err := b.startNode(ctx); err != nil {
			return err
		}
		b.cfg.Console.Say("this machine is the node " + rec.NodeName)
		if rec.Kind == journal.KindJoin || rec.ResultSent {
			return nil
		}
		return b.linger(ctx)
	}
	joined := make(chan error, 1)
	if !rec.Kind.ByOwner() {
		b.work.Go(func() { joined <- b.joinLoop(ctx) })
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-b.finished:
			return b.linger(ctx)
		case err := <-joined:
			if err == nil || !errors.Is(err, errLostRace) {
				return err
			}
			b.log.InfoContext(ctx, "the owner has taken the node lock; not joining any more")
		}
	}
}

// recall adds to the journal what other processes of this machine have accepted of policies since it was written, or refuses with
// POLICY_INVALID if one was older: the disk was opened by a joinservice that the owner may have shut out.
func (b *Bootstrapper) recall() error {
	known := b.lock.record().Policy
	newest, err := seek.Recall(b.cfg.Root, known)
	if err != nil {
		b.cfg.Console.Say("this machine does not start as a node: " + attest.ReasonName(attest.ReasonOf(err)) + ". Restart it; its disk was opened under a policy that is older than one it has accepted before")
		return err
	}
	if newest != known {
		if err := b.lock.update(func(r *journal.Record) { r.Policy = newest }); err != nil {
			return err
		}
	}
	// It was compared: what is accepted later in this life is no older for it.
	if err := os.Remove(b.on(journal.UnlockPolicy)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// linger keeps an init's result for a client that lost its connection at the end.
func (b *Bootstrapper) linger(ctx context.Context) error {
	wait := time.NewTimer(b.cfg.Timing.Unclaimed)
	defer wait.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wait.C:
		b.log.WarnContext(ctx, "nobody fetched the init's result; the administrator's kubeconfig is at "+adminConf)
		return nil
	case <-b.sent:
	}
	if !b.lock.record().ResultSent {
		if err := b.lock.update(func(r *journal.Record) { r.ResultSent = true }); err != nil {
			return err
		}
	}
	again := time.NewTimer(b.cfg.Timing.Linger)
	defer again.Stop()
	select {
	case <-ctx.Done():
	case <-again.C:
	}
	return nil
}

// renewControlPlane renews what has expired of a control plane's certificates. It comes after the node lock and the state disk: where that is
// encrypted, attestation or a recovery has opened it.
func (b *Bootstrapper) renewControlPlane(ctx context.Context) error {
	stop := func() error { return b.cfg.Machine.Unit(ctx, "stop", machine.UnitKubelet) }
	if err := renewal.AtBoot(b.cfg.Root, b.image.Certificates(), b.cfg.Now(), b.log, stop); err != nil {
		return fmt.Errorf("renew the certificates of this control plane: %w", err)
	}
	return nil
}

// startNode makes sure that what a node needs is running: attester and kubelet, and on a control plane what renews its certificates. The kubelet has
// usable certificates then.
func (b *Bootstrapper) startNode(ctx context.Context) error {
	if err := b.renewControlPlane(ctx); err != nil {
		// Without it the kubelet may still run what needs no certificate of these, and its unit tries again.
		b.log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
	}
	// The attester first: pods that the kubelet starts ask it.
	if err := b.startUnit(ctx, machine.UnitAttester); err != nil {
		return err
	}
	if err := b.renewKubelet(ctx); err != nil {
		return err
	}
	// Not enabled: before the machine is a node, there is nothing to renew.
	if err := b.cfg.Machine.Unit(ctx, "start", machine.UnitRenewal); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitRenewal, err)
	}
	if err := b.letKubeletStart(); err != nil {
		return err
	}
	return b.startUnit(ctx, machine.UnitKubelet)
}

func (b *Bootstrapper) startUnit(ctx context.Context, unit string) error {
	for _, verb := range []string{"enable", "start"} {
		if err := b.cfg.Machine.Unit(ctx, verb, unit); err != nil {
			return fmt.Errorf("%s: %w", unit, err)
		}
	}
	return nil
}
