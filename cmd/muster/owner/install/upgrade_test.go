package install

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
)

// unready is in the names of images whose pods never become ready.
const unready = "crashes"

// rolls replaces the controller and the kubelet of the DaemonSets until ctx ends.
func rolls(ctx context.Context, k *kubernetes.Clientset) {
	for range ownertest.ChangesIn(ctx, &appsv1.DaemonSetList{}, clusterapi.Namespace, "") {
		for _, name := range clusterapi.Services {
			ds, err := k.AppsV1().DaemonSets(clusterapi.Namespace).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				continue
			}
			s := appsv1.DaemonSetStatus{ObservedGeneration: ds.Generation, DesiredNumberScheduled: 1, CurrentNumberScheduled: 1, NumberReady: 1, UpdatedNumberScheduled: 1}
			if strings.Contains(ds.Spec.Template.Spec.Containers[0].Image, unready) {
				s.UpdatedNumberScheduled = 0 // the old pod still runs
			}
			if s.ObservedGeneration != ds.Status.ObservedGeneration || s.UpdatedNumberScheduled != ds.Status.UpdatedNumberScheduled {
				ds.Status = s
				_, _ = k.AppsV1().DaemonSets(clusterapi.Namespace).UpdateStatus(ctx, ds, metav1.UpdateOptions{}) // after a conflict, the next round tries again
			}
		}
	}
}

// checkUpgrade upgrades the cluster that init made, with and without failures.
func checkUpgrade(t *testing.T, o *ownertest.Owned, dial func(context.Context, string, string) (net.Conn, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*ownertest.Patience)
	defer cancel()
	admin := ownertest.Kube(t, "controller", "system:masters")
	done := make(chan struct{})
	go func() { defer close(done); rolls(ctx, admin) }()
	defer func() { cancel(); <-done }()
	node, err := admin.CoreV1().Nodes().Get(ctx, "node1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.77.11"}}
	if _, err := admin.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	u := &upgrades{Owned: o, ctx: ctx, admin: admin, cfg: UpgradeConfig{
		Dir: o.Dir, Patience: ownertest.Patience, Back: ownertest.Patience, Log: slog.New(slog.DiscardHandler), DialContext: dial,
		Report: progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: UpgradeSteps}),
	}}
	t.Run("services that don't get ready are rolled back", u.notReady)
	t.Run("an upgrade that is told to stop goes back, once", u.stopped)
	t.Run("a joinservice that nobody should trust is rolled back", u.notTrusted)
	t.Run("an upgrade is rolled out, and again changes nothing", u.good)
	t.Run("a revision that was cut off is taken up", u.cutOff)
	t.Run("a definition that would lose a field is refused", u.losesAField)
	t.Run("a downgrade is refused unless told", u.downgrade)
	t.Run("a backup is put back as documented", u.restored)
	if o.Leaks([]byte(o.Out.String())) {
		t.Error("a secret was reported (K3)")
	}
}

type upgrades struct {
	*ownertest.Owned

	ctx   context.Context
	admin *kubernetes.Clientset
	cfg   UpgradeConfig
	saved string // a backup
}

func (u *upgrades) to(digit string) UpgradeConfig {
	c := u.cfg
	c.Values = clusterapi.Values{JoinserviceImage: ownertest.ImageOf("joinservice", digit), KMSImage: ownertest.ImageOf("kms", digit)}
	return c
}

// history returns the states of the newest revisions, and the number of the newest.
func (u *upgrades) history(t *testing.T, n int) (states []string, newest int) {
	t.Helper()
	found, err := storage.Init(driver.NewSecrets(u.admin.CoreV1().Secrets(clusterapi.Namespace))).History("muster")
	if err != nil {
		t.Fatal(err)
	}
	byRevision := map[int]string{}
	for _, f := range found {
		r := f.(*releasev1.Release)
		byRevision[r.Version], newest = string(r.Info.Status), max(newest, r.Version)
	}
	for i := newest - n + 1; i <= newest; i++ {
		states = append(states, byRevision[i])
	}
	return states, newest
}

func (u *upgrades) want(t *testing.T, states ...string) {
	t.Helper()
	if got, _ := u.history(t, len(states)); !slices.Equal(got, states) {
		t.Errorf("revisions %q, want %q", got, states)
	}
}

func (u *upgrades) backups(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(u.Path(), "backups", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func (u *upgrades) image(t *testing.T) string {
	t.Helper()
	ds, err := u.admin.AppsV1().DaemonSets(clusterapi.Namespace).Get(u.ctx, "muster-kms", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return ds.Spec.Template.Spec.Containers[0].Image
}

func (u *upgrades) rolledBack(t *testing.T, err error, before string) {
	t.Helper()
	back, ok := errors.AsType[*clusterapi.RolledBack](err)
	if !ok || problem.Explain(err).Remedy == "" {
		t.Fatalf("got %v", err)
	}
	if _, newest := u.history(t, 1); back.Now != newest || back.Failed != newest-1 {
		t.Errorf("revision %d of %d", back.Now, newest)
	}
	u.want(t, "superseded", "failed", "deployed")
	if now := u.image(t); now != before {
		t.Errorf("%s runs, %s ran", now, before)
	}
}

func (u *upgrades) notReady(t *testing.T) {
	before, cfg := u.image(t), u.to("3")
	cfg.Values.KMSImage = ownertest.ImageOf(unready, "3")
	cfg.Patience = 10 * time.Second
	out, err := Upgrade(u.ctx, cfg)
	u.rolledBack(t, err, before)
	if !strings.Contains(err.Error(), "muster-kms 1/1 ready, 0/1 of them new") {
		t.Errorf("the cause is not told: %v", err)
	}
	if out == nil || len(u.backups(t)) != 1 || out.Backup != u.backups(t)[0] {
		t.Errorf("backup %+v", out)
	}
}

func (u *upgrades) stopped(t *testing.T) {
	before, cfg := u.image(t), u.to("4")
	cfg.Values.KMSImage = ownertest.ImageOf(unready, "4")
	_, first := u.history(t, 1)
	ctx, cancel := context.WithCancel(u.ctx)
	defer cancel()
	cfg.Report = &stopAt{Reporter: cfg.Report, text: "muster-kms", stop: cancel}
	_, err := Upgrade(ctx, cfg)
	u.rolledBack(t, err, before)
	if _, last := u.history(t, 1); last != first+2 {
		t.Errorf("%d revisions were made, want a failed one and one that goes back", last-first)
	}
}

// stopAt cancels, like Ctrl-C, when a text appears.
type stopAt struct {
	progress.Reporter

	text string
	stop func()
}

func (s *stopAt) Update(text string) {
	if strings.Contains(text, s.text) {
		s.stop()
	}
	s.Reporter.Update(text)
}

func (u *upgrades) notTrusted(t *testing.T) {
	before, cfg := u.image(t), u.to("5")
	cfg.Patience = 10 * time.Second
	refused := errors.New("nobody is there")
	tries := 0
	cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if tries++; u.imageIs(ownertest.ImageOf("kms", "5")) {
			return nil, refused
		}
		return u.cfg.DialContext(ctx, network, addr)
	}
	_, err := Upgrade(u.ctx, cfg)
	u.rolledBack(t, err, before)
	if tries < 2 {
		t.Errorf("the joinservice was asked %d times: on the way back it is judged too", tries)
	}
}

func (u *upgrades) imageIs(want string) bool {
	ds, err := u.admin.AppsV1().DaemonSets(clusterapi.Namespace).Get(u.ctx, "muster-kms", metav1.GetOptions{})
	return err == nil && ds.Spec.Template.Spec.Containers[0].Image == want
}

func (u *upgrades) good(t *testing.T) {
	plan, err := PlanUpgrade(u.ctx, u.to("6"))
	if err != nil || len(plan.Values) != 2 || len(plan.Objects) != 2 || plan.Empty() {
		t.Fatalf("%+v, %v", plan, err)
	}
	if u.imageIs(ownertest.ImageOf("kms", "6")) {
		t.Error("a plan changed something")
	}
	out, err := Upgrade(u.ctx, u.to("6"))
	if err != nil {
		t.Fatalf("%v\n%s", err, u.Out)
	}
	u.want(t, "superseded", "deployed")
	if !u.imageIs(ownertest.ImageOf("kms", "6")) || len(out.Plan.Values) != 2 {
		t.Errorf("%+v", out)
	}
	u.saved = out.Backup
	u.checkBackup(t, u.saved)
	before, saved := out.Revision, len(u.backups(t))
	if out, err = Upgrade(u.ctx, u.to("6")); err != nil || out.Revision != before || out.Backup != "" || len(u.backups(t)) != saved {
		t.Errorf("again: %+v, %v", out, err)
	}
}

func (u *upgrades) checkBackup(t *testing.T, dir string) {
	t.Helper()
	want := map[string]string{
		"definitions.yaml": "attestednodes.muster.dev", "objects.yaml": "lastVerdict", "disks.yaml": "kind: AttestedDisk", "configmaps.yaml": "muster-node-access",
		"values.yaml": "publicKey", "manifest.yaml": "muster-joinservice", "release.yaml": "revision",
	}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !strings.Contains(string(text), want[e.Name()]) || strings.Contains(string(text), "resourceVersion:") {
			t.Errorf("%s does not have %q, or what only this cluster can have", e.Name(), want[e.Name()])
		}
		if u.Leaks(text) || strings.Contains(string(text), "kind: Secret") {
			t.Errorf("%s has a secret (K3)", e.Name())
		}
		delete(want, e.Name())
		return nil
	})
	if err != nil || len(want) > 0 {
		t.Errorf("%v; missing: %v", err, want)
	}
}

func (u *upgrades) cutOff(t *testing.T) {
	store := storage.Init(driver.NewSecrets(u.admin.CoreV1().Secrets(clusterapi.Namespace)))
	last, err := store.Last("muster")
	if err != nil {
		t.Fatal(err)
	}
	// The state after SIGKILL.
	r := last.(*releasev1.Release)
	next, info := *r, *r.Info
	info.Status = "pending-upgrade"
	next.Info, next.Version = &info, r.Version+1
	if err := store.Create(&next); err != nil {
		t.Fatal(err)
	}
	if _, err := Upgrade(u.ctx, u.to("7")); err != nil {
		t.Fatal(err)
	}
	u.want(t, "superseded", "failed", "deployed")
}

// definition returns the one of AttestedNode, and a client for it.
func (u *upgrades) definition(t *testing.T) (client.Client, *apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	return u.definitionOf(t, "attestednodes")
}

func (u *upgrades) definitionOf(t *testing.T, kind string) (client.Client, *apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(ownertest.Shared.Admin, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := api.Get(u.ctx, client.ObjectKey{Name: kind + "." + v1alpha1.GroupVersion.Group}, crd); err != nil {
		t.Fatal(err)
	}
	return api, crd
}

func (u *upgrades) losesAField(t *testing.T) {
	api, crd := u.definition(t)
	spec := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
	spec.Properties["future"] = apiextensionsv1.JSONSchemaProps{Type: "string"}
	if err := api.Update(u.ctx, crd); err != nil {
		t.Fatal(err)
	}
	_, newest := u.history(t, 1)
	_, err := Upgrade(u.ctx, u.to("8"))
	if !errors.Is(err, clusterapi.ErrIncompatible) || !strings.Contains(err.Error(), "spec.future") || problem.Explain(err).Remedy == "" {
		t.Errorf("got %v", err)
	}
	if _, now := u.history(t, 1); now != newest {
		t.Error("the release was touched")
	}
}

// downgrade runs while the definition has a field that this program does not know.
func (u *upgrades) downgrade(t *testing.T) {
	store := storage.Init(driver.NewSecrets(u.admin.CoreV1().Secrets(clusterapi.Namespace)))
	last, err := store.Last("muster")
	if err != nil {
		t.Fatal(err)
	}
	r := last.(*releasev1.Release)
	r.Chart.Metadata.Version = "99.0.0"
	if err := store.Update(r); err != nil {
		t.Fatal(err)
	}
	cfg := u.to("9")
	if _, err := Upgrade(u.ctx, cfg); !errors.Is(err, clusterapi.ErrDowngrade) || !strings.Contains(problem.Explain(err).Remedy, "--allow-downgrade") {
		t.Errorf("got %v", err)
	}
	again, err := newUpgrader(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.init.define(u.ctx, again.kube); !errors.Is(err, clusterapi.ErrDowngrade) || problem.Remedy(err) == "" {
		t.Errorf("a repeated init: %v", err)
	}
	again.init.Manifests = neverApplied(t)
	if err := again.init.install(u.ctx); !errors.Is(err, clusterapi.ErrDowngrade) || problem.Remedy(err) == "" {
		t.Errorf("a repeated init with manifests: %v", err)
	}
	absent(t, again.init.Manifests)
	cfg.AllowDowngrade = true
	if _, err := Upgrade(u.ctx, cfg); err != nil {
		t.Fatal(err)
	}
	_, crd := u.definition(t)
	if _, ok := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["future"]; !ok {
		t.Error("the definition went back too")
	}
}

// restored executes the commands of docs/upgrade.md after the definitions, and with them all their objects, are
// deleted.
func (u *upgrades) restored(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "upgrade.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, script, _ := strings.Cut(string(page), "cd muster-prod/backups/TIME\n")
	script, _, found := strings.Cut(script, "```")
	if !found {
		t.Fatal("docs/upgrade.md has no commands")
	}
	var before v1alpha1.AttestedNode
	if err := ownertest.Shared.Client.Get(u.ctx, client.ObjectKey{Name: "node1"}, &before); err != nil {
		t.Fatal(err)
	}
	owner := diskOwner(t, before.Spec.DiskID)
	if owner != before.Spec.MachineID {
		t.Errorf("disk %s of machine %s is %q's", before.Spec.DiskID, before.Spec.MachineID, owner)
	}
	// A user bypasses the admission policy, while no joinservice runs.
	binding := &unstructured.Unstructured{}
	binding.SetGroupVersionKind(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingAdmissionPolicyBinding"})
	binding.SetName("muster-keep-enrollments")
	free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	var all v1alpha1.AttestedNodeList
	if err := errors.Join(ownertest.Shared.Client.Delete(u.ctx, binding), ownertest.Shared.Client.List(u.ctx, &all)); err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		if err := ownertest.Shared.Client.Patch(u.ctx, &all.Items[i], free); err != nil {
			t.Fatal(err)
		}
	}
	api, crd := u.definition(t)
	_, disks := u.definitionOf(t, "attesteddisks")
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for _, d := range []*apiextensionsv1.CustomResourceDefinition{crd, disks} {
		for err := api.Delete(u.ctx, d); err != nil; err = api.Delete(u.ctx, d) {
			if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
				t.Fatal(err)
			}
			<-tick.C // the API server has yet to notice that the binding is gone
		}
	}
	cmd := exec.CommandContext(u.ctx, "sh", "-euc", `until kubectl wait --for=delete crd/`+crd.Name+` crd/`+disks.Name+` --timeout=60s; do :; done
`+script)
	cmd.Dir = u.saved
	cmd.Env = append(os.Environ(), "KUBECONFIG="+ownertest.Shared.Kubeconfig, "PATH="+ownertest.Shared.Bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
	var after v1alpha1.AttestedNode
	if err := ownertest.Shared.Client.Get(u.ctx, client.ObjectKey{Name: "node1"}, &after); err != nil {
		t.Fatal(err)
	}
	if after.UID == before.UID || after.Spec.MachineID != before.Spec.MachineID || after.Status.LastVerdict == nil || after.Status.PCRs["4"] != before.Status.PCRs["4"] {
		t.Errorf("%+v", after)
	}
	if now := diskOwner(t, after.Spec.DiskID); now != owner {
		t.Errorf("its disk is %q's", now)
	}
}

// diskOwner returns the machine that a disk belongs to; empty: none.
func diskOwner(t *testing.T, disk string) string {
	t.Helper()
	var d v1alpha1.AttestedDisk
	if err := ownertest.Shared.Client.Get(t.Context(), client.ObjectKey{Name: disk}, &d); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return d.Spec.MachineID
}
