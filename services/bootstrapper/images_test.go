package bootstrapper_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// pulled checks that images were pulled by digest, and that containerd was given the sandbox image, before kubeadm ran.
func (w *fixture) pulled(t *testing.T, verb string, names ...string) {
	t.Helper()
	calls := w.machine.Calls()
	ran := slices.Index(calls, "kubeadm "+verb)
	for _, name := range names {
		if at := slices.Index(calls, "pull "+machinetest.Images()[name].String()); at < 0 || at > ran {
			t.Errorf("%s was not pulled before kubeadm: %q", name, calls)
		}
	}
	if at := slices.Index(calls, "restart containerd.service"); at < 0 || at > ran {
		t.Errorf("containerd was not configured: %q", calls)
	}
	if at := filepath.Join(w.root, "run/muster/kubeadm-patches"); ran < 0 || w.exists("run/muster/kubeadm-patches") {
		t.Errorf("%s is left", at)
	}
	w.sandbox(t)
}

func (w *fixture) sandbox(t *testing.T) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(w.root, "run/muster/containerd/sandbox.toml"))
	if err != nil || !strings.Contains(string(got), machinetest.Images()[versions.Pause].String()) {
		t.Errorf("%s, %v", got, err)
	}
}

// B9: the images that run before everything else on a control plane are named by digest.
func TestAnInitRunsTheListedImages(t *testing.T) {
	w := newFixture(t, "node1")
	w.allowInit()
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err)
	}
	r.kill(t)
	w.pulled(t, "init", versions.Pause, versions.Proxy, versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler)
	set := w.machine.API.Object("/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy")
	pod, _ := set["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)["containers"].([]any)
	if len(pod) != 1 || pod[0].(map[string]any)["image"] != machinetest.Images()[versions.Proxy].String() {
		t.Errorf("kube-proxy is %v", pod)
	}
}

// B9: the file that names the sandbox image for containerd is in memory.
func TestEachBootNamesTheSandboxsImage(t *testing.T) {
	w := newFixture(t, "node1")
	w.allowInit()
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err)
	}
	r.kill(t)
	if err := os.RemoveAll(filepath.Join(w.root, "run")); err != nil {
		t.Fatal(err)
	}
	w.reboot()
	before := len(w.machine.Calls())
	r = w.boot()
	eventually(t, "the kubelet runs", func() bool { return w.machine.Running("kubelet.service") })
	r.kill(t)
	w.sandbox(t)
	calls := w.machine.Calls()[before:]
	if restarted, started := slices.Index(calls, "restart containerd.service"), slices.Index(calls, "start kubelet.service"); restarted < 0 || restarted > started {
		t.Errorf("%q", calls)
	}
}

// B9: without digests, the operator of the registry would decide what runs as root.
func TestAnInitWithoutDigestsIsRefused(t *testing.T) {
	w := newFixture(t, "node1")
	w.allowInit()
	r := w.boot()
	defer r.kill(t)
	for name, change := range map[string]func(*initv1.InitRequest){
		"no images":      func(q *initv1.InitRequest) { q.Images = nil },
		"an image less":  func(q *initv1.InitRequest) { q.Images = q.GetImages()[1:] },
		"an image twice": func(q *initv1.InitRequest) { q.Images[0] = q.GetImages()[1] },
		"a tag":          func(q *initv1.InitRequest) { q.Images[0], _, _ = strings.Cut(q.GetImages()[0], "@") },
	} {
		req := w.request()
		change(req)
		if out := w.init(t.Context(), r, req); rpc.ReasonFrom(out.err) != attestv1.Reason_REASON_REQUEST_INVALID {
			t.Errorf("%s: %v", name, out.err)
		}
	}
	if w.record().Locked() {
		t.Error("the machine is locked")
	}
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Error(out.err)
	}
}

// If the registry has another image under the tag, and not the listed digest, no image of it runs.
func TestAnImageThatIsNotThereEndsAnInit(t *testing.T) {
	w := newFixture(t, "node1")
	w.allowInit()
	w.machine.Step = func(name string) error {
		if name == "an image is pulled" {
			return errors.New("not found")
		}
		return nil
	}
	r := w.boot()
	defer r.kill(t)
	out := w.init(t.Context(), r, w.request())
	if rpc.ReasonFrom(out.err) != attestv1.Reason_REASON_COMPONENT_UNAVAILABLE || slices.Contains(w.machine.Calls(), "kubeadm init") {
		t.Errorf("%v, %q", out.err, w.machine.Calls())
	}
}

// B8: containerd's store is renewed in each boot of an encrypted disk, with the sandbox image named and before the kubelet may use it; then the images of
// the machine's root are loaded. This is also so after a recovery, whose power cut may have left half of an unpacked layer. A bootstrapper that starts again in
// the same boot leaves the store alone, since containers may use it.
func TestTheStoreIsRenewedBeforeTheKubeletStarts(t *testing.T) {
	for name, recovered := range map[string]bool{"rejoined": false, "recovered": true} {
		w := rebooted(t)
		if recovered {
			if err := component.DesiredFile(filepath.Join(w.root, component.UnlockFile)).Save(component.Desired{Uncompared: component.UncomparedRecovery}); err != nil {
				t.Fatal(err)
			}
		}
		w.put(t, "usr/share/muster/images/index.json", "{}")
		left := "var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs/kube-proxy"
		w.put(t, left, "evil")
		w.put(t, "run/muster/store-renewed", "of another boot")
		before := len(w.machine.Calls())
		w.startAgain(t)
		var order []string
		for _, call := range w.machine.Calls()[before:] {
			if strings.Contains(call, "containerd") || strings.Contains(call, "images") || strings.Contains(call, "start kubelet") {
				order = append(order, call)
			}
		}
		if want := []string{"list images", "stop containerd.service", "start containerd.service", "start muster-images.service", "start kubelet.service"}; !slices.Equal(order, want) {
			t.Errorf("%s: %q", name, order)
		}
		if w.exists(left) {
			t.Errorf("%s: an unpacked layer of before is left", name)
		}
		w.sandbox(t)

		w.put(t, left, "of an image that the root has brought")
		before = len(w.machine.Calls())
		if err := os.Remove(filepath.Join(w.root, "run/muster/kubelet-may-start")); err != nil { // the bootstrapper was killed before the kubelet started
			t.Fatal(err)
		}
		w.startAgain(t)
		if calls := w.machine.Calls()[before:]; !w.exists(left) || slices.Contains(calls, "stop containerd.service") {
			t.Errorf("%s, killed before the kubelet started: %q", name, calls)
		}
		w.put(t, left, "of a running container")
		if err := os.Remove(filepath.Join(w.root, "run/muster/store-renewed")); err != nil {
			t.Fatal(err)
		}
		before = len(w.machine.Calls())
		w.startAgain(t)
		if calls := w.machine.Calls()[before:]; !w.exists(left) || slices.Contains(calls, "stop containerd.service") {
			t.Errorf("%s: %q", name, calls)
		}
	}
}

// A machine whose own images can't be loaded still takes its owner's orders.
func TestImagesThatAreNotLoadedKeepNobodyOut(t *testing.T) {
	w := rebooted(t)
	w.put(t, "usr/share/muster/images/index.json", "{}")
	w.machine.Step = func(name string) error {
		if name == "start muster-images.service" {
			return errors.New("no space left on device")
		}
		return nil
	}
	w.startAgain(t)
	if !strings.Contains(w.logged.String(), "no space left on device") {
		t.Error(w.logged.String())
	}
}
