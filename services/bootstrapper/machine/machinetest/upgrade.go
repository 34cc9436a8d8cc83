package machinetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// StaticPod returns the manifest of a static pod with an image.
func StaticPod(name, image string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", namespace: kube-system}\nspec:\n  hostNetwork: true\n  containers:\n  - name: " + name + "\n    image: " + image + "\n    command: [" + name + ", --a=b]\n"
}

// UpgradedKubelet is the kubelet's configuration that a simulated `kubeadm upgrade` writes; it has a field that no machine takes from its cluster.
const UpgradedKubelet = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nstaticPodPath: /etc/kubernetes/manifests\nstaticPodURL: http://evil\nclusterDomain: upgraded.local\n"

// upgrade does what `kubeadm upgrade` does to the files of a node. It takes the images from the patches.
func (m *Machine) upgrade(ctx context.Context, line func(string), args []string) error {
	if len(args) < 4 || args[len(args)-2] != "--config" || !m.Running(machine.UnitKubelet) {
		return fmt.Errorf("kubeadm %q, while the kubelet runs: %t", args, m.Running(machine.UnitKubelet))
	}
	config, err := os.ReadFile(args[len(args)-1])
	if err != nil {
		return err
	}
	if !strings.Contains(string(config), "kind: UpgradeConfiguration") {
		return fmt.Errorf("another configuration: %s", config)
	}
	line("[upgrade/preflight] Running preflight checks")
	if err := m.step(ctx, "kubeadm upgrade begins"); err != nil {
		return err
	}
	if _, err := os.Stat(m.on("/etc/kubernetes/pki/ca.key")); err == nil {
		for _, name := range kubeadm.StaticPods() {
			if err := m.replacePod(ctx, name); err != nil {
				line("error execution phase control-plane: " + err.Error())
				return err
			}
		}
	} else if args[1] != "node" {
		return errors.New("a worker upgrades the cluster")
	}
	file := m.on(machine.KubeletFolder + "/config.yaml")
	if err := os.WriteFile(file, nil, 0o600); err != nil { // as kubeadm: not by rename
		return err
	}
	if err := m.step(ctx, "kubeadm upgrade has half written the kubelet's configuration"); err != nil {
		return err
	}
	if err := os.WriteFile(file, []byte(UpgradedKubelet), 0o600); err != nil {
		return err
	}
	return m.step(ctx, "kubeadm upgrade is over")
}

// replacePod moves a manifest away, and then the new one in.
func (m *Machine) replacePod(ctx context.Context, name string) error {
	file := m.on(kubeadm.Manifests + "/" + name + ".yaml")
	for _, n := range kubeadm.StaticPods() {
		if st, err := os.Stat(m.on(kubeadm.Manifests + "/" + n + ".yaml")); err != nil || st.Size() == 0 {
			return fmt.Errorf("manifest files not found: %s", n)
		}
	}
	text, err := os.ReadFile(m.on(filepath.Join(kubeadm.PatchesFolder, name+"+strategic.yaml")))
	if err != nil {
		return err
	}
	var patch corev1.Pod
	if err := yaml.Unmarshal(text, &patch); err != nil {
		return err
	}
	next := StaticPod(name, patch.Spec.Containers[0].Image)
	if note := patch.Annotations["muster.dev/certificates"]; note != "" {
		next = strings.Replace(next, "namespace: kube-system}", "namespace: kube-system, annotations: {muster.dev/certificates: "+note+"}}", 1)
	}
	if have, err := os.ReadFile(file); err == nil && string(have) == next {
		return nil // as kubeadm: the manifests are equal
	}
	copies := m.on("/etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-26-12-00-00")
	if err := os.MkdirAll(copies, 0o700); err != nil {
		return err
	}
	if err := os.Rename(file, filepath.Join(copies, name+".yaml")); err != nil {
		return err
	}
	if err := m.step(ctx, "kubeadm upgrade has moved "+name+" away"); err != nil {
		return err
	}
	if err := os.WriteFile(file, []byte(next), 0o600); err != nil {
		return err
	}
	return m.step(ctx, "kubeadm upgrade has replaced "+name)
}
