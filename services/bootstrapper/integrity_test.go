package bootstrapper_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// put writes a file of the machine.
func (w *world) put(t *testing.T, name, content string) {
	t.Helper()
	at := filepath.Join(w.root, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

func (w *world) get(name string) string {
	b, _ := os.ReadFile(filepath.Join(w.root, name))
	return string(b)
}

func staticPod(name, image string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", namespace: kube-system}\nspec:\n  hostNetwork: true\n  containers:\n  - name: " + name + "\n    image: " + image + "\n    command: [" + name + ", --a=b]\n"
}

const (
	kubeletConfig = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nstaticPodPath: /etc/kubernetes/manifests\nclusterDomain: cluster.local\nauthentication: {anonymous: {enabled: false}, webhook: {enabled: true}}\nauthorization: {mode: Webhook}\n"
	kubeletEnv    = "KUBELET_KUBEADM_ARGS=\"--node-ip=192.168.77.11\"\n"
)

// rebooted is a node whose encrypted disk a joinservice has opened at this boot, with the list of the cluster.
func rebooted(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, "node1")
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
	for _, name := range []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler} {
		w.put(t, "etc/kubernetes/manifests/"+name+".yaml", staticPod(name, machinetest.Images()[name].String()))
	}
	w.put(t, "var/lib/kubelet/config.yaml", kubeletConfig)
	w.put(t, "var/lib/kubelet/kubeadm-flags.env", kubeletEnv)
	list := versions.FromWire(w.components(), machinetest.Images().References())
	if err := component.ListFile(filepath.Join(w.root, component.UnlockList)).Save(list); err != nil {
		t.Fatal(err)
	}
	return w
}

// startAgain lets the machine come up.
func (w *world) startAgain(t *testing.T) {
	t.Helper()
	r := w.boot()
	eventually(t, "the kubelet runs", func() bool { return w.machine.Running("kubelet.service") })
	r.kill(t)
}

const tampered = "the state disk has what the cluster does not list"

// A disk as the machine left it is left alone.
func TestAnUnchangedStateDiskIsLeftAlone(t *testing.T) {
	w := rebooted(t)
	before := map[string]string{}
	for _, f := range []string{"etc/kubernetes/manifests/etcd.yaml", "var/lib/kubelet/config.yaml", "var/lib/kubelet/kubeadm-flags.env", "usr/local/bin/kubeadm", "etc/kubernetes/kubelet.conf"} {
		before[f] = w.get(f)
	}
	w.startAgain(t)
	for f, content := range before {
		if content == "" || w.get(f) != content {
			t.Errorf("%s: %q, was %q", f, w.get(f), content)
		}
	}
	if strings.Contains(w.logged.String(), tampered) {
		t.Error(w.logged.String())
	}
	w.sandbox(t)
}

// B8: whoever was root once does not run at the next boot.
func TestWhatRootLeftOnTheStateDiskDoesNotRun(t *testing.T) {
	images := machinetest.Images()
	for name, tt := range map[string]struct {
		file, content string
		gone          bool   // or else as want
		want          string // what it must be
	}{
		"a replaced program":              {file: "usr/local/bin/kubeadm", content: "#!evil", want: string(kubeadmBinary)},
		"a program in the path":           {file: "usr/local/bin/apparmor_parser", content: "#!evil", gone: true},
		"a CNI program":                   {file: "opt/cni/bin/evil", content: "#!evil", gone: true},
		"a program deeper":                {file: "usr/local/lib/muster/a/evil", content: "#!evil", gone: true},
		"another list on the disk":        {file: component.KeptList, content: `{"apiVersion":"muster.dev/v1alpha1"}`, want: `{"apiVersion":"muster.dev/v1alpha1"}`},
		"a static pod":                    {file: "etc/kubernetes/manifests/evil.yaml", content: staticPod("evil", "evil"), gone: true},
		"a static pod that has no suffix": {file: "etc/kubernetes/manifests/etcd", content: staticPod("etcd", images[versions.Etcd].String()), gone: true},
		"another image":                   {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", "registry.example/etcd:v1"), gone: true},
		"a privileged container":          {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "    securityContext: {privileged: true}\n", gone: true},
		"the machine's processes":         {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  hostPID: true\n", gone: true},
		"the machine's root":              {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  volumes: [{name: x, hostPath: {path: /}}]\n", gone: true},
		"another program of the image":    {file: "etc/kubernetes/manifests/etcd.yaml", content: strings.Replace(staticPod("etcd", images[versions.Etcd].String()), "command: [etcd,", "command: [sh,", 1), gone: true},
		"a second container":              {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  - {name: x, image: x}\n", gone: true},
		"a container before":              {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  initContainers: [{name: x, image: x}]\n", gone: true},
		"a variable for the loader":       {file: "var/lib/kubelet/kubeadm-flags.env", content: kubeletEnv + "LD_PRELOAD=/var/evil.so\n", want: kubeletEnv},
		"a flag for the kubelet":          {file: "var/lib/kubelet/kubeadm-flags.env", content: strings.Replace(kubeletEnv, "--node", "--image-credential-provider-bin-dir=/var/evil --node", 1), want: kubeletEnv},
		"a configuration to start over":   {file: "etc/kubernetes/bootstrap-kubelet.conf", content: "evil", gone: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			w.put(t, tt.file, tt.content)
			w.startAgain(t)
			if w.exists(tt.file) == tt.gone || !tt.gone && w.get(tt.file) != tt.want {
				t.Errorf("%s is %q", tt.file, w.get(tt.file))
			}
			if told := strings.Contains(w.logged.String(), tampered); told != (tt.file != component.KeptList) {
				t.Errorf("told: %t", told)
			}
		})
	}
}

// B8: a link in the place of a folder leads programs elsewhere, and one in the place of a static pod can say something else later.
func TestALinkInPlaceOfAFolderIsReplaced(t *testing.T) {
	w := rebooted(t)
	const pod = "etc/kubernetes/manifests/etcd.yaml"
	w.put(t, "var/evil/etcd.yaml", w.get(pod))
	if err := errors.Join(os.Remove(filepath.Join(w.root, pod)), os.Symlink("../../../var/evil/etcd.yaml", filepath.Join(w.root, pod))); err != nil {
		t.Fatal(err)
	}
	w.put(t, "var/evil/bridge", "#!evil")
	if err := errors.Join(os.RemoveAll(filepath.Join(w.root, "opt/cni/bin")), os.MkdirAll(filepath.Join(w.root, "opt/cni"), 0o755), os.Symlink("../../var/evil", filepath.Join(w.root, "opt/cni/bin"))); err != nil {
		t.Fatal(err)
	}
	w.startAgain(t)
	if w.exists("opt/cni/bin/bridge") {
		t.Error("the link is there")
	}
	if _, err := os.Lstat(filepath.Join(w.root, pod)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the link to a static pod is there: %v", err)
	}
}

// B8: fields by which the kubelet would take pods from elsewhere, or run programs.
func TestTheKubeletsConfigurationIsPutRight(t *testing.T) {
	for name, change := range map[string][2]string{
		"pods of another folder": {"staticPodPath: /etc/kubernetes/manifests", "staticPodPath: /var/evil"},
		"pods of a server":       {"clusterDomain", "staticPodURL: http://evil/\nclusterDomain"},
		"plugins of a folder":    {"clusterDomain", "volumePluginDir: /var/evil\nclusterDomain"},
		"another runtime":        {"clusterDomain", "containerRuntimeEndpoint: unix:///var/evil\nclusterDomain"},
		"orders of anybody":      {"anonymous: {enabled: false}", "anonymous: {enabled: true}"},
		"everything allowed":     {"mode: Webhook", "mode: AlwaysAllow"},
	} {
		w := rebooted(t)
		w.put(t, "var/lib/kubelet/config.yaml", strings.Replace(kubeletConfig, change[0], change[1], 1))
		w.startAgain(t)
		got := w.get("var/lib/kubelet/config.yaml")
		if strings.Contains(got, "evil") || strings.Contains(got, "AlwaysAllow") || strings.Contains(got, "enabled: true\n  webhook") || !strings.Contains(got, "staticPodPath: /etc/kubernetes/manifests") || !strings.Contains(got, "clusterDomain: cluster.local") {
			t.Errorf("%s: %s", name, got)
		}
		if !strings.Contains(w.logged.String(), tampered) {
			t.Errorf("%s: nobody is told", name)
		}
	}
	for name, change := range map[string][2]string{
		"a program":          {"  user:\n", "  user:\n    exec: {apiVersion: client.authentication.k8s.io/v1, command: /var/evil, interactiveMode: Never}\n"},
		"a plugin":           {"  user:\n", "  user:\n    auth-provider: {name: evil}\n"},
		"a server between":   {"    server:", "    proxy-url: http://evil\n    server:"},
		"any server's words": {"    server:", "    insecure-skip-tls-verify: true\n    server:"},
	} {
		w := rebooted(t)
		conf := w.get("etc/kubernetes/kubelet.conf")
		w.put(t, "etc/kubernetes/kubelet.conf", strings.Replace(conf, change[0], change[1], 1))
		if w.get("etc/kubernetes/kubelet.conf") == conf {
			t.Fatalf("%s: not changed: %s", name, conf)
		}
		w.startAgain(t)
		if got := w.get("etc/kubernetes/kubelet.conf"); strings.Contains(got, "evil") || strings.Contains(got, "insecure") || !strings.Contains(got, "server: https://") {
			t.Errorf("%s: %s", name, got)
		}
		if !strings.Contains(w.logged.String(), tampered) {
			t.Errorf("%s: nobody is told", name)
		}
	}
}

// A worker has no static pods, and what a network's installer has brought since the boot stays when the bootstrapper runs again.
func TestAWorkerHasNoStaticPods(t *testing.T) {
	w := rebooted(t)
	w.meta.Role = "worker"
	w.startAgain(t)
	left, err := os.ReadDir(filepath.Join(w.root, "etc/kubernetes/manifests"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	w.put(t, "opt/cni/bin/bridge", "a driver's")
	before := len(w.machine.Calls())
	r := w.boot()
	eventually(t, "it has looked", func() bool { return slices.Contains(w.machine.Calls()[before:], "start kubelet.service") })
	r.kill(t)
	if !w.exists("opt/cni/bin/bridge") {
		t.Error("a program of this boot was removed")
	}
}
