package upgrade

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

const etcdFile = kubeadm.Manifests + "/etcd.yaml"

// B8: only a manifest that kubeadm makes with the images of a list is put back, and none is put over another.
func TestOnlyListedManifestsArePutBack(t *testing.T) {
	old, next := machinetest.StaticPod("etcd", images(oldVersion)[versions.Etcd].String()), machinetest.StaticPod("etcd", images(newVersion)[versions.Etcd].String())
	for name, tt := range map[string]struct {
		there, older, newer, want string
		worker, key               bool
	}{
		"of the old release":          {older: old, want: old},
		"of the new release":          {older: next, want: next},
		"the newest one":              {older: old, newer: next, want: next},
		"the newest that is listed":   {older: old, newer: machinetest.StaticPod("etcd", "evil"), want: old},
		"of another image":            {older: machinetest.StaticPod("etcd", "evil")},
		"with privileges":             {older: old + "    securityContext: {privileged: true}\n"},
		"of another pod":              {older: machinetest.StaticPod("kube-scheduler", images(oldVersion)[versions.Scheduler].String())},
		"one that is there":           {there: next, older: old, want: next},
		"one that is not for us":      {there: "another", older: old, want: "another"},
		"on a worker":                 {worker: true, older: old},
		"on a worker with a CA's key": {worker: true, key: true, older: old},
		"none, and no copy is there":  {},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, !tt.worker)
			if tt.key { // which root can make
				n.put(machine.PKIFolder+"/ca.key", "key")
			}
			if err := os.RemoveAll(n.on(etcdFile)); err != nil {
				t.Fatal(err)
			}
			for file, content := range map[string]string{etcdFile: tt.there, kubeadmFolder + "/kubeadm-backup-manifests-2026-11-26-12-00-00/etcd.yaml": tt.older, kubeadmFolder + "/kubeadm-backup-manifests-2026-11-27-12-00-00/etcd.yaml": tt.newer} {
				if content != "" {
					n.put(file, content)
				}
			}
			put, err := PutBack(n.root, !tt.worker, n.image(), images(oldVersion), images(newVersion))
			if err != nil || n.get(etcdFile) != tt.want || (len(put) == 1) != (tt.there == "" && tt.want != "") {
				t.Errorf("%q, %v: %s", put, err, n.get(etcdFile))
			}
		})
	}
}

func TestALinkIsNotPutBack(t *testing.T) {
	n := newNode(t, true)
	copies := kubeadmFolder + "/kubeadm-backup-manifests-2026-11-26-12-00-00/etcd.yaml"
	n.put("/var/evil", n.get(etcdFile))
	n.put(copies, "")
	for _, f := range []string{etcdFile, copies} {
		if err := os.Remove(n.on(f)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/var/evil", n.on(copies)); err != nil {
		t.Fatal(err)
	}
	if put, err := PutBack(n.root, true, n.image(), images(oldVersion)); err != nil || len(put) > 0 {
		t.Errorf("%q, %v", put, err)
	}
}

// A power cut can leave empty files where kubeadm does not write by rename.
func TestAnEmptyFileIsPutBack(t *testing.T) {
	for name, tt := range map[string]struct {
		is, kept string
		put      bool
	}{
		"empty":                     {"", kubeletFile, true},
		"cut off":                   {"apiVersion: kubelet.config.k8s.io/v1beta1\nauthentication: {", kubeletFile, true},
		"whole":                     {strings.Replace(kubeletFile, "cluster.local", "new.local", 1), kubeletFile, false},
		"empty, and so is the copy": {"", "", false},
	} {
		n := newNode(t, true)
		n.put(kubeletConfig, tt.is)
		n.put(kubeletCopy, tt.kept)
		put, err := PutBack(n.root, true, n.image())
		if err != nil || slices.Contains(put, kubeletConfig) != tt.put || strings.Contains(n.get(kubeletConfig), "cluster.local") != tt.put {
			t.Errorf("%s: %q, %v: %s", name, put, err, n.get(kubeletConfig))
		}
	}
	n := newNode(t, true)
	n.put(kubeadmFolder+"/kubeadm-backup-manifests-2026-11-26-12-00-00/etcd.yaml", n.get(etcdFile))
	n.put(etcdFile, "")
	if put, err := PutBack(n.root, true, n.image(), images(oldVersion)); err != nil || !slices.Equal(put, []string{etcdFile}) {
		t.Errorf("%q, %v", put, err)
	}
	// B8: the copy is on the state disk, where root may have changed it.
	n.put(kubeletConfig, "")
	n.put(kubeletCopy, kubeletFile+"staticPodURL: http://evil\n")
	if _, err := PutBack(n.root, true, n.image()); err != nil || strings.Contains(n.get(kubeletConfig), "evil") || n.get(kubeletConfig) == "" {
		t.Errorf("%v: %s", err, n.get(kubeletConfig))
	}
	// A node that was reset has no configuration.
	if err := os.Remove(n.on(kubeletConfig)); err != nil {
		t.Fatal(err)
	}
	if put, err := PutBack(n.root, true, n.image()); err != nil || len(put) > 0 {
		t.Errorf("%q, %v", put, err)
	}
}
