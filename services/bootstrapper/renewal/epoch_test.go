package renewal

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestTheTPMFollowsTheClustersEpoch(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex)}
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	k := epoch.Keeper{Dir: t.TempDir(), TPM: m}
	begin := at(t, root, 0.1)
	var now time.Time
	start := func() *Renewer {
		r := newRenewer(t, c, begin)
		r.Epoch, r.Now = k, func() time.Time { return now }
		return r
	}
	r := start()
	follow := func(after time.Duration) error {
		t.Helper()
		now = begin.Add(after)
		return r.followEpoch(t.Context())
	}
	if err := follow(0); err == nil {
		t.Error("a machine without a record makes one while it runs")
	}
	if err := k.Begin(t.Context(), epoch.Record{Written: begin}); err != nil {
		t.Fatal(err)
	}
	counter := func() uint64 {
		t.Helper()
		n, err := m.Counter(context.WithoutCancel(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for i, step := range []struct {
		after time.Duration
		epoch uint64
		knows uint64
		up    uint64 // increments of the counter
		fresh bool   // the process was restarted
	}{
		{time.Second, 3, 3, 1, false}, // the first, at once
		{time.Minute, 3, 3, 0, false},
		{2 * time.Minute, 4, 3, 0, false}, // too soon
		{betweenEpochs, 5, 3, 0, false},
		{betweenEpochs + time.Second, 5, 5, 1, false},
		{time.Hour, 4, 5, 0, false}, // etcd was restored
		{time.Hour, 6, 6, 1, false},
		{time.Hour, 7, 7, 1, true}, // the time in the record is ignored: the clock behind it is unknown
		{time.Hour + time.Minute, 8, 7, 0, false},
		{2 * time.Hour, 8, 8, 1, false},
	} {
		was := counter()
		if step.fresh {
			r = start()
		}
		c.epoch = epoch.Record{Epoch: step.epoch, PolicySerial: step.epoch}
		if err := follow(step.after); err != nil {
			t.Fatal(i, err)
		}
		s, err := k.Check(t.Context())
		if err != nil || s.Err != nil || s.Record.Epoch != step.knows || s.Record.PolicySerial != step.knows || s.Counter != was+step.up || c.published != step.knows {
			t.Errorf("step %d: %+v, %v, counter from %d, published %d", i, s, err, was, c.published)
		}
	}
}

// A restored cluster that has counted on since has the same numbers as this machine, and another history (B7).
func TestAClusterThatWasPutBackIsNotFollowed(t *testing.T) {
	c := &memoryCluster{root: newControlPlane(t), lease: new(sync.Mutex)}
	k := &stillKeeper{}
	r := newRenewer(t, c, time.Now())
	began, passed := time.Now(), time.Duration(0)
	r.Epoch, r.Now = k, func() time.Time { return began.Add(passed) }
	k.now = r.Now
	follow := func(number uint64) {
		t.Helper()
		passed += betweenEpochs
		c.epoch = epoch.Record{Epoch: number, EpochID: c.history.ID(number)}
		if err := r.followEpoch(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for n := range uint64(3) {
		c.history = c.history.Next(n + 1)
	}
	follow(3)
	newest := c.history
	c.history = newest[:1:1].Next(2).Next(3).Next(4)
	follow(4)
	if k.Epoch != 3 || k.EpochID != newest.ID(3) || c.published != 3 {
		t.Errorf("the machine knows epoch %d:%s, and says %d", k.Epoch, k.EpochID, c.published)
	}
	c.history = newest.Next(4)
	follow(4)
	if k.Epoch != 4 || k.EpochID != c.history.ID(4) {
		t.Errorf("the machine knows epoch %d:%s of %v", k.Epoch, k.EpochID, c.history)
	}
}

// A network attacker can keep the wall clock at the time in the record: the counter still follows, by the monotonic clock (B7).
func TestTheTPMFollowsTheClustersEpochWhileTheClockStandsStill(t *testing.T) {
	c := &memoryCluster{root: newControlPlane(t), lease: new(sync.Mutex)}
	k := &stillKeeper{}
	r := newRenewer(t, c, time.Now())
	began := time.Now()
	passed := time.Duration(0)
	r.Epoch, r.Now = k, func() time.Time { return began.Add(passed) }
	k.now = r.Now
	for i := range uint64(4) {
		c.epoch = epoch.Record{Epoch: i + 1}
		if err := r.followEpoch(t.Context()); err != nil {
			t.Fatal(err)
		}
		if k.Epoch != i+1 {
			t.Errorf("after %s the machine knows epoch %d, and the cluster is at %d", passed, k.Epoch, i+1)
		}
		passed += betweenEpochs
	}
}

// stillKeeper has a record that was always written just now.
type stillKeeper struct {
	epoch.Record

	now func() time.Time
}

func (k *stillKeeper) Load() (*epoch.Record, error) {
	r := k.Record
	r.Written = k.now().Round(0)
	return &r, nil
}

func (k *stillKeeper) Advance(_ context.Context, r epoch.Record) error {
	k.Record = r
	return nil
}

// These changes raise the epoch, at a real API server with two control planes.
func whatARestoredCopyWouldUndoIsCounted(t *testing.T, api *kubetest.Cluster) {
	ctx := t.Context()
	must := func(t *testing.T, errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	root := newControlPlane(t)
	text, err := os.ReadFile(api.Kubeconfig)
	must(t, err, api.Namespace(ctx, clusterinfo.Namespace), api.InstallCRDs(ctx))
	public, private, err := ed25519.GenerateKey(nil)
	must(t, err)
	next, nextPrivate, err := ed25519.GenerateKey(nil)
	must(t, err)
	var planes []Cluster
	for _, name := range []string{"node1", "node2"} {
		must(t, os.WriteFile(filepath.Join(root, folder, "admin.conf"), text, 0o600), os.WriteFile(filepath.Join(root, folder, "controller-manager.conf"), text, 0o600),
			api.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}))
		c, err := Connect(root, name, attest.OwnerKeys{public, next}, slog.New(slog.DiscardHandler))
		must(t, err)
		t.Cleanup(c.Close)
		planes = append(planes, c)
	}
	ca := attesttest.NewCA(t)
	sign := func(serial uint64, by ed25519.PrivateKey) v1alpha1.AttestationPolicySpec {
		p := attest.SignPolicy(by, attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}, func(p *attestv1.Policy) { p.Serial = serial }))
		return v1alpha1.AttestationPolicySpec{Policy: string(p.GetPolicy()), Signature: base64.StdEncoding.EncodeToString(p.GetSignature())}
	}
	policy := &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}
	node := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "node3"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("ab", 32), Role: v1alpha1.RoleWorker}}
	disk := &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"}, Spec: v1alpha1.AttestedDiskSpec{MachineID: strings.Repeat("ab", 32), Salt: strings.Repeat("5a", 32), RootVersion: 1}}
	_, other, err := ed25519.GenerateKey(nil)
	must(t, err)
	described := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: clusterinfo.ConfigMap, Namespace: clusterinfo.Namespace}}
	describe := func(r *clusterinfo.Rotation) error {
		text, err := (&clusterinfo.Info{KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "a:6443", Rotation: r}).Marshal()
		described.Data = map[string]string{clusterinfo.Key: string(text)}
		if err != nil || described.ResourceVersion != "" {
			return errors.Join(err, api.Client.Update(ctx, described))
		}
		return api.Client.Create(ctx, described)
	}
	rotates := func(phase clusterinfo.RotationPhase, id string) func() error {
		return func() error {
			return describe(&clusterinfo.Rotation{Key: clusterinfo.EncryptionKey, Phase: phase, ID: id})
		}
	}
	made := strings.Repeat("ef", 32)
	var now uint64
	for _, step := range []struct {
		what   string
		change func() error
		up     uint64
		serial uint64
		bans   []string
	}{
		{"nothing yet", func() error { return nil }, 1, 0, nil},
		{"nothing", func() error { return nil }, 0, 0, nil},
		{"a policy", func() error { policy.Spec = sign(4, private); return api.Client.Create(ctx, policy) }, 1, 4, nil},
		{"a newer one", func() error { policy.Spec = sign(5, private); return api.Client.Update(ctx, policy) }, 1, 5, nil},
		{"one of the owner's next key", func() error { policy.Spec = sign(6, nextPrivate); return api.Client.Update(ctx, policy) }, 1, 6, nil},
		{"one that the owner did not sign", func() error { policy.Spec = sign(9, other); return api.Client.Update(ctx, policy) }, 1, 0, nil},
		{"an enrollment", func() error { return api.Client.Create(ctx, node) }, 1, 0, nil},
		{"its label", func() error { node.Labels = map[string]string{"a": "b"}; return api.Client.Update(ctx, node) }, 0, 0, nil},
		{"a ban", func() error { node.Spec.Banned = true; return api.Client.Update(ctx, node) }, 1, 0, []string{"node3"}},
		{"its next machine", func() error { node.Spec.MachineID = strings.Repeat("cd", 32); return api.Client.Update(ctx, node) }, 1, 0, []string{"node3"}},
		{"its end", func() error { node.Spec.Banned = false; return api.Client.Update(ctx, node) }, 1, 0, nil},
		{"its disk", func() error { node.Spec.DiskID = disk.Name; return api.Client.Update(ctx, node) }, 1, 0, nil},
		{"a disk", func() error { return api.Client.Create(ctx, disk) }, 1, 0, nil},
		{"a disk's new machine", func() error { disk.Spec.MachineID = strings.Repeat("cd", 32); return api.Client.Update(ctx, disk) }, 1, 0, nil},
		{"a disk that is erased", func() error { disk.Spec.Salt, disk.Spec.Erased = "", true; return api.Client.Update(ctx, disk) }, 1, 0, nil},
		{"a disk that is free", func() error { return api.Client.Delete(ctx, disk) }, 1, 0, nil},
		{"an enrollment that outlives its end", func() error {
			node.Finalizers = []string{v1alpha1.RevokeCertificates}
			return errors.Join(api.Client.Update(ctx, node), api.Client.Delete(ctx, node), api.Client.Get(ctx, client.ObjectKeyFromObject(node), node))
		}, 1, 0, nil},
		{"an enrollment that ends", func() error { node.Finalizers = nil; return api.Client.Update(ctx, node) }, 1, 0, nil},
		{"the cluster's description", func() error { return describe(nil) }, 0, 0, nil},
		{"a rotation begins", rotates(clusterinfo.RotationAccept, ""), 1, 0, nil},
		{"a rotation has its key", rotates(clusterinfo.RotationAccept, made), 1, 0, nil},
		{"a rotation's phase changes", rotates(clusterinfo.RotationUse, made), 1, 0, nil},
		{"a later version's field", func() error {
			described.Data[clusterinfo.Key] = strings.Replace(described.Data[clusterinfo.Key], "{", `{"later":1,`, 1)
			return api.Client.Update(ctx, described)
		}, 0, 0, nil},
		{"a rotation drops the old key", rotates(clusterinfo.RotationFinish, made), 1, 0, nil},
		{"a rotation ends", func() error { return describe(nil) }, 1, 0, nil},
	} {
		if err := step.change(); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		now += step.up
		for _, c := range planes { // the second reads what the first has counted
			got, history, err := c.Epoch(ctx)
			if err != nil || got.Epoch != now || got.PolicySerial != step.serial || !slices.Equal(got.Bans, step.bans) || len(got.BannedMachines) != len(step.bans) {
				t.Errorf("%s: %+v, %v, want epoch %d", step.what, got, err, now)
			}
			if got.EpochID == "" || history.ID(now) != got.EpochID {
				t.Errorf("%s: the epoch has the ID %q, and the history %v", step.what, got.EpochID, history)
			}
		}
	}
	// Of several control planes that see a change at the same time, one counts it.
	must(t, api.Client.Create(ctx, &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: disk.Name}, Spec: disk.Spec}))
	var wg sync.WaitGroup
	for _, c := range planes {
		wg.Go(func() {
			if got, _, err := c.Epoch(ctx); err == nil && got.Epoch != now+1 {
				t.Errorf("both at once: epoch %d, want %d", got.Epoch, now+1)
			}
		})
	}
	wg.Wait()
	if got, _, err := planes[0].Epoch(ctx); err != nil || got.Epoch != now+1 {
		t.Errorf("%+v, %v, want epoch %d", got, err, now+1)
	}
	// During an upgrade of the image, a version that does not know rotations counts beside one that does.
	was := now + 1
	for _, change := range []func() error{
		rotates(clusterinfo.RotationUse, made),
		func() error { policy.Spec = sign(10, private); return api.Client.Update(ctx, policy) },
		func() error { return describe(nil) },
	} {
		must(t, change())
		before := was
		for range 10 {
			must(t, countWithoutRotation(ctx, planes[0].(*cluster)))
			got, _, err := planes[1].Epoch(ctx)
			must(t, err)
			was = got.Epoch
		}
		if was == before || was > before+2 {
			t.Errorf("two versions counted from %d to %d for one change", before, was)
		}
	}
	must(t, planes[1].PublishEpoch(ctx, clusterinfo.HistoryEpoch{Number: 7, ID: "0011223344556677"}))
	var n corev1.Node
	must(t, api.Client.Get(ctx, client.ObjectKey{Name: "node2"}, &n))
	if got := n.Annotations[clusterinfo.EpochAnnotation]; got != "7:0011223344556677" {
		t.Errorf("annotation %q", got)
	}
}

// countWithoutRotation increments the epoch as a version does that does not know rotations.
func countWithoutRotation(ctx context.Context, c *cluster) error {
	f, err := c.facts(ctx)
	if err != nil {
		return err
	}
	f.lines = slices.DeleteFunc(f.lines, func(l string) bool { return strings.HasPrefix(l, "rotation ") })
	maps := c.CoreV1().ConfigMaps(clusterinfo.Namespace)
	m, err := maps.Get(ctx, clusterinfo.EpochMap, metav1.GetOptions{})
	if err != nil || m.Data["of"] == f.digest() {
		return err
	}
	history, err := clusterinfo.ParseHistory(m.Data["history"])
	if err != nil {
		return err
	}
	number := history[len(history)-1].Number + 1
	m.Data = map[string]string{"epoch": strconv.FormatUint(number, 10), "of": f.digest(), "history": history.Next(number).String()}
	_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
	return err
}
