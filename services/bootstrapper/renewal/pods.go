package renewal

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	authority "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/rotation"
)

// Annotation of a static pod is a digest of the certificates and keys that it runs with; an API server's also covers the bans after which it was started.
// The kubelet restarts a static pod whose manifest changes, as `kubeadm upgrade` relies on, and copies its annotations to the mirror pod in the API.
const Annotation = "muster.dev/certificates"

// digest returns the right annotation of a component.
func (p plane) digest(component string) (string, error) {
	h := sha256.New()
	for _, f := range files {
		if f.component != component {
			continue
		}
		leaf, err := load(p.on(filepath.Join(folder, f.certificate)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		h.Write(leaf.Raw)
	}
	// A digest of keys with at least 128 bits reveals nothing about them.
	for _, name := range rotation.Files(component) {
		text, err := os.ReadFile(p.on(filepath.Join(pki, name)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		one := sha256.Sum256(text)
		clear(text)
		h.Write(one[:])
	}
	if component == apiServer {
		bans, err := os.ReadFile(p.on(restarted))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		h.Write(bans)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// manifest reads a component's manifest, and returns it with its right annotation; nil if this machine does not run the component.
func (p plane) manifest(component string) (*unstructured.Unstructured, string, error) {
	path := p.on(filepath.Join(manifests, component+".yaml"))
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	want, err := p.digest(component)
	if err != nil {
		return nil, "", err
	}
	pod := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(text, &pod.Object); err != nil {
		return nil, "", fmt.Errorf("%s: %w", path, err)
	}
	return pod, want, nil
}

// restart makes the kubelet restart a component with the certificates that are now on the disk, and returns the annotation of the new pod; it is empty
// if this machine does not run the component. A component that already runs with them does not restart.
func (p plane) restart(component string) (string, error) {
	if component == controllerManager {
		if err := authority.WriteSigner(p.on(pki)); err != nil { // before the pod that reads it
			return "", err
		}
	}
	pod, want, err := p.manifest(component)
	if err != nil || pod == nil {
		return "", err
	}
	if pod.GetAnnotations()[Annotation] == want {
		return want, nil
	}
	if component == controllerManager {
		if err := p.setSigner(pod); err != nil {
			return "", err
		}
	}
	annotations := pod.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[Annotation] = want
	pod.SetAnnotations(annotations)
	text, err := yaml.Marshal(pod.Object)
	if err != nil {
		return "", err
	}
	// The file is written by rename, and the kubelet ignores names that begin with a dot: it never reads half of a manifest.
	if err := machine.WriteFile(p.on(filepath.Join(manifests, component+".yaml")), text, 0o600, 0o700); err != nil {
		return "", err
	}
	return want, p.step("restarted " + component)
}

// setSigner makes a controller manager of an earlier Muster sign with the file of the one authority.
func (p plane) setSigner(pod *unstructured.Unstructured) error {
	containers, _, err := unstructured.NestedSlice(pod.Object, "spec", "containers")
	if err != nil || len(containers) == 0 {
		return errors.Join(fmt.Errorf("the manifest of %s has no containers", controllerManager), err)
	}
	container, _ := containers[0].(map[string]any)
	command, _, err := unstructured.NestedStringSlice(container, "command")
	if err != nil {
		return fmt.Errorf("the manifest of %s: %w", controllerManager, err)
	}
	signing := kubeadm.WithSigner(command)
	if slices.Equal(signing, command) {
		return nil
	}
	if err := unstructured.SetNestedStringSlice(container, signing, "command"); err != nil {
		return err
	}
	return unstructured.SetNestedSlice(pod.Object, containers, "spec", "containers")
}
