package bootstrapper_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func first(t *testing.T) *fixture {
	t.Helper()
	w := newFixture(t, "node1")
	w.allowInit()
	return w
}

const (
	secretPath = "/api/v1/namespaces/muster-system/secrets/muster-kms-root"
	configPath = "/api/v1/namespaces/muster-system/configmaps/muster-cluster"
)

func TestAnInitMakesTheFirstNodeAndTellsSo(t *testing.T) {
	w := first(t)
	r := w.boot()
	out := w.init(t.Context(), r, w.request())
	if out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	res, rec := out.result, w.record()
	root, err := keys.ParseRoot(keys.FirstVersion, w.request().GetRootSecret(), w.request().GetSalt())
	if err != nil {
		t.Fatal(err)
	}
	id := root.ClusterID([32]byte(w.request().GetMeasurementSalt()))
	machineID := w.tpm.ID()
	if !bytes.Equal(res.GetClusterId(), id[:]) || !bytes.Equal(res.GetMachineId(), machineID[:]) || res.GetNodeName() != "node1" ||
		!bytes.Equal(res.GetKubeconfig(), w.machine.API.Kubeconfig()) || res.GetAddresses()[0] != "192.168.77.11" {
		t.Errorf("result %s", text(res))
	}
	if _, err := keys.ParseDiskID(res.GetDiskId()); err != nil {
		t.Error(err)
	}
	if rec.Step != journal.StepDone || rec.Kind != journal.KindInit || !rec.ResultSent {
		t.Errorf("journal %+v", rec)
	}
	if bank, _ := w.tpm.Bank().Hash(); !bytes.Equal(w.tpm.PCRs()[15], attest.LockValue(bank, id)) {
		t.Error("PCR 15 is not the cluster's")
	}
	if !w.machine.Running(machine.UnitAttester) || !w.machine.Running(machine.UnitKubelet) {
		t.Error("units are not running")
	}
	if w.machine.API.Object(secretPath) == nil {
		t.Error("no root secret in the cluster")
	}
	data, _ := w.machine.API.Object(configPath)["data"].(map[string]any)
	if d, _ := data[clusterinfo.Key].(string); !strings.Contains(d, `"apiServerSANs":["api.example.com"]`) {
		t.Errorf("the cluster's description does not keep the API server's names: %s", d)
	}
	var phases []initv1.Phase
	for _, p := range out.progress {
		phases = append(phases, p.GetPhase())
		if len(p.GetText()) == 0 || p.GetElapsed().CheckValid() != nil {
			t.Errorf("progress %v", p)
		}
	}
	if !slices.IsSorted(phases) || phases[len(phases)-1] != initv1.Phase_PHASE_DONE || len(slices.Compact(phases)) != 8 {
		t.Errorf("phases %v", phases)
	}
	if counter(t, r.metrics, "muster_init_attempts_total", "ACCEPTED") != 1 || counter(t, r.metrics, "muster_node_locked") != 1 || counter(t, r.metrics, "muster_bootstrap_phase", "done") != 1 {
		t.Error("metrics")
	}
	// K3: no secret in the log, nor in any file.
	req := w.request()
	for _, secret := range [][]byte{req.GetRootSecret(), req.GetInitSecret(), req.GetSalt()} {
		h := hex.EncodeToString(secret)
		if strings.Contains(w.logged.String(), h) || strings.Contains(w.logged.String(), "0123456789abcdef") {
			t.Error("a secret is in the log")
		}
		err := filepath.Walk(w.root, func(p string, st os.FileInfo, err error) error {
			if err != nil || !st.Mode().IsRegular() {
				return err
			}
			b, err := os.ReadFile(p)
			if bytes.Contains(b, secret) || bytes.Contains(b, []byte(h)) {
				t.Errorf("a secret is in %s", p)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestARequestIsRefusedBeforeAnythingHappens(t *testing.T) {
	w := first(t)
	r := w.boot()
	defer r.kill(t)
	for name, tt := range map[string]struct {
		change func(*initv1.InitRequest)
		want   attestv1.Reason
	}{
		"no idempotency key":       {func(q *initv1.InitRequest) { q.IdempotencyKey = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a short init secret":      {func(q *initv1.InitRequest) { q.InitSecret = q.GetInitSecret()[1:] }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a short root secret":      {func(q *initv1.InitRequest) { q.RootSecret = q.GetRootSecret()[1:] }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a root secret of zeroes":  {func(q *initv1.InitRequest) { q.RootSecret = make([]byte, 32) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no salt":                  {func(q *initv1.InitRequest) { q.Salt = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no disk salt":             {func(q *initv1.InitRequest) { q.DiskSalt = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a disk salt of zeroes":    {func(q *initv1.InitRequest) { q.DiskSalt = make([]byte, 32) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no measurement salt":      {func(q *initv1.InitRequest) { q.MeasurementSalt = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a cluster name with dots": {func(q *initv1.InitRequest) { q.ClusterName = "a.b" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a minor version":          {func(q *initv1.InitRequest) { q.KubernetesVersion = "1.36" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an old version":           {func(q *initv1.InitRequest) { q.KubernetesVersion = "1.20.1" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an endpoint without port": {func(q *initv1.InitRequest) { q.ControlPlaneEndpoint = "a" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an endpoint with YAML":    {func(q *initv1.InitRequest) { q.ControlPlaneEndpoint = "a\nb:1" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no pod network":           {func(q *initv1.InitRequest) { q.PodCidrs = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"two networks, one family": {func(q *initv1.InitRequest) { q.ServiceCidrs = []string{"10.0.0.0/16", "10.1.0.0/16"} }, attestv1.Reason_REASON_REQUEST_INVALID},
		"an address as network":    {func(q *initv1.InitRequest) { q.PodCidrs = []string{"10.244.0.1/16"} }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a SAN that is no name":    {func(q *initv1.InitRequest) { q.ApiServerSans = []string{"a b"} }, attestv1.Reason_REASON_REQUEST_INVALID},
		"33 SANs":                  {func(q *initv1.InitRequest) { q.ApiServerSans = make([]string, 33) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a component elsewhere":    {func(q *initv1.InitRequest) { q.Components[0].Path = "/etc/passwd" }, attestv1.Reason_REASON_COMPONENT_PATH},
		"a component without hash": {func(q *initv1.InitRequest) { q.Components[0].Sha256 = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"another init secret":      {func(q *initv1.InitRequest) { q.InitSecret = make([]byte, 32) }, attestv1.Reason_REASON_INIT_SECRET_INVALID},
	} {
		req := w.request()
		tt.change(req)
		t.Run(name, func(t *testing.T) { _ = w.refused(t, r, req, tt.want) })
	}
	if w.record().Locked() || len(w.machine.Calls()) != 0 || !bytes.Equal(w.tpm.PCRs()[15], make([]byte, 32)) {
		t.Error("something happened")
	}
	// The same request succeeds once only the wrong input is repaired.
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Error(out.err)
	}
}

func TestMetadataDecideWhoMayInit(t *testing.T) {
	for name, change := range map[string]func(*fixture){
		"no hash": func(w *fixture) { w.meta.InitSecretHash = nil },
		"worker":  func(w *fixture) { w.meta.Role = "worker" },
	} {
		w := first(t)
		good := w.meta
		change(w)
		r := w.boot()
		_ = w.refused(t, r, w.request(), attestv1.Reason_REASON_INIT_NOT_ALLOWED)
		r.kill(t)
		w.meta = good // repaired
		r = w.boot()
		if out := w.init(t.Context(), r, w.request()); out.err != nil {
			t.Errorf("%s, repaired: %v", name, out.err)
		}
		r.kill(t)
	}
}

// A node without the owner's key could not verify any joinservice (A7).
func TestAnImageThatKnowsNoOwnerBecomesNoFirstMachine(t *testing.T) {
	w := first(t)
	w.image.OwnerKeys = nil
	r := w.boot()
	_ = w.refused(t, r, w.request(), attestv1.Reason_REASON_MACHINE_CONFIG)
	r.kill(t)
	w.image.NoOwnerKey = true // repaired, insecurely
	r = w.boot()
	defer r.kill(t)
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Error(out.err)
	}
	if counter(t, r.metrics, "muster_insecure_config", "owner_key_unknown") != 1 {
		t.Error("no metric says so")
	}
}

// An unauthenticated client can send wrong secrets: they must neither keep the owner out nor fill the log.
func TestWrongSecretsDoNotKeepTheRightOneOut(t *testing.T) {
	w := first(t)
	r := w.boot()
	defer r.kill(t)
	wrong := w.request()
	wrong.InitSecret = make([]byte, 32)
	for i := range 20 {
		if i < 5 {
			_ = w.refused(t, r, wrong, attestv1.Reason_REASON_INIT_SECRET_INVALID)
			continue
		}
		places := initRefused()
		places.Log = nil
		refusaltest.Refused(t, w.observations(r), attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, places, func() error { return w.init(t.Context(), r, wrong).err })
	}
	logged := w.logged.String()
	if n := strings.Count(logged, `"wrong init secret"`); n != 5 {
		t.Errorf("%d wrong secrets were logged one by one, want 5", n)
	}
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal("the right one after 20 wrong ones:", out.err)
	}
}

func TestAnInitGoesOnWithoutItsClientAndIsAttachedTo(t *testing.T) {
	w := first(t)
	reached, release := make(chan struct{}), make(chan struct{})
	w.machine.Step = func(name string) error {
		if name == "kubeadm init is half done" {
			close(reached)
			<-release
		}
		return nil
	}
	r := w.boot()
	ctx, hangUp := context.WithCancel(t.Context())
	lost := make(chan outcome, 1)
	go func() { lost <- w.init(ctx, r, w.request()) }()
	<-reached
	hangUp()
	if out := <-lost; out.err == nil {
		t.Fatal("a client that hung up got a result")
	}
	other := w.request()
	other.IdempotencyKey = bytes.Repeat([]byte{2}, 16)
	places := initRefused()
	places.Beside = []attestv1.Reason{attestv1.Reason_REASON_DEADLINE} // of the client that hung up
	refusaltest.Refused(t, w.observations(r), attestv1.Reason_REASON_NODE_LOCKED, places, func() error { return w.init(t.Context(), r, other).err })
	changed := w.request()
	changed.ClusterName = "other"
	if out := w.init(t.Context(), r, changed); reason(out.err) != "REQUEST_INVALID" {
		t.Errorf("the same key, another request: %v", out.err)
	}
	again := make(chan outcome, 2)
	var attached sync.WaitGroup
	for range 2 {
		attached.Add(1)
		go func() {
			once := sync.OnceFunc(attached.Done)
			out := w.initWatched(t.Context(), r, w.request(), once)
			once()
			again <- out
		}()
	}
	attached.Wait()
	close(release)
	a, b := <-again, <-again
	if a.err != nil || b.err != nil || text(a.result) != text(b.result) || len(a.progress) != len(b.progress) {
		t.Fatalf("%v, %v", a.err, b.err)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if n := len(slices.DeleteFunc(w.machine.Calls(), func(c string) bool { return c != "kubeadm init" })); n != 1 {
		t.Errorf("kubeadm init ran %d times", n)
	}
}

func TestAResultThatNobodyFetchedIsKeptAcrossARestart(t *testing.T) {
	w := first(t)
	r := w.boot()
	ctx, hangUp := context.WithCancel(t.Context())
	w.machine.Step = func(name string) error {
		if name == "kubeadm init is half done" {
			hangUp()
		}
		return nil
	}
	_ = w.init(ctx, r, w.request())
	eventually(t, "the machine is a node", func() bool { return w.record().Step == journal.StepDone })
	r.kill(t)
	w.reboot()
	r = w.boot()
	out := w.init(t.Context(), r, w.request())
	if out.err != nil || !bytes.Equal(out.result.GetKubeconfig(), w.machine.API.Kubeconfig()) {
		t.Fatal(out.err)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	// After that, a boot only ensures that the node runs.
	w.reboot()
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if !w.machine.Running(machine.UnitKubelet) || !w.machine.Running(machine.UnitAttester) {
		t.Error("units are not running after a reboot")
	}
	if bank, _ := w.tpm.Bank().Hash(); !bytes.Equal(w.tpm.PCRs()[15], attest.LockValue(bank, [32]byte(w.record().ClusterID))) {
		t.Error("PCR 15 is not the cluster's after a reboot")
	}
}

func TestAFailedInitSaysWhyCleansUpAndCanBeCorrected(t *testing.T) {
	w := first(t)
	broken := true
	w.machine.Step = func(name string) error {
		if broken && name == "kubeadm init is half done" {
			return os.ErrDeadlineExceeded
		}
		return nil
	}
	r := w.boot()
	var out outcome
	refusaltest.Refused(t, w.observations(r), attestv1.Reason_REASON_KUBEADM_FAILED, initFailed(), func() error {
		out = w.init(t.Context(), r, w.request())
		return out.err
	})
	if !strings.Contains(out.err.Error(), "wait-control-plane") || strings.Contains(out.err.Error(), "0123456789abcdef") {
		t.Fatal(out.err)
	}
	if w.exists("/etc/kubernetes/manifests") || w.exists("/var/lib/etcd/member") {
		t.Error("left something behind")
	}
	// The output of kubeadm is only for clients with the init secret.
	unauthenticated := w.request()
	unauthenticated.InitSecret = make([]byte, 32)
	if err := w.refused(t, r, unauthenticated, attestv1.Reason_REASON_INIT_SECRET_INVALID); err == nil || strings.Contains(err.Error(), "wait-control-plane") {
		t.Errorf("an unauthenticated client gets %v", err)
	}
	other := w.request()
	other.IdempotencyKey = bytes.Repeat([]byte{2}, 16)
	if out := w.init(t.Context(), r, other); reason(out.err) != "NODE_LOCKED" {
		t.Errorf("another key: %v", out.err)
	}
	foreign := w.request()
	foreign.RootSecret = bytes.Repeat([]byte{9}, 32)
	w.sign(foreign, false)
	if out := w.init(t.Context(), r, foreign); reason(out.err) != "REQUEST_INVALID" {
		t.Errorf("another root secret: %v", out.err)
	}
	broken = false
	corrected := w.request()
	corrected.ControlPlaneEndpoint = "192.168.77.1:7443"
	if out := w.init(t.Context(), r, corrected); out.err != nil {
		t.Fatal(out.err)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
}

// B3: the machine stops at each of its effects in turn, with or without a reboot. After its restart the owner repeats the request with the same key, and
// the machine becomes the first node of the same cluster, once.
func TestAnInitThatDiesAnywhereEndsAsANode(t *testing.T) {
	for _, reboot := range []bool{false, true} {
		for point := 0; ; point++ {
			w := first(t)
			w.dieAfter(point)
			r := w.boot()
			out := w.init(t.Context(), r, w.request())
			_ = r.end(t) // no more steps are recorded after this
			died := w.steps[len(w.steps)-1]
			if out.err == nil {
				if point < 25 {
					t.Fatalf("only %d effects: %q", point, w.steps)
				}
				break
			}
			before := w.record()
			w.dieAfter(-1)
			if reboot {
				w.reboot()
			}
			r = w.boot()
			out = w.init(t.Context(), r, w.request())
			if out.err != nil {
				t.Fatalf("dead at %d, %s (reboot %v): %v\n%s", point, died, reboot, out.err, w.logged)
			}
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			rec := w.record()
			if before.Locked() && !bytes.Equal(before.ClusterID, rec.ClusterID) {
				t.Errorf("dead at %s: another cluster", died)
			}
			bank, _ := w.tpm.Bank().Hash()
			if rec.Step != journal.StepDone || !bytes.Equal(w.tpm.PCRs()[15], attest.LockValue(bank, [32]byte(rec.ClusterID))) {
				t.Errorf("dead at %s: %+v", died, rec)
			}
			if !w.machine.Running(machine.UnitAttester) || !w.machine.Running(machine.UnitKubelet) || w.machine.API.Object(secretPath) == nil {
				t.Errorf("dead at %s: not a node", died)
			}
		}
	}
}
