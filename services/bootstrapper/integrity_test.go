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
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// put writes a file of the machine.
func (w *fixture) put(t *testing.T, name, content string) {
	t.Helper()
	at := filepath.Join(w.root, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

func (w *fixture) get(name string) string {
	b, _ := os.ReadFile(filepath.Join(w.root, name))
	return string(b)
}

func staticPod(name, image string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", namespace: kube-system}\nspec:\n  hostNetwork: true\n  containers:\n  - name: " + name + "\n    image: " + image + "\n    command: [" + name + ", --a=b]\n"
}

const (
	kubeletConfig = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nstaticPodPath: /etc/kubernetes/manifests\nclusterDomain: cluster.local\nauthentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: /etc/kubernetes/pki/ca.crt}}\nauthorization: {mode: Webhook}\n"
	kubeletEnv    = "KUBELET_KUBEADM_ARGS=\"--node-ip=192.168.77.11\"\n"
)

// becomesWorker turns what [rebooted] returns into a worker.
func (w *fixture) becomesWorker(t *testing.T) {
	t.Helper()
	w.meta.Role = "worker"
	for _, secret := range []string{"etc/kubernetes/pki/ca.key", "etc/kubernetes/pki/encryption.yaml", "var/lib/etcd/member"} {
		w.drop(t, secret)
	}
}

// link makes the path to a second name of the file at, or a link to it.
func link(t *testing.T, at, to string, hard bool) {
	t.Helper()
	if hard {
		if err := os.Link(at, to); err != nil {
			t.Fatal(err)
		}
	} else if err := errors.Join(os.RemoveAll(at), os.Symlink(to, at)); err != nil {
		t.Fatal(err)
	}
}

// desires makes the joinservice that gave the key send the desired state of the machine.
func (w *fixture) desires(t *testing.T, changes ...func(*component.Desired)) {
	t.Helper()
	ca := []byte(strings.TrimSpace(w.get("etc/kubernetes/pki/ca.crt")))
	d := component.Desired{
		List: versions.FromWire(w.components(), machinetest.Images().References()), Endpoint: w.request().GetControlPlaneEndpoint(),
		Authorities: map[string][]byte{component.CA: ca, "etcd/ca.crt": []byte("etcd"), "front-proxy-ca.crt": []byte("front"), "sa.pub": []byte("sa\n")},
	}
	for _, change := range changes {
		change(&d)
	}
	if err := component.DesiredFile(filepath.Join(w.root, component.UnlockFile)).Save(d); err != nil {
		t.Fatal(err)
	}
}

// startAgain restarts the machine and its bootstrapper.
func (w *fixture) startAgain(t *testing.T) {
	t.Helper()
	before := len(w.machine.Calls())
	r := w.boot()
	eventually(t, "the kubelet is started", func() bool { // it may run since the bootstrapper ran before, in the same boot
		return slices.Contains(w.machine.Calls()[before:], "start kubelet.service") && w.machine.Running("kubelet.service")
	})
	r.kill(t)
}

const tampered = "the state disk differs from the cluster's list"

// A disk that nothing has changed since the machine used it stays as it is.
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

// leftFile is a file that an attacker with root rights left on the state disk.
type leftFile struct {
	file, content string
	gone          bool   // or else as in want
	want          string // the expected content
}

func leftByRoot() map[string]leftFile {
	images := machinetest.Images()
	return map[string]leftFile{
		"a replaced program":                {file: "usr/local/bin/kubeadm", content: "#!evil", want: string(kubeadmBinary)},
		"a program in the path":             {file: "usr/local/bin/apparmor_parser", content: "#!evil", gone: true},
		"a CNI program":                     {file: "opt/cni/bin/evil", content: "#!evil", gone: true},
		"a program deeper":                  {file: "usr/local/lib/muster/a/evil", content: "#!evil", gone: true},
		"a static pod":                      {file: "etc/kubernetes/manifests/evil.yaml", content: staticPod("evil", "evil"), gone: true},
		"a static pod that has no suffix":   {file: "etc/kubernetes/manifests/etcd", content: staticPod("etcd", images[versions.Etcd].String()), gone: true},
		"another image":                     {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", "registry.example/etcd:v1"), gone: true},
		"a privileged container":            {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "    securityContext: {privileged: true}\n", gone: true},
		"the machine's processes":           {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  hostPID: true\n", gone: true},
		"the machine's root":                {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  volumes: [{name: x, hostPath: {path: /}}]\n", gone: true},
		"another program of the image":      {file: "etc/kubernetes/manifests/etcd.yaml", content: strings.Replace(staticPod("etcd", images[versions.Etcd].String()), "command: [etcd,", "command: [sh,", 1), gone: true},
		"a second container":                {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  - {name: x, image: x}\n", gone: true},
		"a container before":                {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  initContainers: [{name: x, image: x}]\n", gone: true},
		"privileges, by the case of a name": {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "    securityContext: {privileged: true}\n    securitycontext: {privileged: false}\n", gone: true},
		"the machine's processes, by case":  {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "  hostPID: true\n  hostPid: false\n", gone: true},
		"a volume from an image":            {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "    volumeMounts: [{name: x, mountPath: /usr/local/bin}]\n  volumes: [{name: x, image: {reference: x}}]\n", gone: true},
		"a folder at another place":         {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "    volumeMounts: [{name: x, mountPath: /usr/local/bin}]\n  volumes: [{name: x, hostPath: {path: /var/lib/etcd}}]\n", gone: true},
		"an environment":                    {file: "etc/kubernetes/manifests/etcd.yaml", content: staticPod("etcd", images[versions.Etcd].String()) + "    env: [{name: PATH, value: /var/lib/etcd}]\n", gone: true},
		"devices for a pod":                 {file: "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", content: "evil", gone: true},
		"a variable for the loader":         {file: "var/lib/kubelet/kubeadm-flags.env", content: kubeletEnv + "LD_PRELOAD=/var/evil.so\n", want: kubeletEnv},
		"a flag for the kubelet":            {file: "var/lib/kubelet/kubeadm-flags.env", content: strings.Replace(kubeletEnv, "--node", "--image-credential-provider-bin-dir=/var/evil --node", 1), want: kubeletEnv},
		"a configuration to start over":     {file: "etc/kubernetes/bootstrap-kubelet.conf", content: "evil", gone: true},
	}
}

// B8: a file that an attacker with root rights left does not run at the next boot, whether a joinservice or the owner's recovery opens the disk.
func TestWhatRootLeftOnTheStateDiskDoesNotRun(t *testing.T) {
	for by, desires := range map[string]func(*component.Desired){"a joinservice": func(*component.Desired) {}, "a recovery": byRecovery} {
		for name, tt := range leftByRoot() {
			t.Run(by+": "+name, func(t *testing.T) {
				w := rebooted(t)
				w.desires(t, desires)
				w.put(t, tt.file, tt.content)
				w.startAgain(t)
				if w.exists(tt.file) == tt.gone || !tt.gone && w.get(tt.file) != tt.want {
					t.Errorf("%s is %q", tt.file, w.get(tt.file))
				}
				if logged := strings.Contains(w.logged.String(), tampered); logged == strings.HasSuffix(tt.file, "checkpoint") {
					t.Errorf("logged: %t", logged)
				}
			})
		}
	}
}

// B8: a link in the place of a folder leads programs to another folder, and a link in the place of a static pod can change its content later.
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

// B8: a file of the state disk with two names, or a link, can be changed after it was checked.
func TestWhatHasTwoNamesOrIsALinkIsNotLeft(t *testing.T) {
	for name, tt := range map[string]struct {
		at   string // a link, as without the check
		to   string // its target
		hard bool
	}{
		"a program that a volume has too":   {"usr/local/bin/kubeadm", "var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v/kubeadm", true},
		"a folder of static pods elsewhere": {"etc/kubernetes/manifests", "var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v", false},
		"a volume that is the root":         {"var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/w", "", false},
		"etcd's data is the root":           {"var/lib/etcd", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			at, to := filepath.Join(w.root, tt.at), filepath.Join(w.root, tt.to)
			if err := errors.Join(os.MkdirAll(filepath.Join(w.root, "var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v"), 0o755)); err != nil {
				t.Fatal(err)
			}
			link(t, at, to, tt.hard)
			if tt.at == "var/lib/etcd" {
				w.put(t, "etc/kubernetes/manifests/etcd.yaml", staticPod("etcd", machinetest.Images()[versions.Etcd].String())+"    volumeMounts: [{name: x, mountPath: /var/lib/etcd}]\n  volumes: [{name: x, hostPath: {path: /var/lib/etcd}}]\n")
			}
			w.startAgain(t)
			info, err := os.Lstat(at)
			switch {
			case tt.hard:
				other, oerr := os.Stat(to)
				if err != nil || oerr != nil || os.SameFile(info, other) || w.get(tt.at) != string(kubeadmBinary) {
					t.Errorf("%v %v: it is still the same file", err, oerr)
				}
			case tt.at == "var/lib/etcd":
				if w.exists("etc/kubernetes/manifests/etcd.yaml") {
					t.Error("a static pod has the machine's root")
				}
			case err == nil && info.Mode()&os.ModeSymlink != 0:
				t.Error("the link is there")
			}
			if !strings.Contains(w.logged.String(), tampered) {
				t.Error("nothing is logged")
			}
		})
	}
}

// B7, B8: the kubelet's unit starts the kubelet only if this file exists, and the file does not exist at boot.
func TestNothingOfTheStateDiskStartsBeforeItWasLookedAt(t *testing.T) {
	w := rebooted(t)
	if w.exists(strings.TrimPrefix(mayStart, "/")) {
		t.Fatal("it is there when the machine boots")
	}
	w.startAgain(t)
	if !w.exists(strings.TrimPrefix(mayStart, "/")) {
		t.Error("systemd would not start the kubelet")
	}
	unit, err := os.ReadFile("../../deploy/vm/files/root/etc/systemd/system/kubelet.service")
	if err != nil || !strings.Contains(string(unit), "\nConditionPathExists="+mayStart+"\n") || strings.Contains(string(unit), "[Install]") {
		t.Errorf("%v: the unit of the image has no such condition, or systemd would start it by itself", err)
	}
}

const mayStart = "/run/muster/kubelet-may-start"

// B8: these fields make the kubelet take pods from another source or run programs.
func TestTheKubeletsConfigurationIsPutRight(t *testing.T) {
	for name, change := range map[string][2]string{
		"pods of another folder":            {"staticPodPath: /etc/kubernetes/manifests", "staticPodPath: /var/evil"},
		"pods of a server":                  {"clusterDomain", "staticPodURL: http://evil/\nclusterDomain"},
		"plugins of a folder":               {"clusterDomain", "volumePluginDir: /var/evil\nclusterDomain"},
		"another runtime":                   {"clusterDomain", "containerRuntimeEndpoint: unix:///var/evil\nclusterDomain"},
		"orders of whom it signs":           {"ca.crt", "evil.crt"},
		"orders of unauthenticated clients": {"anonymous: {enabled: false}", "anonymous: {enabled: true}"},
		"everything allowed":                {"mode: Webhook", "mode: AlwaysAllow"},
	} {
		w := rebooted(t)
		w.put(t, "var/lib/kubelet/config.yaml", strings.Replace(kubeletConfig, change[0], change[1], 1))
		w.startAgain(t)
		got := w.get("var/lib/kubelet/config.yaml")
		if strings.Contains(got, "evil") || strings.Contains(got, "AlwaysAllow") || strings.Contains(got, "enabled: true\n  webhook") || !strings.Contains(got, "staticPodPath: /etc/kubernetes/manifests") || !strings.Contains(got, "clusterDomain: cluster.local") {
			t.Errorf("%s: %s", name, got)
		}
		if !strings.Contains(w.logged.String(), tampered) {
			t.Errorf("%s: nothing is logged", name)
		}
	}
}

// B8: the kubelet takes its pods and orders only from the cluster's own authority and address.
func TestTheKubeletsClusterIsPutRight(t *testing.T) {
	const conf, kubelet = "etc/kubernetes/kubelet.conf", "  user:\n"
	own := "https://192.168.77.11:6443"
	for name, tt := range map[string]struct {
		worker   bool
		old, new string
	}{
		"another server":        {old: own, new: "https://evil:6443"},
		"a worker's server":     {worker: true, old: own, new: "https://evil:6443"},
		"a program":             {old: kubelet, new: kubelet + "    exec: {apiVersion: client.authentication.k8s.io/v1, command: /var/evil, interactiveMode: Never}\n"},
		"another user":          {old: kubelet, new: kubelet + "    as: evil\n"},
		"a plugin":              {old: kubelet, new: kubelet + "    auth-provider: {name: evil}\n"},
		"a proxy":               {old: "    server:", new: "    proxy-url: http://evil\n    server:"},
		"an unverified server":  {old: "    server:", new: "    insecure-skip-tls-verify: true\n    server:"},
		"another name in TLS":   {old: "    server:", new: "    tls-server-name: evil\n    server:"},
		"another authority":     {old: "    certificate-authority-data: ", new: "    certificate-authority-data: ZXZpbA==\n    x: "},
		"an authority's file":   {old: "    server:", new: "    certificate-authority: /var/evil\n    server:"},
		"another context":       {old: "current-context: default-context", new: "current-context: evil"},
		"what is no kubeconfig": {old: "apiVersion: v1", new: "evil"},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			want := own
			if tt.worker {
				want = "https://192.168.77.1:6443"
				w.becomesWorker(t)
			}
			before := w.get(conf)
			text := strings.Replace(before, tt.old, tt.new, 1)
			if text == before {
				t.Fatalf("not changed: %s", before)
			}
			w.put(t, conf, text)
			w.startAgain(t)
			if got := w.get(conf); got != strings.Replace(before, own, want, 1) {
				t.Errorf("%s, want %s with server %s", got, before, want)
			}
			if !strings.Contains(w.logged.String(), tampered) {
				t.Error("nothing is logged")
			}
		})
	}
}

// B8: the owner of an authority's private key could control a kubelet, or pose as an API server.
func TestAuthoritiesAreThoseOfTheCluster(t *testing.T) {
	for _, name := range []string{"ca.crt", "etcd/ca.crt", "front-proxy-ca.crt", "sa.pub"} {
		w := rebooted(t)
		at := "etc/kubernetes/pki/" + name
		w.desires(t)
		want := map[string]string{"ca.crt": w.get(at), "etcd/ca.crt": "etcd", "front-proxy-ca.crt": "front", "sa.pub": "sa\n"}[name]
		w.put(t, at, "evil")
		w.startAgain(t)
		if got := w.get(at); strings.TrimSpace(got) != strings.TrimSpace(want) {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
		if !strings.Contains(w.logged.String(), tampered) {
			t.Errorf("%s: nothing is logged", name)
		}
	}
	for name, at := range map[string]string{"the file": "etc/kubernetes/pki/ca.crt", "the folder": "etc/kubernetes/pki"} {
		w := rebooted(t)
		if err := errors.Join(os.Rename(filepath.Join(w.root, at), filepath.Join(w.root, "elsewhere")), os.Symlink(filepath.Join(w.root, "elsewhere"), filepath.Join(w.root, at))); err != nil {
			t.Fatal(err)
		}
		w.startAgain(t)
		if info, err := os.Lstat(filepath.Join(w.root, at)); err == nil && info.Mode()&os.ModeSymlink != 0 {
			t.Errorf("%s is a link still", name)
		}
	}
}

// B8: an old journal would make kubeadm, and with it the kubelet, run again.
func TestAJournalThatWasSetBackRunsNothing(t *testing.T) {
	for _, step := range []journal.Step{journal.StepDisk, journal.StepConfigured, journal.StepKubeadm, journal.StepKubeadmRan} {
		t.Run(step.String(), func(t *testing.T) {
			w := rebooted(t)
			rec, err := w.journal.Load()
			if err != nil {
				t.Fatal(err)
			}
			rec.Kind, rec.Step = journal.KindJoin, step
			if err := w.journal.Save(rec); err != nil {
				t.Fatal(err)
			}
			w.put(t, "usr/local/bin/kubeadm", "#!evil")
			w.put(t, "usr/local/bin/evil", "#!evil")
			w.put(t, "etc/kubernetes/manifests/evil.yaml", staticPod("evil", "evil"))
			r := w.boot()
			eventually(t, "it has looked", func() bool { return w.exists("run/muster/state-checked") })
			r.kill(t)
			if w.get("usr/local/bin/kubeadm") != string(kubeadmBinary) || w.exists("usr/local/bin/evil") || w.exists("etc/kubernetes/manifests/evil.yaml") {
				t.Error("the attacker's file is there")
			}
		})
	}
}

// B8: an upgrade puts back static pods by the disk's lists.
func TestTheListsOnTheDiskAreTheClusters(t *testing.T) {
	w := rebooted(t)
	const previous, next = "var/lib/muster/upgrade/previous.json", "var/lib/muster/upgrade/next.json"
	want := w.get(strings.TrimPrefix(component.KeptList, "/"))
	evil := strings.Replace(want, "sha256:", "sha256:ee", 1)
	if want == "" || evil == want {
		t.Fatalf("the list is %q", want)
	}
	w.put(t, strings.TrimPrefix(component.KeptList, "/"), evil)
	w.put(t, previous, evil)
	w.put(t, next, want)
	w.startAgain(t)
	if got := w.get(strings.TrimPrefix(component.KeptList, "/")); got != want || w.exists(previous) || w.get(next) != want {
		t.Errorf("the list is %q, the previous one there: %t, the next one %q", got, w.exists(previous), w.get(next))
	}
}

// A worker has no static pods. Files that a network plugin's installer wrote after the boot stay when the bootstrapper runs again.
// What a control plane has, and root can leave, changes nothing of that.
func TestAWorkerHasNoStaticPods(t *testing.T) {
	w := rebooted(t)
	w.becomesWorker(t)
	w.put(t, "etc/kubernetes/pki/ca.key/evil", "evil")
	w.put(t, "etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-26-12-00-00/etcd.yaml", w.get("etc/kubernetes/manifests/etcd.yaml"))
	w.startAgain(t)
	left, err := os.ReadDir(filepath.Join(w.root, "etc/kubernetes/manifests"))
	if err != nil || len(left) > 0 || w.exists("etc/kubernetes/pki/ca.key") {
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
	w = rebooted(t)
	w.becomesWorker(t)
	w.desires(t, func(d *component.Desired) { d.Adopted = true })
	w.startAgain(t)
	if left, err = os.ReadDir(filepath.Join(w.root, "etc/kubernetes/manifests")); err != nil || len(left) > 0 {
		t.Errorf("in an adopted cluster: %v, %v", left, err)
	}
}
