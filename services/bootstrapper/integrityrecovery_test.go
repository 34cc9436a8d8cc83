package bootstrapper_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/trust/attest"
)

// byRecovery makes the lists those of the owner's folder, which has no authorities.
func byRecovery(d *component.Desired) { d.Recovered, d.Authorities = true, nil }

// A disk that nothing has changed stays as it is, also in the middle of a rotation of keys: the owner's folder knows neither authorities nor rotations.
func TestARecoveryLeavesAnUnchangedStateDiskAlone(t *testing.T) {
	const staged = "etc/kubernetes/pki/muster-rotation/service-account-key.abab"
	w := rebooted(t)
	w.desires(t, byRecovery)
	w.put(t, staged, "staged")
	w.put(t, "etc/kubernetes/pki/sa.pub", "the cluster's next")
	before := map[string]string{}
	for _, f := range []string{staged, etcdFile, "var/lib/kubelet/config.yaml", "usr/local/bin/kubeadm", "etc/kubernetes/kubelet.conf", "etc/kubernetes/admin.conf", "etc/kubernetes/pki/ca.crt", "etc/kubernetes/pki/sa.pub"} {
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
}

// B8: after a recovery too, kubeconfigs name no program, and only this machine's server with the authority that it has.
func TestARecoveryPutsKubeconfigsRight(t *testing.T) {
	for _, conf := range []string{"etc/kubernetes/kubelet.conf", "etc/kubernetes/admin.conf"} {
		for name, change := range map[string][2]string{
			"a program":         {"  user:\n", "  user:\n    exec: {apiVersion: client.authentication.k8s.io/v1, command: /var/evil, interactiveMode: Never}\n"},
			"another server":    {"server: https://", "server: https://evil."},
			"another authority": {"    certificate-authority-data: ", "    certificate-authority-data: ZXZpbA==\n    x: "},
		} {
			t.Run(filepath.Base(conf)+": "+name, func(t *testing.T) {
				w := rebooted(t)
				w.desires(t, byRecovery)
				text := strings.Replace(w.get(conf), change[0], change[1], 1)
				if text == w.get(conf) {
					t.Fatalf("not changed: %s", text)
				}
				w.put(t, conf, text)
				w.startAgain(t)
				if got := w.get(conf); !strings.Contains(got, "server: https://192.168.77.11:6443") || strings.Contains(got, "evil") || strings.Contains(got, "ZXZpbA==") {
					t.Error(got)
				}
				if !strings.Contains(w.logged.String(), tampered) {
					t.Error("nothing is logged")
				}
			})
		}
	}
}

// The folder may be a copy from before an upgrade of Kubernetes: its older list would remove the control plane's static pods.
func TestARecoveryByAnOlderFolderChangesNothing(t *testing.T) {
	const evil = "usr/local/bin/evil"
	kept := strings.TrimPrefix(component.KeptList, "/")
	installed := func(t *testing.T) (*fixture, string) {
		w := rebooted(t)
		w.desires(t, byRecovery)
		if err := component.ListFile(filepath.Join(w.root, component.KeptList)).Save(nextRelease(t)); err != nil {
			t.Fatal(err)
		}
		w.put(t, "usr/local/bin/kubeadm", newKubeadm)
		w.put(t, etcdFile, "next")
		w.put(t, evil, "#!evil")
		return w, w.get(kept)
	}
	w, list := installed(t)
	before := len(w.machine.Calls())
	r := w.boot()
	if err := r.end(t); attest.ReasonOf(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(err.Error(), "--replace-software") {
		t.Errorf("%v", err)
	}
	if calls := w.machine.Calls()[before:]; slices.Contains(calls, "start kubelet.service") || w.exists(strings.TrimPrefix(mayStart, "/")) {
		t.Errorf("%q", calls)
	}
	if w.get("usr/local/bin/kubeadm") != newKubeadm || w.get(etcdFile) != "next" || w.get(kept) != list {
		t.Error("something was changed")
	}

	w, list = installed(t)
	w.desires(t, byRecovery, func(d *component.Desired) { d.Replace = true })
	w.startAgain(t)
	if w.get("usr/local/bin/kubeadm") != string(kubeadmBinary) || w.exists(etcdFile) || w.exists(evil) || w.get(kept) == list {
		t.Error("the owner's decision does not count")
	}

	// The two releases of an upgrade: the machine is at the one that its disk lists, as after a rejoin.
	w = rebooted(t)
	other := nextRelease(t)
	w.desires(t, byRecovery, func(d *component.Desired) { d.Other = &other })
	if err := component.ListFile(filepath.Join(w.root, component.KeptList)).Save(other); err != nil {
		t.Fatal(err)
	}
	w.put(t, "usr/local/bin/kubeadm", newKubeadm)
	w.put(t, evil, "#!evil")
	w.startAgain(t)
	if w.get("usr/local/bin/kubeadm") != newKubeadm || w.get("usr/local/bin/kubelet") != newKubelet || w.exists(evil) {
		t.Errorf("kubeadm is %q, kubelet %q", w.get("usr/local/bin/kubeadm"), w.get("usr/local/bin/kubelet"))
	}

	// An upgrade in the same boot changes the disk's list; the disk is not compared a second time.
	w = rebooted(t)
	w.desires(t, byRecovery)
	w.startAgain(t)
	if err := component.ListFile(filepath.Join(w.root, component.KeptList)).Save(nextRelease(t)); err != nil {
		t.Fatal(err)
	}
	w.startAgain(t)
}

// Root needs only to remove or damage the disk's list. The owner decides then, too.
func TestARecoveryOfADiskWithoutAListChangesNoProgram(t *testing.T) {
	const evil = "usr/local/bin/evil"
	kept := strings.TrimPrefix(component.KeptList, "/")
	for name, harm := range map[string]func(t *testing.T, w *fixture){
		"no list":        func(t *testing.T, w *fixture) { w.drop(t, kept) },
		"a huge one":     func(t *testing.T, w *fixture) { w.leave(t, kept, false) },
		"a folder":       func(t *testing.T, w *fixture) { w.leave(t, kept, true) },
		"a damaged list": func(t *testing.T, w *fixture) { w.put(t, kept, "{") },
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			w.desires(t, byRecovery)
			harm(t, w)
			w.put(t, "usr/local/bin/kubeadm", newKubeadm)
			w.put(t, etcdFile, "next")
			r := w.boot()
			if err := r.end(t); attest.ReasonOf(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(err.Error(), "--replace-software") {
				t.Errorf("%v", err)
			}
			if w.get("usr/local/bin/kubeadm") != newKubeadm || w.get(etcdFile) != "next" || w.exists(strings.TrimPrefix(mayStart, "/")) {
				t.Error("it goes on")
			}
			w.put(t, evil, "#!evil")
			w.desires(t, byRecovery, func(d *component.Desired) { d.Replace = true })
			w.startAgain(t)
			if w.get("usr/local/bin/kubeadm") != string(kubeadmBinary) || w.exists(evil) {
				t.Error("the owner's decision does not count")
			}
		})
	}
	// An adopted control plane may have none.
	w := rebooted(t)
	w.desires(t, byRecovery, func(d *component.Desired) { d.Adopted = true })
	w.drop(t, kept)
	w.startAgain(t)
}

// Without a certificate of its own, the machine would take orders from any server: the owner's folder has none to put in its place. With one that no program
// can read, nothing would run.
func TestARecoveryWantsTheMachinesAuthority(t *testing.T) {
	const ca = "etc/kubernetes/pki/ca.crt"
	for name, harm := range map[string]func(t *testing.T, w *fixture){
		"none":          func(t *testing.T, w *fixture) { w.drop(t, ca) },
		"an empty file": func(t *testing.T, w *fixture) { w.put(t, ca, "") },
		"a folder":      func(t *testing.T, w *fixture) { w.leave(t, ca, true) },
		"garbage":       func(t *testing.T, w *fixture) { w.put(t, ca, "x") },
		"no certificate": func(t *testing.T, w *fixture) {
			w.put(t, ca, "-----BEGIN CERTIFICATE-----\neA==\n-----END CERTIFICATE-----\n")
		},
		"and no kubelet.conf": func(t *testing.T, w *fixture) { w.drop(t, ca); w.drop(t, "etc/kubernetes/kubelet.conf") },
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			w.desires(t, byRecovery)
			right := w.get(ca)
			w.put(t, "usr/local/bin/kubeadm", newKubeadm)
			harm(t, w)
			before := map[string]string{}
			for _, file := range []string{"etc/kubernetes/kubelet.conf", "etc/kubernetes/admin.conf", "usr/local/bin/kubeadm"} {
				before[file] = w.get(file)
			}
			r := w.boot()
			if err := r.end(t); attest.ReasonOf(err) != attestv1.Reason_REASON_STATE_DISK || !strings.Contains(err.Error(), "ca.crt") || !strings.Contains(err.Error(), "backup") {
				t.Errorf("%v", err)
			}
			for file, text := range before {
				if w.get(file) != text {
					t.Errorf("%s was changed", file)
				}
			}
			if w.exists(strings.TrimPrefix(mayStart, "/")) {
				t.Error("it goes on")
			}
			if name != "and no kubelet.conf" {
				w.put(t, ca, right)
				w.startAgain(t)
			}
		})
	}
}
