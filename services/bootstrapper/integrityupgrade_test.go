package bootstrapper_test

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

const (
	newKubeadm = "#!kubeadm 2"
	newKubelet = "#!kubelet 2"
)

// nextRelease returns a second release, whose programs a mirror serves.
func nextRelease(t *testing.T) versions.List {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(map[string]string{"/kubeadm": newKubeadm, "/kubelet": newKubelet}[r.URL.Path]))
	}))
	t.Cleanup(s.Close)
	l := versions.NewList()
	for name, content := range map[string]string{"kubeadm": newKubeadm, "kubelet": newKubelet} {
		l.Components = append(l.Components, versions.Component{URL: s.URL + "/" + name, SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(content))), Path: "/usr/local/bin/" + name, Mode: 0o755})
	}
	l.Images = nextImages().References()
	return l
}

func nextImages() versions.Images {
	out := versions.Images{}
	for name, i := range machinetest.Images() {
		i.Tag, i.Digest = "v2", "sha256:"+strings.Repeat("a", 63)+i.Digest[len(i.Digest)-1:]
		out[name] = i
	}
	return out
}

// upgrading makes the joinservice that gave the key list two releases.
func (w *fixture) upgrading(t *testing.T, other versions.List) {
	t.Helper()
	file := component.DesiredFile(filepath.Join(w.root, component.UnlockFile))
	d, err := file.Load()
	if err != nil {
		t.Fatal(err)
	}
	d.Other = &other
	if err := file.Save(*d); err != nil {
		t.Fatal(err)
	}
}

const (
	etcdFile = "etc/kubernetes/manifests/etcd.yaml"
	etcdCopy = "etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-26-12-00-00/etcd.yaml"
)

// B8: in the middle of an upgrade, a machine may be at either of the two releases that its cluster lists, and at no other.
func TestAMachineMayBeAtEitherReleaseDuringAnUpgrade(t *testing.T) {
	old, next := staticPod("etcd", machinetest.Images()[versions.Etcd].String()), staticPod("etcd", nextImages()[versions.Etcd].String())
	for name, tt := range map[string]struct {
		listed bool // the cluster lists two releases
		kept   bool // the machine's list is the next one
		files  map[string]string
		want   map[string]string // empty: it is gone
		found  bool
	}{
		"at the old one": {listed: true, want: map[string]string{"usr/local/bin/kubeadm": string(kubeadmBinary), "usr/local/bin/kubelet": "", etcdFile: old}},
		"kubeadm is new": {listed: true, files: map[string]string{"usr/local/bin/kubeadm": newKubeadm, etcdFile: next}, want: map[string]string{"usr/local/bin/kubeadm": newKubeadm, etcdFile: next}},
		"at the new one": {listed: true, kept: true, files: map[string]string{"usr/local/bin/kubeadm": newKubeadm, "usr/local/bin/kubelet": newKubelet, etcdFile: next}, want: map[string]string{"usr/local/bin/kubeadm": newKubeadm, "usr/local/bin/kubelet": newKubelet, etcdFile: next}},
		"the new list, before its kubelet was installed": {
			listed: true, kept: true, files: map[string]string{"usr/local/bin/kubeadm": newKubeadm, "usr/local/bin/kubelet": "#!other", etcdFile: next},
			want: map[string]string{"usr/local/bin/kubelet": newKubelet, etcdFile: next}, found: true,
		},
		"the new kubelet, before the new list": {listed: true, files: map[string]string{"usr/local/bin/kubelet": newKubelet}, want: map[string]string{"usr/local/bin/kubelet": ""}},
		"another kubeadm":                      {listed: true, files: map[string]string{"usr/local/bin/kubeadm": "#!evil"}, want: map[string]string{"usr/local/bin/kubeadm": string(kubeadmBinary)}, found: true},
		"another image":                        {listed: true, kept: true, files: map[string]string{etcdFile: staticPod("etcd", "evil")}, want: map[string]string{etcdFile: "", "usr/local/bin/kubelet": newKubelet}, found: true},
		"no upgrade: a list of its own":        {kept: true, files: map[string]string{"usr/local/bin/kubeadm": newKubeadm, etcdFile: next}, want: map[string]string{"usr/local/bin/kubeadm": string(kubeadmBinary), etcdFile: ""}, found: true},
		"a manifest that was moved away":       {listed: true, files: map[string]string{etcdFile: "", etcdCopy: old}, want: map[string]string{etcdFile: old}},
		"a new manifest that was moved away":   {listed: true, files: map[string]string{etcdFile: "", etcdCopy: next}, want: map[string]string{etcdFile: next}},
		"no upgrade: a copy of another image":  {files: map[string]string{etcdFile: "", etcdCopy: next}, want: map[string]string{etcdFile: ""}},
		"an attacker's copy":                   {listed: true, files: map[string]string{etcdFile: "", etcdCopy: strings.Replace(old, "hostNetwork", "hostPID", 1)}, want: map[string]string{etcdFile: ""}},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			other := nextRelease(t)
			if tt.listed {
				w.upgrading(t, other)
			}
			if tt.kept {
				if err := component.ListFile(filepath.Join(w.root, component.KeptList)).Save(other); err != nil {
					t.Fatal(err)
				}
			}
			for f, content := range tt.files {
				w.put(t, f, content)
			}
			w.startAgain(t)
			for f, want := range tt.want {
				if got := w.get(f); got != want {
					t.Errorf("%s is %q, want %q", f, got, want)
				}
			}
			if found := strings.Contains(w.logged.String(), tampered); found != tt.found {
				t.Errorf("found: %t\n%s", found, w.logged.String())
			}
			pause := machinetest.Images()
			if tt.listed && tt.kept {
				pause = nextImages()
			}
			if got := w.get("run/muster/containerd/sandbox.toml"); !strings.Contains(got, pause[versions.Pause].String()) {
				t.Errorf("containerd starts pods with %s", got)
			}
		})
	}
}

// B8: kubeadm merges the instance's configuration into the kubelet's at the next upgrade.
func TestTheInstanceConfigurationIsPutRight(t *testing.T) {
	const file = "var/lib/kubelet/instance-config.yaml"
	w := rebooted(t)
	w.put(t, file, "containerRuntimeEndpoint: unix:///evil.sock\nstaticPodURL: http://evil\n")
	w.startAgain(t)
	if got := w.get(file); strings.Contains(got, "evil") || !strings.HasPrefix(got, "containerRuntimeEndpoint: ") || !strings.Contains(w.logged.String(), tampered) {
		t.Error(got)
	}
	w = rebooted(t)
	w.put(t, file, fmt.Sprintf("containerRuntimeEndpoint: %q\n", w.image.Kubeadm.CRISocket))
	w.startAgain(t)
	if strings.Contains(w.logged.String(), tampered) {
		t.Error(w.logged.String())
	}
}

// A power cut can leave an empty configuration of the kubelet: the machine still starts what takes its owner's orders.
func TestAnEmptyKubeletConfigurationIsNoLoop(t *testing.T) {
	for _, content := range []string{"", "authentication: {"} {
		w := rebooted(t)
		w.put(t, "var/lib/kubelet/config.yaml", content)
		w.startAgain(t)
		if w.exists("var/lib/kubelet/config.yaml") || !w.machine.Running("muster-orders.service") {
			t.Errorf("%q: %q", content, w.get("var/lib/kubelet/config.yaml"))
		}
		w = rebooted(t)
		w.put(t, "var/lib/kubelet/config.yaml", content)
		w.put(t, "var/lib/muster/upgrade/kubelet-config.yaml", kubeletConfig)
		w.startAgain(t)
		if !strings.Contains(w.get("var/lib/kubelet/config.yaml"), "cluster.local") || strings.Contains(w.logged.String(), tampered) {
			t.Errorf("%q: %q", content, w.get("var/lib/kubelet/config.yaml"))
		}
	}
}

// A machine whose disk is not compared also starts what an upgrade had moved away when it went down, with its own lists.
func TestAMachineThatComparesNothingStartsWhatWasMovedAway(t *testing.T) {
	w := rebooted(t)
	if err := component.DesiredFile(filepath.Join(w.root, component.UnlockFile)).Save(component.Desired{Uncompared: component.UncomparedRecovery}); err != nil {
		t.Fatal(err)
	}
	old := w.get(etcdFile)
	w.put(t, etcdCopy, old)
	if err := os.Remove(filepath.Join(w.root, etcdFile)); err != nil {
		t.Fatal(err)
	}
	w.startAgain(t)
	if w.get(etcdFile) != old {
		t.Errorf("%q", w.get(etcdFile))
	}
}
