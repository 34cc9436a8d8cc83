// Package unlock opens a machine's state disk in the initramfs, before the root is switched.
//
// The journal is inside the disk, so the machine has only its measured image and untrusted metadata here. It formats a disk that is blank, or that never
// got a cluster's key. For a disk that belongs to a cluster it requests the key from that cluster's joinservices until it gets the key, and lets the
// owner of a control plane send the key by recovery meanwhile. The first key that opens the disk ends both.
//
// An attacker can write both disk and metadata, so a disk that a key opens proves nothing: it may have been made for that key. Therefore the machine is
// locked to the key's cluster before anything of the disk is used: to the cluster of the joinservice's own machine, or to the one that the owner has
// signed for. It never gives up, since nothing would start it again.
package unlock

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/nodelock"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Disk is the state disk before it is open: [disk.LUKS].
type Disk interface {
	// ID returns the disk's ID: the UUID of its header.
	ID() (keys.DiskID, error)
	// State reads the header and returns the disk's state.
	State() (disk.State, error)
	// Format formats the disk under a new random key and leaves it open. It reports the bytes done and in total to progress.
	Format(ctx context.Context, progress func(done, total uint64)) error
	// Unlock opens the disk, or returns an error that wraps [disk.ErrWrongKey].
	Unlock(ctx context.Context, key keys.Disk) error
	// Close closes the disk.
	Close(ctx context.Context) error
}

// TPM is the part of the TPM that unlocking uses beside evidence.
type TPM interface {
	nodelock.PCRs
	discovery.Endorser
}

// Timing are the waits; see [DefaultTiming].
type Timing struct {
	// Stagger is the head start of one joinservice before the next.
	Stagger time.Duration
	// RetryMin and RetryMax bound the pause between two attempts.
	RetryMin, RetryMax time.Duration
	// Dial bounds the wait for a connection, Ticket the wait for a key.
	Dial, Ticket time.Duration
}

// DefaultTiming are the waits of production: those of a join.
var DefaultTiming = Timing{
	Stagger: 250 * time.Millisecond, RetryMin: 500 * time.Millisecond, RetryMax: 30 * time.Second,
	Dial: 10 * time.Second, Ticket: 90 * time.Second,
}

// Recovery serves muster.recover.v1 until ctx ends, which happens once the disk is open. It opens the disk with that ID only by try, whose errors wrap
// [disk.ErrWrongKey] or [ErrOpen]. Calls that are running when ctx ends are answered.
type Recovery func(ctx context.Context, id keys.DiskID, try Try) error

// Policy stores a policy in a file: [journal.File].
type Policy interface {
	Save(r journal.Record) error
}

// Try opens the disk with a key of a cluster, and locks the machine to that cluster. Before that, it stores what the disk is to be compared with (B8).
type Try func(ctx context.Context, key keys.Disk, cluster keys.ClusterID, desired component.Desired) error

// ErrOpen means that a key was not tried, since the disk is already open.
var ErrOpen = errors.New("the state disk is open already")

// Config lists what an Unlocker needs. All fields but Recovery and Console are required.
type Config struct {
	// Image is the image's measured configuration.
	Image *metadata.Image
	// Metadata reads the machine's metadata; it is called for each attempt.
	Metadata func() (*metadata.Machine, error)
	// Root is the root of the file system: "/" on a machine. The secret of this boot is below it.
	Root string
	// Disk is the state disk.
	Disk Disk
	// TPM is the machine's TPM.
	TPM TPM
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// NewVerifier returns a verifier that trusts the roots.
	NewVerifier func(roots []*x509.Certificate) (attest.Verifier, error)
	// Policy stores the policy by which the joinservice that sent the key was appraised, for the running system to compare with its journal:
	// [journal.UnlockPolicy]. It is empty after a recovery.
	Policy Policy
	// Desired stores the software that the cluster requires on the machine, for the running system to compare the disk with (B8):
	// [component.UnlockFile].
	Desired component.DesiredFile
	// Recovery lets the owner of a control plane open the disk; nil if there is no recovery.
	Recovery Recovery
	// Console shows the machine's state on its screen; nil if it has none.
	Console *console.Console
	// Timing are the waits.
	Timing Timing
	// Metrics registers the metrics, which docs/metrics.md lists.
	Metrics prometheus.Registerer
	// Log receives the details that a caller does not get.
	Log *slog.Logger
}

// Unlocker opens one machine's state disk.
type Unlocker struct {
	cfg           Config
	bank          tpm.Bank
	memory        discovery.Memory
	attempts      discovery.Attempts
	attemptsTotal *prometheus.CounterVec
	insecure      *prometheus.GaugeVec

	opening sync.Mutex      // one key at a time; guards the fields below
	cluster *keys.ClusterID // of the key that has opened the disk; nil if none has
	open    bool            // and the machine is locked to the cluster

	mu      sync.Mutex // guards the fields of the status
	machine *attest.MachineID
	disk    keys.DiskID // zero if not found yet
	phase   initv1.Phase
	since   time.Time
}

// New returns an Unlocker, or an error that names the missing or wrong field of cfg.
func New(cfg Config) (*Unlocker, error) {
	if err := required.Fields("unlock.New", cfg, "Recovery", "Console"); err != nil {
		return nil, err
	}
	bank, err := tpm.ParseBank(cfg.Image.TPM.Bank)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	u := &Unlocker{
		cfg: cfg, bank: bank, phase: initv1.Phase_PHASE_UNLOCKING, since: time.Now(),
		attemptsTotal: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_unlock_attempts_total", Help: "Attempts to open the state disk after a boot by reason code; ACCEPTED means that it was opened.",
		}, []string{"reason"}),
		insecure: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "muster_insecure_config", Help: "1 for each way in which the configuration is weaker than it could be.",
		}, []string{"reason"}),
	}
	for _, c := range []prometheus.Collector{u.attemptsTotal, u.insecure} {
		if err := cfg.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("unlock: %w", err)
		}
	}
	for _, label := range cfg.Image.Insecure() {
		u.insecure.WithLabelValues(label).Set(1)
		cfg.Log.Warn("the image's configuration is weaker than it could be", "insecure", label)
	}
	return u, nil
}

// Run returns nil when the disk is open, and an error only if ctx ended before. Failures are logged, and retried.
func (u *Unlocker) Run(ctx context.Context) error {
	pause := retry.Backoff{Min: u.cfg.Timing.RetryMin, Max: u.cfg.Timing.RetryMax}
	for {
		err := u.once(ctx)
		switch {
		case err == nil:
			u.attemptsTotal.WithLabelValues(attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)).Inc()
			u.cfg.Log.InfoContext(ctx, "the state disk is open")
			u.cfg.Console.Print("the state disk is open")
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
		wait := pause.Next(0)
		u.failed(ctx, console.Wait{For: "can't use the state disk", Err: err, Next: wait})
		if err := retry.Wait(ctx, wait); err != nil {
			return ctx.Err()
		}
	}
}

// once reads the disk's state and acts on it.
func (u *Unlocker) once(ctx context.Context) error {
	state, err := u.cfg.Disk.State() // B5
	if err != nil {
		return disked(err)
	}
	switch state {
	case disk.StateOpen:
		// Another process has opened it and ended before its work was done, or formatting failed.
		taken, err := nodelock.Taken(ctx, u.cfg.TPM, u.bank)
		if err != nil {
			return err
		}
		if taken {
			// That process ended after all its work: the lock is taken after the disk was opened, for the cluster of the key (B1). Starting over would
			// fail, since a joinservice gives no key to a locked machine until it reboots.
			u.cfg.Log.WarnContext(ctx, "the state disk is open, and the machine is locked to its cluster")
			return nil
		}
		// The cluster of the key that opened it is unknown.
		u.cfg.Log.WarnContext(ctx, "the state disk is open, but was not made ready; starting over")
		if err := u.cfg.Disk.Close(ctx); err != nil {
			return disked(err)
		}
		return u.once(ctx)
	case disk.StateBlank, disk.StateNew:
		u.enter(initv1.Phase_PHASE_FORMATTING)
		u.cfg.Log.InfoContext(ctx, "formatting the state disk", "state", state.String())
		if err := u.cfg.Disk.Format(ctx, u.progress()); err != nil {
			return disked(err)
		}
		return u.note(component.Desired{Uncompared: component.UncomparedNew})
	case disk.StateLocked:
		u.enter(initv1.Phase_PHASE_UNLOCKING)
		return u.unlock(ctx)
	}
	return disked(fmt.Errorf("it is in the state %d", int(state)))
}

// progress returns a function that shows every tenth on the console.
func (u *Unlocker) progress() func(done, total uint64) {
	u.cfg.Console.Print("formatting the state disk, which happens once")
	return func(done, total uint64) {
		if total > 0 {
			u.cfg.Console.Print(fmt.Sprintf("formatting the state disk: %d %% of %d MiB", 10*min(done*10/total, 10), total>>20))
		}
	}
}

// disked gives STATE_DISK to errors of the disk that have no reason.
func disked(err error) error {
	if err == nil || discovery.ReasonOf(err) != attestv1.Reason_REASON_INTERNAL {
		return err
	}
	return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the state disk: %w", err)
}

// enter sets the phase.
func (u *Unlocker) enter(p initv1.Phase) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.phase != p {
		u.phase, u.since = p, time.Now()
	}
}

// failed reports a failed attempt.
func (u *Unlocker) failed(ctx context.Context, w console.Wait) {
	reason := discovery.ReasonOf(w.Err)
	u.attemptsTotal.WithLabelValues(attest.ReasonName(reason)).Inc()
	u.attempts.Refused(w.Err)
	u.attempts.Wait(w.Next)
	u.cfg.Log.WarnContext(ctx, "not unlocked yet", "reason", attest.ReasonName(reason), "err", w.Err, "remedy", rpc.RemedyFrom(w.Err), "again_in", w.Next.String())
	u.cfg.Console.Waits(w)
}

// try opens the disk, one key after another, and locks the machine to the key's cluster before anything of the disk is used (B1). So a disk that an
// attacker has made, under a key of its own, never runs in an unlocked machine: PCR 15 has the cluster until the next boot.
//
// desired is the software that the sender of the key requires. appraisedBy is the policy by which the sender was appraised, and nil in a recovery. It is
// saved before the disk is open, so that after a crash in between the running system has it for the comparison with its journal.
func (u *Unlocker) try(ctx context.Context, key keys.Disk, cluster keys.ClusterID, appraisedBy *journal.Policy, desired component.Desired) error {
	u.opening.Lock()
	defer u.opening.Unlock()
	if u.open {
		return ErrOpen
	}
	if u.cluster == nil {
		if err := u.cfg.Policy.Save(journal.Record{Policy: appraisedBy}); err != nil { // J2
			return fmt.Errorf("save the policy: %w", err)
		}
		if err := u.note(desired); err != nil { // B8
			return err
		}
		if err := u.cfg.Disk.Unlock(ctx, key); err != nil {
			return err
		}
		u.cluster = &cluster
	}
	// If the TPM fails here, the next attempt uses the same cluster.
	if err := nodelock.Settle(ctx, u.cfg.TPM, u.bank, *u.cluster); err != nil {
		return err
	}
	u.open = true
	return nil
}

// note saves what the running system compares the disk with, also if that is nothing: a missing file means that an attacker removed it.
func (u *Unlocker) note(desired component.Desired) error {
	if err := u.cfg.Desired.Save(desired); err != nil {
		return fmt.Errorf("save the lists for the comparison of the disk: %w", err)
	}
	return nil
}
