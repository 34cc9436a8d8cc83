package statecheck

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/imagestore"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/services/bootstrapper/upgrade"
)

const (
	seccompFolder = "/seccomp"
	csiVolumes    = "/pods/*/" + podVolumes + "/kubernetes.io~csi/*/*"
)

// checkVolumes removes everything but folders from the places of pods' folders and volumes: the kubelet, the container runtime and a volume's driver
// would follow a link to any place. It works from the top down, so that it follows no link itself.
func (ck *check) checkVolumes(ctx context.Context) error {
	for _, pattern := range []string{
		"", "/pods", "/plugins", "/pods/*", "/pods/*/" + podVolumes, "/pods/*/" + podVolumes + "/*", "/pods/*/" + podVolumes + "/*/*", csiVolumes,
	} {
		err := eachMatch(ck.On(machine.KubeletFolder), pattern, func(at string) error {
			if info, err := os.Lstat(at); err == nil && info.Mode().IsRegular() && pattern == csiVolumes && filepath.Base(at) == csiData {
				return nil
			}
			return ck.wantFolder(ctx, ck.name(at))
		})
		if err != nil {
			return err
		}
	}
	// The kubelet recreates these, and a pod that brings seccomp profiles writes them again. Otherwise, the kubelet would keep existing files in a ConfigMap's
	// volume, take devices from a checkpoint, stop if something is in the place of its sockets, and use the last two files as pull credentials for all pods.
	// Muster's nodes have none.
	for _, pattern := range []string{
		"/pods/*/volumes/kubernetes.io~configmap", "/pods/*/volumes/kubernetes.io~secret", "/pods/*/volumes/kubernetes.io~projected", "/pods/*/volumes/kubernetes.io~downward-api",
		"/plugins/kubernetes.io", "/device-plugins/*", "/pod-resources/*", "/dra_manager_state", "/cpu_manager_state", "/memory_manager_state",
		"/allocated_pods_state", "/actuated_pods_state", seccompFolder, "/config.json", "/.dockercfg",
	} {
		err := eachMatch(ck.On(machine.KubeletFolder), pattern, func(at string) error {
			if _, err := os.Lstat(at); err == nil && pattern == seccompFolder {
				ck.Log.InfoContext(ctx, "seccomp profiles of the state disk are removed: the pod that brings them writes them again")
			}
			return tree.RemoveAll(at)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eachMatch calls do with each path below a folder that a pattern names, and with paths of which only the last name is missing. "*" is any name. Unlike
// [filepath.Glob], it returns errors of the disk: the caller removes links, and an ignored error could leave one in place (B8).
func eachMatch(folder, pattern string, do func(at string) error) error {
	first, rest, more := strings.Cut(strings.TrimPrefix(pattern, "/"), "/")
	next := func(at string, _ fs.DirEntry) error {
		if !more {
			return do(at)
		}
		return eachMatch(at, rest, do)
	}
	if first == "*" {
		return tree.Each(folder, next)
	}
	return next(filepath.Join(folder, first), nil)
}

// name returns the path of a file in the machine's root.
func (ck *check) name(at string) string {
	return strings.TrimPrefix(at, strings.TrimSuffix(ck.Root, "/"))
}

// checkKubelet corrects the kubelet's files where they would make it run another program, or take pods from another source. It does not create missing
// ones: kubeadm does.
func (ck *check) checkKubelet(ctx context.Context, meta *metadata.Machine, d *component.Desired) error {
	config, flags := ck.On(machine.KubeletFolder+"/config.yaml"), ck.On(kubeletFlags)
	text, err := os.ReadFile(config)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		right, changed, err := ck.Kubeadm.CheckKubelet(text)
		if err != nil { // without it the kubelet does not start, but the machine still accepts orders
			if err := ck.remove(ctx, machine.KubeletFolder+"/config.yaml", "removed: "+err.Error()); err != nil {
				return err
			}
		}
		if len(changed) > 0 {
			if err := machine.WriteFile(config, right, 0o644, 0o755); err != nil {
				return err
			}
			ck.found(ctx, machine.KubeletFolder+"/config.yaml", "put right: "+strings.Join(changed, ", "))
		}
	}
	text, err = os.ReadFile(ck.On(upgrade.InstanceConfig))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && !ck.Kubeadm.CheckInstanceConfig(text) { // kubeadm merges it into the configuration
		if err := machine.WriteFile(ck.On(upgrade.InstanceConfig), ck.Kubeadm.InstanceConfig(), 0o644, 0o755); err != nil {
			return err
		}
		ck.found(ctx, upgrade.InstanceConfig, "rewritten")
	}
	text, err = os.ReadFile(flags)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && !ck.Kubeadm.CheckKubeletFlags(text) {
		if err := machine.WriteFile(flags, kubeadm.KubeletFlags(provision.KubeadmNode(meta)), 0o644, 0o755); err != nil {
			return err
		}
		ck.found(ctx, kubeletFlags, "rewritten")
	}
	if err := ck.checkKubeconfig(ctx, meta, d); err != nil {
		return err
	}
	const bootstrap = machine.KubernetesFolder + "/bootstrap-kubelet.conf" // Muster's nodes never have one
	if err := os.Remove(ck.On(bootstrap)); err == nil {
		ck.found(ctx, bootstrap, "removed")
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// checkKubeconfig rewrites the kubelet's kubeconfig if it differs from what a ticket sets: another server or CA would control the kubelet's pods, and a
// user entry can name a program to run (B8).
func (ck *check) checkKubeconfig(ctx context.Context, meta *metadata.Machine, d *component.Desired) error {
	text, err := os.ReadFile(ck.On(kubeadm.KubeletConf))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is not a node yet
	}
	if err != nil {
		return err
	}
	endpoint := d.Endpoint
	if meta.Role == metadata.RoleControlPlane {
		endpoint = kubeadm.LocalEndpoint(provision.KubeadmNode(meta))
	}
	ca, err := ck.trusted(d)
	if err != nil {
		return err
	}
	right, err := kubelet.Kubeconfig(endpoint, ca)
	if err != nil {
		return err
	}
	if kubelet.SameConnection(text, right) {
		return nil
	}
	if err := machine.WriteFile(ck.On(kubeadm.KubeletConf), right, 0o600, 0o755); err != nil {
		return err
	}
	if lags(text, right, d) {
		ck.Log.InfoContext(ctx, "the authorities that the kubelet trusts are brought up to date", "file", kubeadm.KubeletConf)
		return nil
	}
	ck.found(ctx, kubeadm.KubeletConf, "rewritten")
	return nil
}

// prepareContainerd sets the sandbox's image (B9), unless pause is empty: an adopted machine has installed no image, and keeps its own. With renew, it
// removes from containerd's store what can't be verified (B8). It does that once in a boot: later, the images of the machine's root are in the store, and
// containers may run.
func (ck *check) prepareContainerd(ctx context.Context, renew bool, pause versions.Image) error {
	named := pause != (versions.Image{})
	var mark []byte
	if renew {
		var err error
		if mark, err = ck.checkedMark(); err != nil {
			return err
		}
		is, err := os.ReadFile(ck.On(renewedFile))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		renew = !bytes.Equal(is, mark) && !ck.KubeletMayStart()
	}
	if !renew {
		if !named {
			return nil
		}
		return component.PinSandbox(ctx, ck.Root, ck.Machine, pause)
	}
	if named {
		if _, err := component.NameSandbox(ck.Root, pause); err != nil { // the renewal restarts containerd
			return err
		}
	}
	ck.Console.Print("comparing the container images on the disk with their digests")
	s := imagestore.Store{
		Root: ck.Root, Machine: ck.Machine, Socket: ck.Image.Kubeadm.CRISocket, Pause: ck.Components.Pause, Log: ck.Log,
		Found: func(what, done string) { ck.found(ctx, what, done) },
	}
	if err := s.Renew(ctx); err != nil {
		return err
	}
	if named {
		if err := component.SandboxRead(ck.Root, pause); err != nil {
			return err
		}
	}
	return machine.WriteFile(ck.On(renewedFile), mark, 0o600, 0o755)
}

// keptPause returns the sandbox's image of the list on the disk; empty if there is none.
func (ck *check) keptPause() (versions.Image, error) {
	list, err := component.ListFile(ck.On(component.KeptList)).Load()
	if err != nil || list == nil {
		return versions.Image{}, err
	}
	images, err := versions.ParseImages(list.Images)
	if err != nil {
		return versions.Image{}, err
	}
	return images[versions.Pause], nil
}
