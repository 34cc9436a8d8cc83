// Package unlock opens a machine's state disk in the initramfs, before the root is switched.
//
// Think of it as a machine that has lost its memory: its journal is inside the disk, so all that it knows is what
// its image measured and what untrusted metadata say. A disk that is blank, or was never given to a cluster, it formats.
// For one that belongs to a cluster it asks that cluster's joinservices for the key, as often and for as long as it takes,
// and lets the owner of a control plane give it by recovery meanwhile. The first key that opens the disk ends both.
//
// Disk and metadata are anybody's, so a disk that a key opens proves nothing: it may have been made for that. Therefore
// the machine is locked to the cluster whose key it was before anything of the disk is used: to the one that the
// joinservice's own machine belongs to, or that the root secret leads to. It never gives up, since nobody is there to
// start it again.
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
	// ID gives the disk's ID: the UUID of its header.
	ID() (keys.DiskID, error)
	// State looks at the header.
	State() (disk.State, error)
	// Format makes the disk anew under a random key and leaves it open. It tells how many bytes of how many are done.
	Format(ctx context.Context, progress func(done, total uint64)) error
	// Unlock opens the disk, or returns an error that wraps [disk.ErrWrongKey].
	Unlock(ctx context.Context, key keys.Disk) error
	// Close closes the disk.
	Close(ctx context.Context) error
}

// TPM is what unlocking needs of it beside evidence.
type TPM interface {
	nodelock.PCRs
	discovery.EndorsementKeyer
}

// Timing are the waits. [DefaultTiming] are those of production.
type Timing struct {
	// Stagger is the head start of one joinservice before the next.
	Stagger time.Duration
	// RetryMin and RetryMax bound the pause between two tries.
	RetryMin, RetryMax time.Duration
	// Dial bounds the wait for a connection, Ticket that for a key.
	Dial, Ticket time.Duration
}

// DefaultTiming are the waits of production: those of a join.
var DefaultTiming = Timing{
	Stagger: 250 * time.Millisecond, RetryMin: 500 * time.Millisecond, RetryMax: 30 * time.Second,
	Dial: 10 * time.Second, Ticket: 90 * time.Second,
}

// Recovery serves muster.recover.v1 until ctx ends, which it does once the disk is open. It opens the disk of that ID
// by try alone, whose errors wrap [disk.ErrWrongKey] or [ErrOpen]; calls that are under way when ctx ends are answered.
type Recovery func(ctx context.Context, id keys.DiskID, try Try) error

// Policy is a file that has a policy: [journal.File].
type Policy interface {
	Save(r journal.Record) error
}

// Try opens the disk with a key of a cluster, and locks the machine to that cluster.
type Try func(ctx context.Context, key keys.Disk, cluster keys.ClusterID) error

// ErrOpen says that a key was not tried, since the disk is open already.
var ErrOpen = errors.New("the state disk is open already")

// Config lists what an Unlocker needs. All fields but Recovery and Console are required.
type Config struct {
	// Image is the image's measured configuration.
	Image *metadata.Image
	// Metadata reads the machine's metadata; it is called for each try.
	Metadata func() (*metadata.Machine, error)
	// Root stands for the root of the file system: "/" on a machine. The secret of this boot is below it.
	Root string
	// Disk is the state disk.
	Disk Disk
	// TPM is the machine's.
	TPM TPM
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// NewVerifier gives a verifier that trusts the roots.
	NewVerifier func(roots []*x509.Certificate) (attest.Verifier, error)
	// Policy keeps the policy that the joinservice was judged by whose key opens the disk, for the running system to compare
	// with its journal: [journal.UnlockPolicy]. It has none if a recovery opens it.
	Policy Policy
	// Desired keeps what the cluster wants the machine to run, for the running system to compare the disk with (B8): [component.UnlockFile].
	Desired component.DesiredFile
	// Recovery lets the owner of a control plane open the disk; nil: nobody can.
	Recovery Recovery
	// Console is told what a person should know; nil: nobody is.
	Console *console.Console
	// Timing are the waits.
	Timing Timing
	// Metrics takes what docs/metrics.md lists.
	Metrics prometheus.Registerer
	// Log is where everything is told that a caller does not learn.
	Log *slog.Logger
}

// Unlocker opens one machine's state disk.
type Unlocker struct {
	cfg      Config
	bank     tpm.Bank
	memory   discovery.Memory
	tries    discovery.Attempts
	attempts *prometheus.CounterVec
	insecure *prometheus.GaugeVec

	opening sync.Mutex      // one key at a time; guards what follows
	cluster *keys.ClusterID // whose key has opened the disk; nil: none has
	open    bool            // and the machine is locked to it

	mu      sync.Mutex // guards what a status tells
	machine *attest.MachineID
	phase   initv1.Phase
	since   time.Time
}

// New returns an Unlocker, or says which part of cfg is missing or wrong.
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
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_unlock_attempts_total", Help: "Tries to open the state disk after a boot, by reason; ACCEPTED: it is open.",
		}, []string{"reason"}),
		insecure: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "muster_insecure_config", Help: "1 for each way in which the configuration is weaker than it could be.",
		}, []string{"reason"}),
	}
	for _, c := range []prometheus.Collector{u.attempts, u.insecure} {
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

// Run returns nil when the disk is open, and an error only if ctx has ended before. What goes wrong is told, and tried again.
func (u *Unlocker) Run(ctx context.Context) error {
	pause := retry.Backoff{Min: u.cfg.Timing.RetryMin, Max: u.cfg.Timing.RetryMax}
	for {
		err := u.once(ctx)
		switch {
		case err == nil:
			u.attempts.WithLabelValues(attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)).Inc()
			u.cfg.Log.InfoContext(ctx, "the state disk is open")
			u.cfg.Console.Say("the state disk is open")
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

// once looks at the disk, and does what it needs.
func (u *Unlocker) once(ctx context.Context) error {
	state, err := u.cfg.Disk.State() // B5
	if err != nil {
		return disked(err)
	}
	switch state {
	case disk.StateOpen:
		// We have not opened it, or not come to an end with it: a process before us died, or formatting failed.
		taken, err := nodelock.Taken(ctx, u.cfg.TPM, u.bank)
		if err != nil {
			return err
		}
		if taken {
			// It died at its very end. The lock is taken after the disk was opened, and for the cluster whose key that was (B1), so
			// all is done. To start over would be in vain: a joinservice gives a machine that is locked no key, until it reboots.
			u.cfg.Log.WarnContext(ctx, "the state disk is open, and the machine is locked to its cluster")
			return nil
		}
		// Whose it is, nobody knows any more.
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

// progress tells the console of every tenth.
func (u *Unlocker) progress() func(done, total uint64) {
	u.cfg.Console.Say("formatting the state disk, which happens once")
	return func(done, total uint64) {
		if total > 0 {
			u.cfg.Console.Say(fmt.Sprintf("formatting the state disk: %d %% of %d MiB", 10*min(done*10/total, 10), total>>20))
		}
	}
}

// disked gives errors of the disk without a reason of their own theirs.
func disked(err error) error {
	if err == nil || discovery.ReasonOf(err) != attestv1.Reason_REASON_INTERNAL {
		return err
	}
	return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the state disk: %w", err)
}

// enter notes a phase.
func (u *Unlocker) enter(p initv1.Phase) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.phase != p {
		u.phase, u.since = p, time.Now()
	}
}

// failed tells of a try that failed.
func (u *Unlocker) failed(ctx context.Context, w console.Wait) {
	reason := discovery.ReasonOf(w.Err)
	u.attempts.WithLabelValues(attest.ReasonName(reason)).Inc()
	u.tries.Refused(w.Err)
	u.tries.Wait(w.Next)
	u.cfg.Log.WarnContext(ctx, "not unlocked yet", "reason", attest.ReasonName(reason), "err", w.Err, "remedy", rpc.RemedyFrom(w.Err), "again_in", w.Next.String())
	u.cfg.Console.Waits(w)
}

// try opens the disk, one key after the other, and locks the machine to the cluster whose key that is before anything of
// the disk is used (B1). So a disk that somebody else has made, under a key of their own, never runs in a machine that
// passes for one that belongs to nobody yet: PCR 15 says whose it is from then on, until the next boot.
//
// desired is what the key's sender says that the machine is to run. judged is the policy that the key's sender was judged by; nil if that was none. It is kept before the disk is open, so that no crash in between leaves
// an open disk and not what the running system has to compare its journal with.
func (u *Unlocker) try(ctx context.Context, key keys.Disk, cluster keys.ClusterID, judged *journal.Policy, desired component.Desired) error {
	u.opening.Lock()
	defer u.opening.Unlock()
	if u.open {
		return ErrOpen
	}
	if u.cluster == nil {
		if err := u.cfg.Policy.Save(journal.Record{Policy: judged}); err != nil { // J2
			return fmt.Errorf("note the policy: %w", err)
		}
		if err := u.note(desired); err != nil { // B8
			return err
		}
		if err := u.cfg.Disk.Unlock(ctx, key); err != nil {
			return err
		}
		u.cluster = &cluster
	}
	// If the TPM fails here, the next try is no new choice of a cluster.
	if err := nodelock.Settle(ctx, u.cfg.TPM, u.bank, *u.cluster); err != nil {
		return err
	}
	u.open = true
	return nil
}

// note keeps what the running system compares the disk with. It does so also if that is nothing: a file that is missing says that somebody has removed it.
func (u *Unlocker) note(desired component.Desired) error {
	if err := u.cfg.Desired.Save(desired); err != nil {
		return fmt.Errorf("note what the cluster wants this machine to run: %w", err)
	}
	return nil
}
