package bootstrapper_test

import (
	"crypto/ed25519"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// kept is a file, a folder or a link of a disk.
type kept struct {
	path    string
	mode    fs.FileMode
	content string // of a link: where it leads
}

// switchedOff is a machine that is off. More than a hundred tests begin with the same one, and an init takes longer than what they test.
type switchedOff struct {
	disk   []kept // folders before what is in them
	tpm    *attesttest.Machine
	ca     *attesttest.CA
	image  metadata.Image
	signer ed25519.PrivateKey
	meta   metadata.Machine
}

// initializedNode is what [rebooted] copies; nil: there is none yet.
var initializedNode *switchedOff

// rebooted returns a node whose encrypted disk was opened by a joinservice at this boot, with the cluster's list.
func rebooted(t *testing.T) *fixture {
	t.Helper()
	if initializedNode == nil {
		initializedNode = initialized(t).off(t)
	}
	return initializedNode.on(t)
}

func (w *fixture) off(t *testing.T) *switchedOff {
	t.Helper()
	n := &switchedOff{tpm: w.tpm, ca: w.ca, image: *w.image, signer: w.signer, meta: w.meta}
	if err := filepath.WalkDir(w.root, func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		k := kept{mode: info.Mode()}
		if k.path, err = filepath.Rel(w.root, at); err != nil {
			return err
		}
		var content []byte
		switch k.mode.Type() {
		case fs.ModeDir:
		case fs.ModeSymlink:
			k.content, err = os.Readlink(at)
		default:
			content, err = os.ReadFile(at)
			k.content = string(content)
		}
		n.disk = append(n.disk, k)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *switchedOff) on(t *testing.T) *fixture {
	t.Helper()
	image := n.image
	w := newMachine(t, n.ca, n.tpm.Copy(t), &image)
	w.signer, w.meta = n.signer, n.meta
	for _, k := range n.disk {
		at := filepath.Join(w.root, k.path)
		var err error
		switch k.mode.Type() {
		case fs.ModeDir:
			err = os.MkdirAll(at, 0o700)
		case fs.ModeSymlink:
			err = os.Symlink(k.content, at)
		default:
			err = os.WriteFile(at, []byte(k.content), 0o600)
		}
		if err == nil && k.mode.Type() != fs.ModeSymlink {
			err = os.Chmod(at, k.mode.Perm())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// initialized returns what [rebooted] returns, from its init on.
func initialized(t *testing.T) *fixture {
	t.Helper()
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
	for _, name := range []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler} {
		w.put(t, "etc/kubernetes/manifests/"+name+".yaml", staticPod(name, machinetest.Images()[name].String()))
	}
	w.put(t, "var/lib/kubelet/config.yaml", kubeletConfig)
	w.put(t, "var/lib/kubelet/kubeadm-flags.env", kubeletEnv)
	w.put(t, "etc/kubernetes/pki/sa.pub", "sa")
	admin := strings.NewReplacer("client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem", "client-certificate-data: YQ==", "client-key: /var/lib/kubelet/pki/kubelet-client-current.pem", "client-key-data: Yg==")
	w.put(t, "etc/kubernetes/admin.conf", admin.Replace(w.get("etc/kubernetes/kubelet.conf")))
	if err := os.Chmod(filepath.Join(w.root, "etc/kubernetes/admin.conf"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.desires(t)
	return w
}
