package renewal

import (
	"context"
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
	authority "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/rotation"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Timing are a Renewer's waits; see [DefaultTiming].
type Timing struct {
	// Interval is the longest pause between two checks of the certificates.
	Interval time.Duration
	// RetryMin and RetryMax bound the pause after a failure. Poll is the pause between two checks of a pod.
	RetryMin, RetryMax, Poll time.Duration
	// Sign is the pause between two checks for requests for an administrator's certificate, and for bans.
	Sign time.Duration
}

// DefaultTiming are the waits of production.
var DefaultTiming = Timing{Interval: time.Hour, RetryMin: 5 * time.Second, RetryMax: 2 * time.Minute, Poll: time.Second, Sign: 10 * time.Second}

// Config lists what a Renewer needs. All fields are required but Owner.
type Config struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// Kubeadm is the image's configuration of certificates: [kubeadm.Image.Certificates].
	Kubeadm kubeadmapi.ClusterConfiguration
	// Cluster is the ID of the machine's cluster, by its lock.
	Cluster keys.ClusterID
	// Owner has the owner's public keys in the image; nil if there is none, and no order is accepted.
	Owner attest.OwnerKeys
	// Epoch keeps what this machine knows of the cluster's epoch.
	Epoch Keeper
	// Connect returns the cluster, with the current administrator's kubeconfig on the disk.
	Connect func() (Cluster, error)
	Timing  Timing
	Now     func() time.Time
	Log     *slog.Logger
}

// Renewer renews the certificates of one control plane.
type Renewer struct {
	Config
	plane plane
	// mu is held while the certificates are renewed, and while the API server restarts.
	mu sync.Mutex
	// advanced is when this process last incremented the TPM's counter; zero: never. It is compared by the monotonic clock: time servers set the wall
	// clock, and the record's time is from an earlier process.
	advanced time.Time
}

// New returns a Renewer, or an error that names the missing field of cfg.
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

// AtBoot renews what expired while the machine was off, before its kubelet starts, and puts in place what an earlier renewal has left. It uses no API
// server: without these certificates there may be none. On a worker it does nothing.
//
// Before it changes manifests it calls stop, which stops the kubelet. A kubelet that was started at boot has read the old manifests, and neither stops
// nor restarts their pods before it reaches an API server, which may be one of them.
func AtBoot(root string, cfg kubeadmapi.ClusterConfiguration, now time.Time, log *slog.Logger, stop func() error) error {
	if is, err := IsControlPlane(root); !is {
		return err
	}
	return newPlane(root, cfg).atBoot(now, log, stop)
}

func (p plane) atBoot(now time.Time, log *slog.Logger, stop func() error) error {
	unlock, err := p.exclusive()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil // the machine runs, and its renewal is running
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
	// A rotation of the cluster's authority that the machine went down in may have left the signer of the key before.
	if err := authority.WriteSigner(p.on(pki)); err != nil {
		log.Error("the certificate with which kube-controller-manager signs could not be written", "err", err)
	}
	if err := p.follow(); err != nil {
		log.Error("the cross certificate of the cluster's authority could not be added to the API server's certificates", "err", err)
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

// alone renews without the lease, and restarts all components at once: a control plane with expired certificates serves no request, so nothing is lost,
// and waiting for one component before the next would never end.
func (p plane) alone(now time.Time) error {
	if p.pending() { // it is old and also expired
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

// exclusive takes the lock of this machine's renewal, and returns a function that releases it.
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

// Run renews this control plane's certificates in time until ctx ends. It continues after failures.
func (r *Renewer) Run(ctx context.Context) error {
	pause := retry.Backoff{Min: r.Timing.RetryMin, Max: r.Timing.RetryMax}
	for {
		wait, err := r.once(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // stopped by its caller
		case err != nil:
			wait = pause.Next(0)
			r.Log.WarnContext(ctx, "certificates of this control plane could not be renewed", "err", err, "again_in", wait.String())
		default:
			pause.Reset()
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

// RunAdministrators decides on requests for an administrator's certificate until ctx ends. It continues after failures.
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
			return nil // stopped by its caller
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
			return nil // stopped by its caller
		}
	}
}

// once renews if that is due, and returns the pause before the next check.
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
	if err := r.publish(ctx, list); err != nil { // at boot there is no API server yet
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
	if err := c.Publish(ctx, list); err != nil {
		return err
	}
	keys, err := rotation.Read(r.Root)
	if err != nil || keys == nil { // a rotation is at work
		return err
	}
	return c.PublishKeys(ctx, keys)
}

func (r *Renewer) renew(ctx context.Context, now time.Time) error {
	// A crash in the middle of the moves may have left a certificate without its key, with which nothing starts.
	if r.plane.pending() {
		if err := r.plane.place(); err != nil {
			return err
		}
	}
	list := Read(r.Root)
	if len(list) == 0 {
		return fmt.Errorf("%s has no certificates: restore them, or recreate them with kubeadm", filepath.Join(r.Root, pki))
	}
	if i := slices.IndexFunc(list, func(c Certificate) bool { return c.Unreadable != "" }); i >= 0 {
		return fmt.Errorf("%s: restore it, or recreate it with kubeadm", list[i].Unreadable)
	}
	if slices.ContainsFunc(list, func(c Certificate) bool { return c.invalid(now) }) {
		return r.plane.alone(now)
	}
	// After the first of them has expired, the cluster is not waited for: its API server takes no expired client certificate, so this machine would
	// never get the lease. The next attempt renews alone.
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

// errShutOut is the error of a control plane that would hold the lease until its certificates end: the API server takes no status from its kubelet, so
// its pods never become Ready.
var errShutOut = errors.New("this control plane is banned, or its enrollment is being deleted: its certificates are renewed once the ban is lifted, or when they have ended")

// admitted returns [errShutOut] if this control plane is banned, or its enrollment is being deleted.
func admitted(ctx context.Context, c Cluster) error {
	out, err := c.ShutOut(ctx)
	if err == nil && out {
		err = errShutOut
	}
	return err
}

// othersRun returns an error if a component of another control plane is not Ready, so that never two control planes lack a component at the same
// time. It does not delay an unfinished renewal, nor one with less than a tenth of a certificate's life left.
func (r *Renewer) othersRun(ctx context.Context, c Cluster, list []Certificate, now time.Time) error {
	urgent := slices.ContainsFunc(list, func(c Certificate) bool { return c.NotAfter.Sub(now) < c.NotAfter.Sub(c.NotBefore)/10 })
	if r.plane.pending() || urgent {
		return nil
	}
	bad, err := c.Unhealthy(ctx)
	if err == nil && len(bad) > 0 {
		err = fmt.Errorf("not started, since these are not Ready: %s", strings.Join(bad, ", "))
	}
	return err
}

// withLease renews while no other control plane does.
func (r *Renewer) withLease(ctx context.Context, c Cluster, list []Certificate, now time.Time) error {
	if !r.plane.pending() {
		if err := r.othersRun(ctx, c, list, now); err != nil { // another control plane may have left it broken
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
		// The lease is kept until this component runs: a failure here must not be repeated on the next control plane.
		if err := r.untilRuns(ctx, c, component, annotation); err != nil {
			return err
		}
		r.Log.InfoContext(ctx, "a part of this control plane runs with its renewed certificates", "component", component)
	}
	return r.plane.finish()
}

// untilRuns waits until a component runs. It ignores errors of the API, since the API server may be the one that restarts.
func (r *Renewer) untilRuns(ctx context.Context, c Cluster, component, annotation string) error {
	tick := time.NewTicker(r.Timing.Poll)
	defer tick.Stop()
	began, logged := time.Now(), time.Now()
	for {
		runs, err := c.Runs(ctx, component, annotation)
		if err == nil && runs {
			return nil
		}
		if notAdmitted := admitted(ctx, c); errors.Is(notAdmitted, errShutOut) { // banned meanwhile; the renewal continues after the ban
			return notAdmitted
		}
		if time.Since(logged) > time.Minute {
			logged = time.Now()
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

// first returns the time when the first of the certificates expires.
func first(list []Certificate) time.Time {
	return slices.MinFunc(list, func(a, b Certificate) int { return a.NotAfter.Compare(b.NotAfter) }).NotAfter
}
