package renewal

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"

	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/keys"
)

// Timing are a Renewer's waits. [DefaultTiming] are those of production.
type Timing struct {
	// Interval is the longest pause between two looks at the certificates.
	Interval time.Duration
	// RetryMin and RetryMax bound the pause after a failure, Poll is that between two looks at a pod.
	RetryMin, RetryMax, Poll time.Duration
	// Sign is the pause between two looks at requests for an administrator's certificate, and at who is banned.
	Sign time.Duration
}

// DefaultTiming are the waits of production.
var DefaultTiming = Timing{Interval: time.Hour, RetryMin: 5 * time.Second, RetryMax: 2 * time.Minute, Poll: time.Second, Sign: 10 * time.Second}

// Config lists what a Renewer needs. All fields are required but Owner.
type Config struct {
	// Root stands for the root of the file system: "/" on a machine.
	Root string
	// Kubeadm is how the image wants certificates: [kubeadm.Image.Certificates].
	Kubeadm kubeadmapi.ClusterConfiguration
	// Cluster is the one that the machine is locked to.
	Cluster keys.ClusterID
	// Owner is the owner's public key as the image names it; nil: it names none, and nobody's orders count.
	Owner ed25519.PublicKey
	// Epoch is what this machine knows of the cluster's epoch.
	Epoch Keeper
	// Connect returns the cluster, with the administrator's kubeconfig as it is on the disk when it is called.
	Connect func() (Cluster, error)
	Timing  Timing
	Now     func() time.Time
	Log     *slog.Logger
}

// Renewer renews the certificates of one control plane.
type Renewer struct {
	Config
	plane plane
	// mu is held while the certificates are renewed, and while the API server is restarted.
	mu sync.Mutex
	// advanced is when this process last incremented the TPM's counter; zero: it has not. What it is compared with has the same monotonic clock: the wall clock is
	// that of time servers, and the record's time is that of an earlier process.
	advanced time.Time
}

// New returns a Renewer, or an error that says that a part of cfg is missing.
func New(cfg Config) (*Renewer, error) {
	if err := required.Fields("renewal.New", cfg, "Owner", "Kubeadm"); err != nil {
		return nil, err
	}
	if !filepath.IsAbs(cfg.Root) {
		return nil, fmt.Errorf("renewal.New: Root %q is not an absolute path", cfg.Root)
	}
	return &Renewer{Config: cfg, plane: newPlane(cfg.Root, cfg.Kubeadm)}, nil
}

func newPlane(root string, cfg kubeadmapi.ClusterConfiguration) plane {
	return plane{root, cfg, machine.Sync, func(string) error { return nil }}
}

// AtBoot renews what has expired while the machine was off, before its kubelet is started, and puts in place what an earlier renewal has
// left. It asks nobody: without these certificates there may be no API server to ask. A machine that is no control plane has nothing to renew.
//
// Before it changes manifests it calls stop, which stops the kubelet: one that was started with the machine has read those of before, and stops or restarts none of
// their pods before it has heard from an API server, which may be one of them.
func AtBoot(root string, cfg kubeadmapi.ClusterConfiguration, now time.Time, log *slog.Logger, stop func() error) error {
	if !IsControlPlane(root) {
		return nil
	}
	return newPlane(root, cfg).atBoot(now, log, stop)
}

func (p plane) atBoot(now time.Time, log *slog.Logger, stop func() error) error {
	unlock, err := p.exclusive()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil // the machine runs, and its renewal is at work
	}
	if err != nil {
		return err
	}
	defer unlock()
	if p.pending() {
		if err := p.place(); err != nil {
			return err
		}
	}
	if expired := names(Read(p.root), func(c Certificate) bool { return c.invalid(now) }); len(expired) > 0 {
		log.Warn("certificates of this control plane have expired; renewing them with the authorities on the disk", "certificates", expired)
		if err := stop(); err != nil {
			return err
		}
		return p.alone(now)
	}
	return nil
}

// alone renews without the lease, and restarts everything at once: a control plane whose certificates have expired serves nobody, so
// nothing is lost by that, and to wait for one of its parts before the next would be to wait for ever.
func (p plane) alone(now time.Time) error {
	if p.pending() { // of another time, and expired as well
		if err := p.finish(); err != nil {
			return err
		}
	}
	if err := p.prepare(now); err != nil {
		return err
	}
	if err := p.place(); err != nil {
		return err
	}
	for _, c := range components {
		if _, err := p.restart(c); err != nil {
			return err
		}
	}
	return p.finish()
}

// exclusive takes the lock of this machine's renewal, and returns how it is given back.
func (p plane) exclusive() (func(), error) {
	f, err := os.OpenFile(p.on(folder+"/.muster-renewal.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// Run keeps this control plane's certificates alive until ctx ends. No failure ends it.
func (r *Renewer) Run(ctx context.Context) error {
	pause := retry.Backoff{Min: r.Timing.RetryMin, Max: r.Timing.RetryMax}
	for {
		wait, err := r.once(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // it was told to end
		case err != nil:
			wait = pause.Next(0)
			r.Log.WarnContext(ctx, "certificates of this control plane could not be renewed", "err", err, "again_in", wait.String())
		default:
			pause.Reset()
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // it was told to end
		}
	}
}

// RunAdministrators decides on requests for an administrator's certificate until ctx ends. No failure ends it.
func (r *Renewer) RunAdministrators(ctx context.Context) error {
	pause := retry.Backoff{Min: r.Timing.Sign, Max: r.Timing.RetryMax}
	var c Cluster
	defer func() {
		if c != nil {
			c.Close()
		}
	}()
	for {
		var err error
		if c == nil {
			c, err = r.Connect()
		}
		wait := r.Timing.Sign
		if err == nil {
			err = c.SignAdministrators(ctx, r.Config)
		}
		switch {
		case ctx.Err() != nil:
			return nil // it was told to end
		case err != nil:
			wait = pause.Next(0)
			r.Log.WarnContext(ctx, "requests for an administrator's certificate could not be looked at", "err", err, "again_in", wait.String())
			if c != nil {
				c.Close() // its certificate may be an old one
				c = nil
			}
		default:
			pause.Reset()
		}
		if retry.Wait(ctx, wait) != nil {
			return nil // it was told to end
		}
	}
}

// once renews if that is due, and returns when to look again.
func (r *Renewer) once(ctx context.Context) (time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	unlock, err := r.plane.exclusive()
	if err != nil {
		return 0, err
	}
	defer unlock()
	now := r.Now()
	list := Read(r.Root)
	due := names(list, func(c Certificate) bool { return c.Due(now) })
	if r.plane.pending() || len(due) > 0 {
		r.Log.InfoContext(ctx, "renewing the certificates of this control plane", "due", due, "begun_before", r.plane.pending())
		if err := r.renew(ctx, now); err != nil {
			return 0, err
		}
		list = Read(r.Root)
		r.Log.InfoContext(ctx, "the certificates of this control plane are renewed and in use", "first_ends", first(list).UTC().Format(time.RFC3339))
	}
	wait := r.Timing.Interval
	if err := r.publish(ctx, list); err != nil { // at boot: there is no API server yet
		wait = min(wait, r.Timing.RetryMax)
		r.Log.WarnContext(ctx, "the ends of this control plane's certificates could not be written to its Node", "err", err)
	}
	for _, c := range list {
		wait = min(wait, c.DueAt().Sub(r.Now()))
	}
	return max(wait, r.Timing.RetryMin), nil
}

func (r *Renewer) publish(ctx context.Context, list []Certificate) error {
	c, err := r.Connect()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Publish(ctx, list)
}

func (r *Renewer) renew(ctx context.Context, now time.Time) error {
	// Whoever was cut off while it moved them may have left a certificate without its key, with which nothing starts.
	if r.plane.pending() {
		if err := r.plane.place(); err != nil {
			return err
		}
	}
	list := Read(r.Root)
	if len(list) == 0 {
		return fmt.Errorf("%s has no certificates: restore them, or have kubeadm make them anew", filepath.Join(r.Root, pki))
	}
	if i := slices.IndexFunc(list, func(c Certificate) bool { return c.Unreadable != "" }); i >= 0 {
		return fmt.Errorf("%s: restore it, or have kubeadm make it anew", list[i].Unreadable)
	}
	if slices.ContainsFunc(list, func(c Certificate) bool { return c.invalid(now) }) {
		return r.plane.alone(now)
	}
	// Once the first of them has ended, the cluster is not waited for any more, as whoever has the lease may keep it: it takes no client certificate that has
	// expired, so that would be for ever. The next try renews alone.
	ctx, cancel := context.WithTimeout(ctx, first(list).Sub(now))
	defer cancel()
	c, err := r.Connect()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := admitted(ctx, c); err != nil {
		return err
	}
	if err := r.othersRun(ctx, c, list, now); err != nil {
		return err
	}
	return c.Exclusively(ctx, func(ctx context.Context) error { return r.withLease(ctx, c, list, now) }) // J8
}

// errShutOut is about a control plane that would hold the lease until its certificates end: the API server takes from its kubelet no word on whether a
// pod is Ready.
var errShutOut = errors.New("this control plane is banned, or its enrollment is being deleted: its certificates are renewed once the ban is lifted, or when they have ended")

// admitted returns [errShutOut] if the cluster says so of this control plane.
func admitted(ctx context.Context, c Cluster) error {
	out, err := c.ShutOut(ctx)
	if err == nil && out {
		err = errShutOut
	}
	return err
}

// othersRun returns an error if a part of a control plane is not Ready, so that never two control planes are without one. What was begun goes
// on, and with less than a tenth of a certificate's life left a control plane that is broken is not waited for any longer.
func (r *Renewer) othersRun(ctx context.Context, c Cluster, list []Certificate, now time.Time) error {
	urgent := slices.ContainsFunc(list, func(c Certificate) bool { return c.NotAfter.Sub(now) < c.NotAfter.Sub(c.NotBefore)/10 })
	if r.plane.pending() || urgent {
		return nil
	}
	bad, err := c.Unhealthy(ctx)
	if err == nil && len(bad) > 0 {
		err = fmt.Errorf("not begun, since these are not Ready: %s", strings.Join(bad, ", "))
	}
	return err
}

// withLease renews while no other control plane does.
func (r *Renewer) withLease(ctx context.Context, c Cluster, list []Certificate, now time.Time) error {
	if !r.plane.pending() {
		if err := r.othersRun(ctx, c, list, now); err != nil { // what another one did before it gave the lease back
			return err
		}
		if err := r.plane.prepare(now); err != nil {
			return err
		}
		if err := r.plane.place(); err != nil {
			return err
		}
	}
	for _, component := range components {
		annotation, err := r.plane.restart(component)
		if err != nil {
			return err
		}
		if annotation == "" {
			continue
		}
		// The lease is kept until this one runs: what fails here must not fail on the next control plane too.
		if err := r.untilRuns(ctx, c, component, annotation); err != nil {
			return err
		}
		r.Log.InfoContext(ctx, "a part of this control plane runs with its renewed certificates", "component", component)
	}
	return r.plane.finish()
}

// untilRuns waits for a component. Errors are asked past: the API server may be what restarts.
func (r *Renewer) untilRuns(ctx context.Context, c Cluster, component, annotation string) error {
	tick := time.NewTicker(r.Timing.Poll)
	defer tick.Stop()
	began, told := time.Now(), time.Now()
	for {
		runs, err := c.Runs(ctx, component, annotation)
		if err == nil && runs {
			return nil
		}
		if notAdmitted := admitted(ctx, c); errors.Is(notAdmitted, errShutOut) { // banned meanwhile; what was begun goes on once it is not
			return notAdmitted
		}
		if time.Since(told) > time.Minute {
			told = time.Now()
			r.Log.WarnContext(ctx, "a part of this control plane is not Ready since it was restarted", "component", component, "since", time.Since(began).Round(time.Second).String(), "err", err)
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for %s: %w", component, context.Cause(ctx)), err)
		case <-tick.C:
		}
	}
}

func names(list []Certificate, which func(Certificate) bool) []string {
	var out []string
	for _, c := range list {
		if which(c) {
			out = append(out, c.Name)
		}
	}
	return out
}

// first returns when the first of the certificates ends.
func first(list []Certificate) time.Time {
	return slices.MinFunc(list, func(a, b Certificate) int { return a.NotAfter.Compare(b.NotAfter) }).NotAfter
}
