package install

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/deploy/charts"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A3: after such an upgrade, joinservice would have no policy, and admit no machine.
func TestServicesThatWouldRefuseThePolicyAreNotInstalled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	o := ownertest.Rules(ctx, t, kube, attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	chart, err := charts.Muster()
	if err != nil {
		t.Fatal(err)
	}
	store := storage.Init(driver.NewSecrets(ownertest.Kube(t, "helm", "system:masters").CoreV1().Secrets(clusterapi.Namespace)))
	const revision = 99
	if err := store.Create(&releasev1.Release{Name: "muster", Namespace: clusterapi.Namespace, Version: revision, Chart: chart, Config: map[string]any{"owner": map[string]any{"publicKeys": []any{"another"}}}, Info: &releasev1.Info{Status: "deployed"}}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := store.Delete("muster", revision); err != nil {
			t.Error(err)
		}
	}()
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	put := func(serial uint64, ids ...string) {
		t.Helper()
		json := attesttest.Policy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) { p.Serial, p.Tpm2.MachineIds = serial, ids })
		if err := ownertest.PutPolicy(ctx, kube, attest.SignPolicy(key, json)); err != nil {
			t.Fatal(err)
		}
	}
	cfg := UpgradeConfig{Dir: o.Dir, Report: o.Report(UpgradeSteps), Log: slog.New(slog.DiscardHandler), Patience: ownertest.Patience}
	put(2, m.ID().String(), m.ID().String()) // the version before accepts it
	_, err = PlanUpgrade(ctx, cfg)
	if p := problem.Explain(err); p.Reason != "POLICY_INVALID" || !strings.Contains(p.Message, "machineIds lists "+m.ID().String()+" twice") || !strings.HasPrefix(p.Remedy, "Nothing was changed. ") || !strings.Contains(p.Remedy, "muster policy apply") {
		t.Errorf("%v: %+v", err, p)
	}
	put(3, m.ID().String())
	// A copy of the folder with a former key would have the services accept that key again.
	if _, err := PlanUpgrade(ctx, cfg); problem.Explain(err).Reason != "POLICY_SIGNATURE" || !strings.Contains(problem.Remedy(err), "older copy") {
		t.Errorf("with other owner's keys: %v", err)
	}
	u, err := newUpgrader(cfg)
	if err == nil {
		err = u.readsPolicy(ctx, attest.OwnerKeys{access.PublicOf(key)})
	}
	if err != nil {
		t.Error(err)
	}
}
