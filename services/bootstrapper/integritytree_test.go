package bootstrapper_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/trust/attest"
)

// B8: links, and files with a second name, lead to content that an attacker can change later.
func TestOnStateFoldersEachFileIsItsOwn(t *testing.T) {
	const volume = "var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v"
	for name, tt := range map[string]struct {
		at     string
		hard   bool
		gone   bool // or else a regular file with one name
		others bool // others may write it
	}{
		"a configuration that others may write": {at: "var/lib/kubelet/config.yaml", others: true},
		"an authority in a volume":              {at: "etc/kubernetes/pki/ca.crt", hard: true},
		"a static pod in a volume":              {at: "etc/kubernetes/manifests/etcd.yaml", hard: true},
		"a configuration in a volume":           {at: "var/lib/kubelet/config.yaml", hard: true},
		"flags in a volume":                     {at: "var/lib/kubelet/kubeadm-flags.env", hard: true},
		"a kubeconfig in a volume":              {at: "etc/kubernetes/kubelet.conf", hard: true},
		"an authority that is a link":           {at: "etc/kubernetes/pki/sa.pub", gone: true},
		"flags that are a link":                 {at: "var/lib/kubelet/kubeadm-flags.env", gone: true},
		"the hosts of a pod":                    {at: "var/lib/kubelet/pods/u/etc-hosts", gone: true},
		"the containers of a pod":               {at: "var/lib/kubelet/pods/u/containers", gone: true},
		"the plugins of a pod":                  {at: "var/lib/kubelet/pods/u/plugins", gone: true},
		"the devices' folder":                   {at: "var/lib/kubelet/device-plugins", gone: true},
		"the kubelet's certificates":            {at: "var/lib/kubelet/pki", gone: true},
		"a certificate of the kubelet's":        {at: "var/lib/kubelet/pki/kubelet-client-current.pem", gone: true},
		"a log":                                 {at: "var/log/pods/x/0.log", gone: true},
		"a part of a volume in a container":     {at: "var/lib/kubelet/pods/u/volume-subpaths/v/c/0", gone: true},
		"a list in a volume":                    {at: "var/lib/muster/components.json", hard: true},
		"a renewal":                             {at: "etc/kubernetes/muster-renewal/controller-manager.conf", gone: true},
		"a pod":                                 {at: "var/lib/kubelet/pods/x", gone: true},
		"the pods":                              {at: "var/lib/kubelet/pods", gone: true},
		"a volume of a driver":                  {at: "var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv/mount", gone: true},
		"a mount of a driver":                   {at: "var/lib/kubelet/plugins/example.org/mount", gone: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			at, to := filepath.Join(w.root, tt.at), filepath.Join(w.root, volume, "x")
			if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.MkdirAll(filepath.Dir(at), 0o755)); err != nil {
				t.Fatal(err)
			}
			if tt.others {
				if err := os.Chmod(at, 0o666); err != nil {
					t.Fatal(err)
				}
			} else {
				link(t, at, to, tt.hard)
			}
			r := w.boot()
			eventually(t, "it has looked", func() bool { return w.exists("run/muster/state-checked") })
			r.kill(t)
			info, err := os.Lstat(at)
			switch {
			case tt.others:
				if err != nil || info.Mode().Perm() != 0o644 {
					t.Errorf("%v, %v", info.Mode(), err)
				}
			case tt.gone && err == nil && info.Mode()&fs.ModeSymlink != 0:
				if to, _ := os.Readlink(at); strings.Contains(to, "volumes") {
					t.Error("the link is there")
				}
			case !tt.gone:
				other, oerr := os.Stat(to)
				if err != nil || oerr != nil || os.SameFile(info, other) {
					t.Errorf("%v %v: it is still the same file", err, oerr)
				}
			}
		})
	}
}

// B8: a mark is ignored if a program wrote it through a link on the disk.
func TestAForeignMarkDoesNotEndTheComparison(t *testing.T) {
	for _, content := range []string{"", "0123456789abcdef0123456789abcdef\n"} {
		w := rebooted(t)
		w.put(t, "run/muster/state-checked", content)
		w.put(t, "etc/kubernetes/manifests/evil.yaml", staticPod("evil", "evil"))
		w.startAgain(t)
		if w.exists("etc/kubernetes/manifests/evil.yaml") {
			t.Errorf("%q: nothing was compared", content)
		}
	}
}

// B8: this machine's own services use these kubeconfigs as root.
func TestAdministratorsKubeconfigsRunNothing(t *testing.T) {
	const user = "  user:\n"
	own := "https://192.168.77.11:6443"
	for name, change := range map[string][2]string{
		"a program":      {user, user + "    exec: {apiVersion: client.authentication.k8s.io/v1, command: /var/evil, interactiveMode: Never}\n"},
		"another server": {own, "https://evil:6443"},
		"a file":         {"client-certificate-data: YQ==", "client-certificate: /var/evil"},
		"no kubeconfig":  {"apiVersion: v1", "evil"},
		"a proxy":        {"    server:", "    proxy-url: http://evil\n    server:"},
	} {
		for _, file := range []string{"admin.conf", "super-admin.conf", "controller-manager.conf", "scheduler.conf"} {
			w := rebooted(t)
			text := strings.Replace(w.get("etc/kubernetes/admin.conf"), change[0], change[1], 1)
			if text == w.get("etc/kubernetes/admin.conf") {
				t.Fatalf("%s: not changed: %s", name, text)
			}
			w.put(t, "etc/kubernetes/"+file, text)
			w.startAgain(t)
			if got := w.get("etc/kubernetes/" + file); strings.Contains(got, "evil") {
				t.Errorf("%s, %s: %s", name, file, got)
			}
			if !strings.Contains(w.logged.String(), tampered) {
				t.Errorf("%s, %s: nothing is logged", name, file)
			}
		}
	}
	// A kubeconfig with the cluster's address stays as it is, and a worker has none.
	w := rebooted(t)
	text := strings.Replace(w.get("etc/kubernetes/admin.conf"), own, "https://192.168.77.1:6443", 1)
	w.put(t, "etc/kubernetes/admin.conf", text)
	w.startAgain(t)
	if w.get("etc/kubernetes/admin.conf") != text || strings.Contains(w.logged.String(), tampered) {
		t.Errorf("%s\n%s", w.get("etc/kubernetes/admin.conf"), w.logged.String())
	}
	w = rebooted(t)
	w.becomesWorker(t)
	w.put(t, "etc/kubernetes/controller-manager.conf", text)
	w.startAgain(t)
	for _, file := range []string{"etc/kubernetes/admin.conf", "etc/kubernetes/controller-manager.conf"} {
		if w.exists(file) {
			t.Errorf("a worker has %s", file)
		}
	}
}

// B8: an interrupted renewal leaves files that the next boot puts in place. Without the authority's key it does not, and they would be put there later.
func TestAStagedRenewalIsComparedToo(t *testing.T) {
	for name, authority := range map[string]func(t *testing.T, w *fixture){
		"with the authority's key": func(t *testing.T, w *fixture) { w.put(t, "etc/kubernetes/pki/ca.key", "key") },
		"and it was moved away":    func(t *testing.T, w *fixture) { w.drop(t, "etc/kubernetes/pki/ca.key") },
	} {
		w := rebooted(t)
		evil := strings.Replace(w.get("etc/kubernetes/admin.conf"), "  user:\n", "  user:\n    exec: {apiVersion: client.authentication.k8s.io/v1, command: /var/evil, interactiveMode: Never}\n", 1)
		authority(t, w)
		w.put(t, "etc/kubernetes/muster-renewal/admin.conf", evil)
		w.startAgain(t)
		if got := w.get("etc/kubernetes/admin.conf"); strings.Contains(got, "evil") || w.exists("etc/kubernetes/muster-renewal/admin.conf") {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// B7: a control plane whose authority was moved away does not count as a worker.
func TestAControlPlaneWithoutItsAuthorityIsComparedWithItsTPM(t *testing.T) {
	w := rebooted(t)
	if err := os.Remove(filepath.Join(w.root, "etc/kubernetes/pki/ca.key")); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(w.root, epoch.Folder)); err != nil {
		t.Fatal(err)
	}
	r := w.boot()
	defer r.kill(t)
	eventually(t, "it is refused", func() bool { return strings.Contains(w.logged.String(), "CLUSTER_ROLLED_BACK") })
	if w.machine.Running("kubelet.service") {
		t.Error("the kubelet runs")
	}
}

// J2: an administrator of the API can enroll a control plane again as a worker, and so get its disk's key sent to a machine that the policy does not list.
// The metadata can change between the ticket and the comparison.
func TestNoWorkerStartsFromAControlPlanesDisk(t *testing.T) {
	worker := func(d *component.Desired) {
		d.Authorities = map[string][]byte{component.CA: d.Authorities[component.CA]}
	}
	for name, tt := range map[string]struct {
		role   string
		ticket func(*component.Desired)
		alone  string // the only secret on the disk; empty: those of a control plane
	}{
		"metadata of a worker":                       {"worker", func(*component.Desired) {}, ""},
		"metadata and ticket of a worker":            {"worker", worker, ""},
		"metadata that changed after the ticket":     {"control-plane", worker, ""},
		"a recovery with the metadata of a worker":   {"worker", byRecovery, ""},
		"an authority that the cluster has replaced": {"worker", func(d *component.Desired) { d.Authorities[component.CA] = []byte("another") }, ""},
		"an authority of another certificate":        {"worker", worker, "etc/kubernetes/pki/ca.key"},
		"the key of service accounts alone":          {"worker", worker, "etc/kubernetes/pki/sa.key"},
		"the key of etcd's authority alone":          {"worker", worker, "etc/kubernetes/pki/etcd/ca.key"},
		"etcd's data alone":                          {"worker", worker, "var/lib/etcd/member/snap/db"},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			secret := "etc/kubernetes/pki/ca.key"
			if tt.alone != "" {
				secret = tt.alone
				w.becomesWorker(t)
				w.put(t, secret, "another")
			}
			w.meta.Role = tt.role
			w.desires(t, tt.ticket)
			before := len(w.machine.Calls())
			if err := w.boot().end(t); attest.ReasonOf(err) != attestv1.Reason_REASON_ROLE_REFUSED {
				t.Errorf("%v, want ROLE_REFUSED", err)
			}
			if calls := w.machine.Calls()[before:]; slices.ContainsFunc(calls, func(c string) bool { return strings.HasPrefix(c, "start ") }) || w.exists(mayStart) {
				t.Errorf("something was started: %v", calls)
			}
			for _, file := range []string{secret, "etc/kubernetes/admin.conf", "etc/kubernetes/manifests/etcd.yaml"} {
				if !w.exists(file) {
					t.Errorf("%s was removed", file)
				}
			}
		})
	}
}

// B8: an operator may never read the log of a boot, so the attester's metrics show its findings until the next boot.
func TestFindingsAreInTheAttestersMetrics(t *testing.T) {
	w := rebooted(t)
	metrics := w.reattest()
	if n := counter(t, metrics, "muster_state_disk_findings"); n != 0 {
		t.Errorf("%v findings before the comparison", n)
	}
	w.put(t, "etc/kubernetes/manifests/evil.yaml", staticPod("evil", "evil"))
	w.put(t, "usr/local/bin/evil\n", "#!evil")
	w.startAgain(t)
	if n := counter(t, metrics, "muster_state_disk_findings"); n != 2 {
		t.Errorf("%v findings, want 2: %q", n, w.get("run/muster/state-findings"))
	}
}

// B8: while the mirror does not answer, the process restarts and compares again. The program is one finding, and is reported as installed only once it
// is.
func TestAProgramThatWaitsForItsMirrorIsOneFinding(t *testing.T) {
	w := rebooted(t)
	metrics, mirror := w.reattest(), w.mirror
	w.put(t, "usr/local/bin/kubeadm", "#!evil")
	w.mirror = "http://127.0.0.1:1"
	w.desires(t)
	const found, installed = "will be reinstalled", "a component was reinstalled"
	for n := range 2 {
		r := w.boot()
		eventually(t, "it is found", func() bool { return strings.Count(w.logged.String(), found) > n })
		r.kill(t)
	}
	if strings.Contains(w.logged.String(), installed) {
		t.Error("nothing was installed, and the log says so")
	}
	w.mirror = mirror
	w.desires(t)
	w.startAgain(t)
	if got := w.get("usr/local/bin/kubeadm"); got != string(kubeadmBinary) || !strings.Contains(w.logged.String(), installed) {
		t.Errorf("kubeadm is %q; log: %s", got, w.logged)
	}
	if n := counter(t, metrics, "muster_state_disk_findings"); n != 1 {
		t.Errorf("%v findings, want 1: %q", n, w.get("run/muster/state-findings"))
	}
}

// B8: the kubelet does not remove unknown files from a ConfigMap's volume. The comparison removes them, but does not follow links out of a pods folder.
func TestNothingIsLeftInVolumesThatTheAPIFills(t *testing.T) {
	w := rebooted(t)
	const pod = "var/lib/kubelet/pods/u"
	for _, gone := range []string{pod + "/volumes/kubernetes.io~configmap/kube-proxy/kubeconfig.conf", pod + "/etc-hosts", "etc/cni/net.d/00-evil.conflist", "var/lib/kubelet/plugins/kubernetes.io/csi/d/globalmount/x", "var/lib/kubelet/dra_manager_state", "var/lib/kubelet/allocated_pods_state", "var/lib/kubelet/seccomp/profile.json", "var/lib/kubelet/config.json", "var/lib/kubelet/device-plugins/kubelet.sock", "var/lib/kubelet/device-plugins/x/inside", "var/lib/kubelet/pod-resources/kubelet.sock/inside"} {
		w.put(t, gone, "evil")
	}
	for _, stays := range []string{pod + "/volumes/kubernetes.io~empty-dir/v/data", pod + "/volumes/kubernetes.io~csi/pv/vol_data.json", pod + "/volumes/kubernetes.io~csi/pv/mount/data", "run/muster/secret"} {
		w.put(t, stays, "kept")
	}
	if err := os.Symlink(filepath.Join(w.root, "run/muster"), filepath.Join(w.root, "var/lib/kubelet/pods/a")); err != nil {
		t.Fatal(err)
	}
	w.startAgain(t)
	for _, gone := range []string{pod + "/volumes/kubernetes.io~configmap", pod + "/etc-hosts", "etc/cni/net.d/00-evil.conflist", "var/lib/kubelet/plugins/kubernetes.io", "var/lib/kubelet/dra_manager_state", "var/lib/kubelet/allocated_pods_state", "var/lib/kubelet/seccomp", "var/lib/kubelet/config.json", "var/lib/kubelet/pods/a", "var/lib/kubelet/device-plugins/kubelet.sock", "var/lib/kubelet/device-plugins/x", "var/lib/kubelet/pod-resources/kubelet.sock"} {
		if w.exists(gone) {
			t.Errorf("%s is there", gone)
		}
	}
	for _, stays := range []string{pod + "/volumes/kubernetes.io~empty-dir/v/data", pod + "/volumes/kubernetes.io~csi/pv/vol_data.json", pod + "/volumes/kubernetes.io~csi/pv/mount/data", "run/muster/secret"} {
		if w.get(stays) != "kept" {
			t.Errorf("%s is %q", stays, w.get(stays))
		}
	}
}

// B8: whoever may write a folder could replace its files after the comparison.
func TestOthersWriteInNoFolderOfKubernetes(t *testing.T) {
	w := rebooted(t)
	for name, mode := range map[string]os.FileMode{"etc/kubernetes/manifests": 0o777, "etc/kubernetes/pki": 0o775, "var/lib/kubelet": 0o702, "opt/cni/bin": 0o777, "usr/local/bin": 0o772, "etc/cni/net.d": 0o777} {
		if err := os.MkdirAll(filepath.Join(w.root, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(w.root, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	folders := []string{"etc/kubernetes/manifests", "etc/kubernetes/pki", "var/lib/kubelet", "opt/cni/bin", "usr/local/bin", "etc/cni/net.d"}
	if os.Geteuid() == 0 { // only root can give a folder away
		const foreign = "etc/kubernetes/pki/etcd"
		if err := errors.Join(os.MkdirAll(filepath.Join(w.root, foreign), 0o755), os.Chown(filepath.Join(w.root, foreign), 1000, 1000)); err != nil {
			t.Fatal(err)
		}
		folders = append(folders, foreign)
	}
	w.startAgain(t)
	for _, name := range folders {
		info, err := os.Stat(filepath.Join(w.root, name))
		if err != nil {
			t.Fatal(err)
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); !ok || info.Mode().Perm()&0o022 != 0 || int(stat.Uid) != os.Geteuid() {
			t.Errorf("%s has mode %v and owner %+v", name, info.Mode(), info.Sys())
		}
		if !strings.Contains(w.logged.String(), `"/`+name+`"`) {
			t.Errorf("%s: nothing is logged", name)
		}
	}
}

// B8: an attacker who makes a program delete the list through a path on the disk can't start a machine without a comparison.
func TestWithoutItsListNothingOfAnEncryptedDiskStarts(t *testing.T) {
	w := rebooted(t)
	w.encrypt(luks2test.Genuine(t, firstKey, luks2.HMACSHA256, luks2.LabelState))
	if err := os.Remove(filepath.Join(w.root, component.UnlockFile)); err != nil {
		t.Fatal(err)
	}
	before := len(w.machine.Calls())
	r := w.boot()
	if err := r.end(t); attest.ReasonOf(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(err.Error(), component.UnlockFile) {
		t.Errorf("%v", err)
	}
	if calls := w.machine.Calls()[before:]; slices.Contains(calls, "start kubelet.service") || w.exists("run/muster/kubelet-may-start") {
		t.Errorf("%q", calls)
	}
}
