package upgrade

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// The note of the certificates that a static pod runs with stays: a renewal would restart it once more.
func TestANoteOfCertificatesStays(t *testing.T) {
	n := newNode(t, true)
	const file = kubeadm.Manifests + "/etcd.yaml"
	n.put(file, strings.Replace(n.get(file), "namespace: kube-system}", "namespace: kube-system, annotations: {muster.dev/certificates: abcd}}", 1))
	if _, err := n.run(n.args(ownerorder.PartNode)); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(n.get(file), "muster.dev/certificates: abcd") {
		t.Error(n.get(file))
	}
}

// A list with a kubeadm or kubelet of another version, or a program of the image's that comes before, ends the upgrade.
func TestAProgramOfAnotherVersionIsNoUpgrade(t *testing.T) {
	for name, ran := range map[string]bool{"kubeadm": false, "kubelet": true} {
		n := newNode(t, true)
		args := n.args(ownerorder.PartFirst, func(a map[string]string) {
			right, wrong := fmt.Sprintf("%x", sha256.Sum256([]byte(name+" 1.36.1"))), fmt.Sprintf("%x", sha256.Sum256([]byte(name+" 1.36.0")))
			a[ownerorder.ArgList] = strings.NewReplacer("/"+name+"/1.36.1", "/"+name+"/1.36.0", right, wrong).Replace(a[ownerorder.ArgList])
		})
		if _, err := n.run(args); err == nil || !strings.Contains(err.Error(), "the "+name+" in this machine's path is 1.36.0") {
			t.Errorf("%s: %v", name, err)
		}
		if slices.Contains(n.machine.Calls(), "kubeadm upgrade apply") != ran {
			t.Errorf("%s: %q", name, n.machine.Calls())
		}
	}
}

// kubeadm skips an etcd that it takes for newer, and says that it has ended well.
func TestAPartThatStaysOldIsNoUpgrade(t *testing.T) {
	n := newNode(t, true)
	n.crash = func(what string) error {
		if what == "kubeadm upgrade is over" {
			n.put(etcdFile, machinetest.StaticPod("etcd", images(oldVersion)[versions.Etcd].String()))
		}
		return nil
	}
	if _, err := n.run(n.args(ownerorder.PartNode)); err == nil || !strings.Contains(err.Error(), "kubeadm has not upgraded /etc/kubernetes/manifests/etcd.yaml") || n.get("/usr/local/bin/kubelet") != "kubelet "+oldVersion {
		t.Errorf("%v", err)
	}
	n.crash = nil
	if _, err := n.run(n.args(ownerorder.PartNode)); err != nil {
		t.Fatal(err)
	}
	n.isNew()
}

// kubeadm copies etcd's data beside it.
func TestAFullDiskEndsAnUpgradeBeforeItBegins(t *testing.T) {
	n := newNode(t, true)
	const large = "/var/lib/etcd/member/snap/large"
	n.put(large, "")
	if err := os.Truncate(n.on(large), 1<<43); err != nil {
		t.Fatal(err)
	}
	if _, err := n.run(n.args(ownerorder.PartFirst)); err == nil || !strings.Contains(err.Error(), "make room on it") || n.cluster.tags != nil || slices.Contains(n.machine.Calls(), "kubeadm upgrade apply") {
		t.Errorf("%v", err)
	}
	if err := os.Remove(n.on(large)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.run(n.args(ownerorder.PartFirst)); err != nil {
		t.Fatal(err)
	}
}

// The process is killed, and the machine runs on: the next process does not wait for a boot to repair what kubeadm has left.
func TestAProcessThatIsKilledInKubeadmIsFollowed(t *testing.T) {
	at := []string{"kubeadm upgrade has half written the kubelet's configuration"}
	for _, name := range kubeadm.StaticPods() {
		at = append(at, "kubeadm upgrade has moved "+name+" away")
	}
	for _, at := range at {
		n := newNode(t, true)
		n.crash = func(what string) error {
			if what == at {
				return errors.New("killed")
			}
			return nil
		}
		if _, err := n.run(n.args(ownerorder.PartFirst)); err == nil {
			t.Fatalf("it lives after %q", at)
		}
		n.crash = nil
		if _, err := n.run(n.args(ownerorder.PartFirst)); err != nil {
			t.Errorf("killed at %q, then %v", at, err)
		}
		n.isNew()
	}
}
