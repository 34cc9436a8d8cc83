package upgrade

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// kubeadmFolder is where kubeadm keeps manifests while it replaces them, and copies of the kubelet's configuration and of etcd's data.
const kubeadmFolder = machine.KubernetesFolder + "/tmp"

const kubeletConfig = machine.KubeletFolder + "/config.yaml"

// PutBack puts back what an interrupted kubeadm has left without a file, and returns the names of the files: manifests of static pods, which it moves away
// before it moves the new ones in, and the kubelet's configuration, which it does not write by rename. Without them a control plane does not start. A
// manifest must be one that kubeadm makes with the images of one of the lists (B8). A worker has none, whatever is on its disk.
func PutBack(root string, controlPlane bool, img *kubeadm.Image, lists ...versions.Images) (put []string, err error) {
	on := func(path string) string { return filepath.Join(root, path) }
	if controlPlane {
		for _, name := range kubeadm.StaticPods() {
			file := kubeadm.Manifests + "/" + name + ".yaml"
			if there(on(file)) {
				continue
			}
			text, err := newest(root, name, img, lists)
			if err != nil {
				return put, err
			}
			if text == nil {
				continue
			}
			if err := machine.WriteFile(on(file), text, 0o600, 0o700); err != nil {
				return put, err
			}
			put = append(put, file)
		}
	}
	kept, err := os.ReadFile(on(kubeletCopy))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return put, err
	}
	is, err := os.ReadFile(on(kubeletConfig))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) { // the node was reset since
			err = nil
		}
		return put, err
	}
	if _, _, err := img.CheckKubelet(is); err == nil {
		return put, nil
	}
	right, _, err := img.CheckKubelet(kept)
	if err != nil {
		return put, nil //nolint:nilerr // the copy is not better
	}
	return append(put, kubeletConfig), machine.WriteFile(on(kubeletConfig), right, 0o644, 0o755)
}

// PutBackUnlisted is [PutBack] on a machine that has no list of its cluster: its disk is not compared with one.
func PutBackUnlisted(root string, controlPlane bool, img *kubeadm.Image) ([]string, error) {
	var lists []versions.Images
	for _, f := range []string{component.KeptList, nextList} {
		list, err := component.ListFile(filepath.Join(root, f)).Load()
		if err != nil || list == nil {
			continue
		}
		if images, err := versions.ParseImages(list.Images); err == nil {
			lists = append(lists, images)
		}
	}
	return PutBack(root, controlPlane, img, lists...)
}

// DropLists removes lists of an interrupted upgrade that are not among the cluster's (B8).
func DropLists(root string, known ...versions.List) error {
	for _, f := range []string{previousList, nextList} {
		at := filepath.Join(root, f)
		list, err := component.ListFile(at).Load()
		if err == nil && (list == nil || slices.ContainsFunc(known, func(k versions.List) bool { return component.Same(*list, k) })) {
			continue
		}
		if err := os.RemoveAll(at); err != nil {
			return err
		}
	}
	return nil
}

// there reports whether a manifest exists. A power cut can leave an empty one.
func there(path string) bool {
	st, err := os.Lstat(path)
	return err == nil && (!st.Mode().IsRegular() || st.Size() > 0)
}

// newest returns the newest manifest of a static pod that kubeadm has moved away; nil if there is none.
func newest(root, name string, img *kubeadm.Image, lists []versions.Images) ([]byte, error) {
	found, err := filepath.Glob(filepath.Join(root, kubeadmFolder, "kubeadm-backup-manifests*", name+".yaml"))
	if err != nil {
		return nil, err
	}
	slices.SortFunc(found, func(a, b string) int { return strings.Compare(b, a) }) // kubeadm's names have the time
	for _, f := range found {
		if st, err := os.Lstat(f); err != nil || !st.Mode().IsRegular() {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		if img.ListedPod(root, name, text, lists...) == nil {
			return text, nil
		}
	}
	return nil, nil
}
