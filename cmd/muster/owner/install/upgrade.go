package install

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/trust/attest"
)

// UpgradeConfig configures [Upgrade]. Dir, Report and Log are required.
type UpgradeConfig struct {
	// Dir is the owner's folder; the backup goes there.
	Dir *ownerdir.Dir
	// Values are the changes; the release keeps the other values. The owner's keys are added.
	Values clusterapi.Values
	// OwnerKeys are the owner's keys that the services accept; nil for those of the folder.
	OwnerKeys attest.OwnerKeys
	// AllowDowngrade allows an older chart. Definitions then stay unchanged.
	AllowDowngrade bool
	// LeaveOut are names of control planes in the cluster that are not the owner's.
	LeaveOut []string
	// Patience is how long the services may take to become ready after the upgrade.
	Patience time.Duration
	// Back is the same after a rollback; 0 for Patience.
	Back time.Duration
	// Report receives each step.
	Report progress.Reporter
	// Log receives the output of helm and client-go.
	Log *slog.Logger
	// DialContext opens TCP connections to machines; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// UpgradeSteps is the maximum number of steps that [Upgrade] reports.
const UpgradeSteps = 4

// Upgraded is the result of an upgrade.
type Upgraded struct {
	// Plan is the set of changes that it found.
	Plan *clusterapi.Plan `json:"plan"`
	// Backup is the folder of the backup; empty if nothing changed.
	Backup string `json:"backup,omitempty"`
	// Revision of the release that runs now.
	Revision int `json:"revision"`
}

type upgrader struct {
	UpgradeConfig

	kube        *clusterapi.Client
	init        *initializer
	definitions []*unstructured.Unstructured
	last        *releasev1.Release
	values      map[string]any
	plan        *clusterapi.Plan
}

// PlanUpgrade returns the changes that [Upgrade] would make, without making them.
func PlanUpgrade(ctx context.Context, cfg UpgradeConfig) (*clusterapi.Plan, error) {
	u, err := newUpgrader(cfg)
	if err != nil {
		return nil, err
	}
	return u.plan, u.look(ctx)
}

// Upgrade backs up Muster's objects in the cluster, and updates definitions and services to this program's version.
// If the services do not become ready, or a joinservice fails attestation, helm rolls the release back: the error
// then wraps a [clusterapi.RolledBack]. The next call resumes an interrupted upgrade.
func Upgrade(ctx context.Context, cfg UpgradeConfig) (*Upgraded, error) {
	u, err := newUpgrader(cfg)
	if err != nil {
		return nil, err
	}
	err = u.init.step("compare the cluster with this version", func() (string, error) {
		if err := u.look(ctx); err != nil {
			return "", err
		}
		return u.summary(), nil
	})
	if err != nil {
		return nil, err
	}
	out := &Upgraded{Plan: u.plan, Revision: u.last.Version}
	if u.plan.Empty() {
		err := u.init.step("verify Muster's services", func() (string, error) {
			ctx, cancel := deadline(ctx, u.Patience, "Muster's services are not ready")
			defer cancel()
			return "", u.ready(ctx)
		})
		return out, err
	}
	steps := []struct {
		name string
		do   func() (string, error)
	}{
		{"back up", func() (_ string, err error) {
			out.Backup, err = u.backup(ctx)
			return out.Backup, err
		}},
		{"define Muster's objects", func() (string, error) {
			return fmt.Sprintf("%d definitions", len(u.definitions)), u.kube.Apply(ctx, u.definitions, u.Report.Update)
		}},
		{"roll Muster's services", func() (string, error) {
			r, err := u.kube.UpgradeChart(ctx, clusterapi.Rollout{Values: u.values, Ready: u.ready, Patience: u.Patience, Back: u.Back}, u.Log)
			if err != nil {
				return "", u.explain(err)
			}
			out.Revision = r.Version
			return fmt.Sprintf("release %s, revision %d", r.Name, r.Version), nil
		}},
	}
	for _, s := range steps {
		if err := u.init.step(s.name, s.do); err != nil {
			return out, err
		}
	}
	return out, nil
}

func newUpgrader(cfg UpgradeConfig) (*upgrader, error) {
	if cfg.Dir == nil || cfg.Report == nil || cfg.Log == nil || cfg.Patience <= 0 {
		return nil, errors.New("install.Upgrade: Dir, Report, Log and Patience are required")
	}
	u := &upgrader{
		UpgradeConfig: cfg, plan: &clusterapi.Plan{},
		init: &initializer{InitConfig: InitConfig{Dir: cfg.Dir, Report: cfg.Report, Log: cfg.Log, DialContext: cfg.DialContext}},
	}
	if err := u.init.load(); err != nil {
		return nil, err
	}
	var err error
	if u.definitions, err = clusterapi.Definitions(); err != nil {
		return nil, err
	}
	u.kube, err = access.Connect(cfg.Dir)
	return u, err
}

// look reads the present state and plans the changes.
func (u *upgrader) look(ctx context.Context) error {
	var err error
	if u.last, err = u.kube.Newest(u.Log); err != nil {
		if errors.Is(err, clusterapi.ErrNoRelease) {
			err = problem.WithRemedy(err, "Run the command muster init of this cluster again, without --policy: it installs what is missing.")
		}
		return err
	}
	err = clusterapi.CheckDirection(u.last)
	switch {
	case errors.Is(err, clusterapi.ErrDowngrade) && u.AllowDowngrade:
		u.definitions = nil // data of newer services must stay readable
	case errors.Is(err, clusterapi.ErrDowngrade):
		return problem.WithRemedy(err, "Use the muster of that version or a newer one. To downgrade anyway, read docs/upgrade.md and give --allow-downgrade.")
	case err != nil:
		return err
	}
	public := u.OwnerKeys
	if public == nil {
		if public, err = u.Dir.OwnerKeys(); err != nil {
			return err
		}
	}
	if err := u.readsPolicy(ctx, public); err != nil {
		return err
	}
	if u.OwnerKeys == nil { // else the keys change on purpose
		if err := u.init.compareKeys(u.kube); err != nil {
			return err
		}
	}
	if err := policies.MustList(ctx, u.Dir, u.kube, u.init.policy, u.LeaveOut); err != nil {
		return err
	}
	v := u.Values
	v.OwnerKeys = slices.Sorted(slices.Values(public.Strings())) // sorted, because another order would restart the services
	u.values = u.kube.NextValues(u.last, v)
	plan, err := u.kube.Plan(ctx, u.last, u.values, u.definitions, u.Log)
	if errors.Is(err, clusterapi.ErrIncompatible) {
		return problem.WithRemedy(err, "Nothing was changed. Upgrade through the versions between, as docs/upgrade.md says.")
	}
	if err != nil {
		return err
	}
	*u.plan = *plan
	return nil
}

// readsPolicy refuses an upgrade after which joinservice would refuse the cluster's policy, and so admit no machine: versions differ in what they accept.
func (u *upgrader) readsPolicy(ctx context.Context, owner attest.OwnerKeys) error {
	have, err := u.kube.Policy(ctx)
	if clusterapi.Absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := policies.OpenPolicy(have, owner); err != nil { // A3
		return problem.WithRemedy(fmt.Errorf("the services of this version would refuse the cluster's policy: %w", err), "Nothing was changed. "+problem.Remedy(err)+" Then repeat the command.")
	}
	return nil
}

func (u *upgrader) summary() string {
	p := u.plan
	if p.Empty() {
		return fmt.Sprintf("revision %d is up to date", p.Revision)
	}
	text := fmt.Sprintf("chart %s to %s: %d values, %d definitions, %d objects change", p.Chart.From, p.Chart.To, len(p.Values), len(p.Definitions), len(p.Objects))
	if u.last.Info.Status.IsPending() {
		text += fmt.Sprintf("; continues the interrupted revision %d", p.Revision)
	}
	return text
}

func (u *upgrader) backup(ctx context.Context) (string, error) {
	all, err := clusterapi.Definitions()
	if err != nil {
		return "", err
	}
	files, err := u.kube.Backup(ctx, u.last, all)
	if err != nil {
		return "", err
	}
	return u.Dir.Backup(time.Now(), files)
}

// ready waits until all of Muster's pods are ready, and until every control plane's joinservice has answered and was
// appraised as a joining machine does it.
func (u *upgrader) ready(ctx context.Context) error {
	if err := u.kube.ServicesReady(ctx, u.Report.Update); err != nil {
		return err
	}
	planes, err := u.kube.ControlPlanes(ctx)
	if err != nil {
		return err
	}
	port := strconv.Itoa(clusterapi.Values{More: u.values}.JoinPort())
	for _, p := range planes {
		id, err := attest.ParseMachineID(p.MachineID)
		if err != nil {
			return fmt.Errorf("enrollment of %s: %w", p.Name, err)
		}
		next := 0
		err = u.init.retry(ctx, func() error {
			at := net.JoinHostPort(p.Addresses[next%len(p.Addresses)], port)
			next++
			u.Report.Update("appraising the joinservice at " + at)
			return u.init.askJoinservice(ctx, at, id)
		})
		if err != nil {
			return fmt.Errorf("joinservice of %s: %w", p.Name, err)
		}
	}
	return nil
}

func (u *upgrader) explain(err error) error {
	if back, ok := errors.AsType[*clusterapi.RolledBack](err); ok {
		return problem.WithRemedy(err, fmt.Sprintf("The cluster runs as before, with revision %d. The error above names the cause; %s helps if a pod did not start. Repair it and run the command again.",
			back.Now, "kubectl -n "+clusterapi.Namespace+" get events"))
	}
	if strings.Contains(err.Error(), "another operation") {
		return problem.WithRemedy(err, "Another helm or muster command is changing the release. Wait until it is done.")
	}
	return err
}
