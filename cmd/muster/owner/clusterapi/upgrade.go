package clusterapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/Masterminds/semver/v3"
	"helm.sh/helm/v4/pkg/action"
	chartutil "helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/kube"
	"helm.sh/helm/v4/pkg/release/common"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"

	"github.com/muster-k8s/muster/deploy/charts"
)

// ErrNoRelease is returned if Muster's chart is not installed.
var ErrNoRelease = errors.New("the cluster has no release of Muster's chart")

// ErrDowngrade is returned if the cluster's chart is newer than this program's.
var ErrDowngrade = errors.New("the cluster runs a newer version of Muster")

// RolledBack is the error of an upgrade that failed, after which the previous release runs again.
type RolledBack struct {
	// Failed is the revision that did not become ready, Now the one that runs.
	Failed, Now int
	// Cause is the reason.
	Cause error
}

func (e *RolledBack) Error() string {
	return fmt.Sprintf("revision %d did not become ready, and revision %d rolled it back: %v", e.Failed, e.Now, e.Cause)
}

// Unwrap returns the cause.
func (e *RolledBack) Unwrap() error { return e.Cause }

// Rollout is an upgrade of the release.
type Rollout struct {
	// Values are all values of the chart, as [Client.NextValues] returns them.
	Values map[string]any
	// Ready waits until the services are in their final state. It is called after the upgrade, and again after a
	// rollback. Its context ends after Patience, or after Back.
	Ready func(context.Context) error
	// Patience is how long the services may take after the upgrade.
	Patience time.Duration
	// Back is the same for a rollback; 0 for Patience.
	Back time.Duration
}

// NextValues returns the next values of the release: its present ones, overridden by those of v, including v's images
// and keys if set. Values that an administrator set with plain helm are kept.
func (c *Client) NextValues(last *releasev1.Release, v Values) map[string]any {
	have := chartutil.CoalesceTables(map[string]any{}, last.Config)
	next := chartutil.CoalesceTables(maps.Clone(v.More), have)
	if next == nil {
		next = have
	}
	section := func(name, key string, value any) {
		s, _ := next[name].(map[string]any)
		s = maps.Clone(s)
		if s == nil {
			s = map[string]any{}
		}
		s[key] = value
		next[name] = s
	}
	if len(v.OwnerKeys) > 0 {
		next["owner"] = map[string]any{"publicKeys": anys(v.OwnerKeys)}
	}
	if v.JoinserviceImage != "" {
		section("joinservice", "image", v.JoinserviceImage)
	}
	if v.KMSImage != "" {
		section("kms", "image", v.KMSImage)
	}
	return next
}

// Newest returns the newest revision of the release in any state; [ErrNoRelease] if there is none.
func (c *Client) Newest(log *slog.Logger) (*releasev1.Release, error) {
	r, err := c.Release(log)
	if err == nil && r == nil {
		err = ErrNoRelease
	}
	return r, err
}

// CheckDirection refuses a downgrade: the error wraps [ErrDowngrade].
func CheckDirection(last *releasev1.Release) error {
	chart, err := charts.Muster()
	if err != nil {
		return err
	}
	have, err := semver.NewVersion(last.Chart.Metadata.Version)
	if err != nil {
		return fmt.Errorf("version %q of the installed chart: %w", last.Chart.Metadata.Version, err)
	}
	next, err := semver.NewVersion(chart.Metadata.Version)
	if err != nil {
		return err
	}
	if next.LessThan(have) {
		return fmt.Errorf("%w: chart %s; this program has %s", ErrDowngrade, have, next)
	}
	return nil
}

// UpgradeChart upgrades the release to the chart of this program. If the services do not become ready, helm rolls the
// release back, and the error is a [RolledBack]. It resumes an upgrade that was killed. Until the services are ready,
// the revision has the state pending-upgrade, as in an upgrade by plain helm.
func (c *Client) UpgradeChart(ctx context.Context, r Rollout, log *slog.Logger) (*releasev1.Release, error) {
	chart, err := charts.Muster()
	if err != nil {
		return nil, err
	}
	cfg, err := c.helm(log)
	if err != nil {
		return nil, err
	}
	last, err := lastRelease(cfg)
	if err != nil {
		return nil, err
	}
	if last == nil {
		return nil, ErrNoRelease
	}
	if err := freeRelease(cfg, last); err != nil {
		return nil, err
	}
	j := &checkedClient{Interface: cfg.KubeClient, ready: r.Ready, forward: ctx, back: r.Back}
	cfg.KubeClient = j
	upgrade := action.NewUpgrade(cfg)
	upgrade.Namespace = Namespace
	upgrade.ServerSideApply, upgrade.ForceConflicts = "true", true
	upgrade.RollbackOnFailure, upgrade.WaitStrategy, upgrade.Timeout = true, kube.StatusWatcherStrategy, r.Patience
	upgrade.MaxHistory = maxHistory
	upgrade.ResetValues = true // r.Values are complete
	// When ctx ends, the wait for the new revision also ends. Only the end of this wait makes helm roll back, once
	// and completely. If helm got ctx itself, it would roll back twice.
	out, err := upgrade.RunWithContext(context.WithoutCancel(ctx), release, chart, r.Values)
	if err != nil {
		return nil, c.failed(cfg, last, err)
	}
	next, ok := out.(*releasev1.Release)
	if !ok {
		return nil, fmt.Errorf("helm returned a %T", out)
	}
	return next, nil
}

// failed determines the result of a failed upgrade. last is the revision before it.
func (c *Client) failed(cfg *action.Configuration, last *releasev1.Release, cause error) error {
	now, err := lastRelease(cfg)
	if err != nil {
		return errors.Join(fmt.Errorf("helm: %w", cause), err)
	}
	if now != nil && now.Version > last.Version+1 && now.Info.Status == common.StatusDeployed {
		return &RolledBack{Failed: last.Version + 1, Now: now.Version, Cause: cause}
	}
	return fmt.Errorf("helm: %w", cause)
}

// checkedClient is helm's client with Muster's own check of readiness. Helm's check only reads the DaemonSets'
// numbers, by which a joinservice that fails attestation counts as ready.
type checkedClient struct {
	kube.Interface

	ready   func(context.Context) error
	forward context.Context //nolint:containedctx // helm's waiters get no context
	back    time.Duration
	asked   bool
}

// GetWaiter implements [kube.Interface].
func (j *checkedClient) GetWaiter(kube.WaitStrategy) (kube.Waiter, error) {
	inner, err := j.Interface.GetWaiter(kube.StatusWatcherStrategy)
	return &readyWaiter{Waiter: inner, checkedClient: j}, err
}

type readyWaiter struct {
	kube.Waiter
	*checkedClient
}

// Wait implements [kube.Waiter]. It is called for the upgrade, and then for the rollback, which only a timeout can end.
func (j *readyWaiter) Wait(_ kube.ResourceList, patience time.Duration) error {
	ctx := j.forward
	if j.asked {
		ctx, patience = context.WithoutCancel(ctx), cmp.Or(j.back, patience)
	}
	j.asked = true
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not ready within %s: %w", patience, context.DeadlineExceeded))
	defer cancel()
	return j.ready(ctx)
}
