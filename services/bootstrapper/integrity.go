package bootstrapper

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// checkedFile says that the state disk was compared in this boot: what a network's installer brings afterwards stays.
	checkedFile = "/run/muster/state-checked"
	// mayStartFile lets systemd start the kubelet, whose unit has it as a condition: nothing of the state disk runs before it was looked at.
	mayStartFile = "/run/muster/kubelet-may-start"
	// findingsFile has a line for each finding of the comparison in this boot. The attester counts them in its metrics.
	findingsFile = "/run/muster/state-findings"
	// csiData is the file of a volume of the Container Storage Interface beside the folder that is mounted; the kubelet reads names from it.
	csiData = "vol_data.json"
	// kubeletFlags are read by the kubelet's unit.
	kubeletFlags = kubeletFolder + "/kubeadm-flags.env"
)

// checkState compares what runs as root from the state disk with what the cluster lists, before anything of it runs (B8): somebody who was root once
// may have left it there, and may have set the journal back as well. The reference list came from a joinservice with the disk key in this boot, and is kept in
// memory, because root could have written anything on the disk. A disk that a recovery opened, or that is not encrypted, is compared with nothing.
func (b *Bootstrapper) checkState(ctx context.Context) error {
	d, err := component.DesiredFile(b.on(component.UnlockFile)).Load()
	switch {
	case err != nil:
		return err
	case d == nil && b.cfg.Image.StateDisk.Mode == metadata.DiskLUKS: // something that follows the disk's paths can have removed it
		return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "%s is missing, which `bootstrapper unlock` wrote when it opened the state disk: the disk can't be compared with what the cluster lists, so nothing of it is started; reboot the machine", component.UnlockFile)
	case d == nil:
		return b.recallSandbox(ctx)
	case d.Uncompared != "":
		b.log.InfoContext(ctx, "the state disk is not compared with what the cluster lists", "why", d.Uncompared)
		return b.recallSandbox(ctx)
	}
	s, err := parseSoftware(d.List.Wire(), d.List.Images)
	if err != nil {
		return err
	}
	mark, err := b.checkedMark()
	if err != nil {
		return err
	}
	if is, err := os.ReadFile(b.on(checkedFile)); err == nil && bytes.Equal(is, mark) {
		return nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	meta, err := b.cfg.Metadata()
	if err != nil {
		return err
	}
	if err := b.checkPrograms(ctx, s); err != nil {
		return err
	}
	if err := b.checkVolumes(ctx); err != nil { // first: the other steps take these folders for folders
		return err
	}
	if err := b.checkTrees(ctx); err != nil {
		return err
	}
	if err := b.finishRenewal(ctx); err != nil {
		return err
	}
	if !d.Adopted {
		if err := b.checkManifests(ctx, s.images, meta.Role == metadata.RoleControlPlane); err != nil {
			return err
		}
	}
	if err := b.checkAuthorities(ctx, d.Authorities); err != nil {
		return err
	}
	if err := b.checkKubelet(ctx, meta, d); err != nil {
		return err
	}
	if err := b.checkAdministrators(ctx, meta, d); err != nil {
		return err
	}
	if err := b.pinSandbox(ctx, s.images[versions.Pause]); err != nil {
		return err
	}
	return machine.WriteFile(b.on(checkedFile), mark, 0o600, 0o755)
}

// checkedMark returns the content of [checkedFile] once the disk was compared. It depends on the secret of this boot, so nothing that was prepared on the disk in an earlier
// boot can make a valid one.
func (b *Bootstrapper) checkedMark() ([]byte, error) {
	secret, err := bootsecret.Load(b.cfg.Root)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append([]byte("muster state disk compared v1\x00"), secret.Expose()...))
	return []byte(hex.EncodeToString(sum[:])), nil
}

// letKubeletStart has the kubelet's unit start from now on, in this boot.
func (b *Bootstrapper) letKubeletStart() error {
	return machine.WriteFile(b.on(mayStartFile), nil, 0o600, 0o755)
}

// found tells what was not as it should be. A boot may compare the disk more than once: a file that was found before is not counted again.
func (b *Bootstrapper) found(ctx context.Context, what, done string) {
	b.log.ErrorContext(ctx, "the state disk has what the cluster does not list: somebody may have been root on this machine", "found", what, "done", done)
	b.cfg.Console.Say(what + " is not what the cluster lists: " + done)
	if err := b.countFinding(what, done); err != nil { // the log has it
		b.log.WarnContext(ctx, "the metrics do not show this finding", "err", err)
	}
}

func (b *Bootstrapper) countFinding(what, done string) error {
	before, err := os.ReadFile(b.on(findingsFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if strings.Contains("\n"+string(before), fmt.Sprintf("\n%q ", what)) {
		return nil
	}
	f, err := os.OpenFile(b.on(findingsFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%q %q\n", what, done)
	return errors.Join(err, f.Close())
}

// findings returns the number of findings of the comparison of the state disk in this boot (B8).
func findings(root string) float64 {
	text, err := os.ReadFile(filepath.Join(root, findingsFile))
	if err != nil {
		return 0 // nothing was found
	}
	return float64(bytes.Count(text, []byte("\n")))
}

// checkPrograms installs anew what was changed, and removes what is not listed.
func (b *Bootstrapper) checkPrograms(ctx context.Context, s *software) error {
	in := component.New(b.cfg.Root, b.cfg.Components, b.log)
	defer in.Close()
	for {
		for i, c := range s.components {
			fetched := false
			err := in.Install(ctx, s.components[i:i+1], func(text string) {
				if strings.HasPrefix(text, "fetching ") { // found before the mirror is asked, which may not answer
					fetched = true
					b.found(ctx, c.Name(), "it is to be installed anew")
				}
			})
			if err != nil {
				return err
			}
			if fetched {
				b.log.InfoContext(ctx, "a component was installed anew", "component", c.Name())
				b.cfg.Console.Say(c.Name() + " was installed anew")
			}
		}
		removed, err := in.Sweep(s.components)
		for _, what := range removed {
			b.found(ctx, what, "removed")
		}
		if err != nil || len(removed) == 0 {
			return err
		}
		// A folder that was a link has taken along what was installed through it.
	}
}

// checkManifests removes static pods that kubeadm would not have made.
func (b *Bootstrapper) checkManifests(ctx context.Context, images versions.Images, controlPlane bool) error {
	dir := b.on(kubeadm.Manifests)
	if err := b.wantFolder(ctx, kubeadm.Manifests); err != nil {
		return err
	}
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, f := range files {
		name, _ := strings.CutSuffix(f.Name(), ".yaml")
		problem := errors.New("this node has no such static pod")
		if controlPlane && f.Type().IsRegular() && name != f.Name() {
			text, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				return err
			}
			problem = b.image.CheckStaticPod(b.cfg.Root, name, text, images)
		}
		if problem != nil {
			if err := os.RemoveAll(filepath.Join(dir, f.Name())); err != nil {
				return err
			}
			b.found(ctx, kubeadm.Manifests+"/"+f.Name(), "removed: "+problem.Error())
		}
	}
	return err
}

// wantFolder removes what is in the place of a folder and is none, as a link.
func (b *Bootstrapper) wantFolder(ctx context.Context, name string) error {
	if info, err := os.Lstat(b.on(name)); err != nil || info.IsDir() {
		return nil //nolint:nilerr // nothing is there
	}
	if err := os.Remove(b.on(name)); err != nil {
		return err
	}
	b.found(ctx, name, "removed")
	return nil
}

// checkAuthorities writes anew the public files by which the node knows its cluster if they differ. It does not make missing ones: kubeadm, which may still have to write
// them, refuses to run if they are there.
func (b *Bootstrapper) checkAuthorities(ctx context.Context, want map[string][]byte) error {
	for _, folder := range []string{pkiFolder, path.Join(pkiFolder, "etcd")} {
		if err := b.wantFolder(ctx, folder); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		file := path.Join(pkiFolder, name)
		info, err := os.Lstat(b.on(file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			is, err := os.ReadFile(b.on(file))
			if err != nil {
				return err
			}
			if bytes.Equal(bytes.TrimSpace(is), bytes.TrimSpace(want[name])) {
				continue
			}
		}
		if err := os.RemoveAll(b.on(file)); err != nil {
			return err
		}
		if err := machine.WriteFile(b.on(file), want[name], 0o644, 0o755); err != nil {
			return err
		}
		b.found(ctx, file, "written anew")
	}
	return nil
}

// checkVolumes removes what is in the place of a pod's folder or volume and is no folder: the kubelet, the container runtime and a volume's driver would follow a
// link to anywhere. It goes from the top down, so that it follows none itself.
func (b *Bootstrapper) checkVolumes(ctx context.Context) error {
	for _, pattern := range []string{
		"", "/pods", "/plugins", "/pods/*", "/pods/*/volumes", "/pods/*/volumes/*", "/pods/*/volumes/*/*", "/pods/*/volumes/kubernetes.io~csi/*/*",
		"/pods/*/volume-subpaths", "/pods/*/volume-subpaths/*", "/pods/*/volume-subpaths/*/*",
	} {
		found, err := filepath.Glob(b.on(kubeletFolder) + pattern)
		if err != nil {
			return err
		}
		for _, f := range found {
			info, err := os.Lstat(f)
			if err != nil || info.IsDir() || info.Mode().IsRegular() && filepath.Base(f) == csiData {
				continue
			}
			if err := os.Remove(f); err != nil {
				return err
			}
			b.found(ctx, strings.TrimPrefix(f, strings.TrimSuffix(b.cfg.Root, "/")), "removed")
		}
	}
	// What the kubelet makes anew, from the API or by itself. It would leave what it finds in a ConfigMap's volume, and take a device from a checkpoint.
	for _, pattern := range []string{
		"/pods/*/volumes/kubernetes.io~configmap", "/pods/*/volumes/kubernetes.io~secret", "/pods/*/volumes/kubernetes.io~projected", "/pods/*/volumes/kubernetes.io~downward-api",
		"/plugins/kubernetes.io", "/device-plugins/kubelet_internal_checkpoint", "/dra_manager_state", "/cpu_manager_state", "/memory_manager_state",
	} {
		found, err := filepath.Glob(b.on(kubeletFolder) + pattern)
		if err != nil {
			return err
		}
		for _, f := range found {
			if err := os.RemoveAll(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkKubelet corrects the kubelet's files where they would have it run another program, or take pods from elsewhere. It does not make missing ones: kubeadm does.
func (b *Bootstrapper) checkKubelet(ctx context.Context, meta *metadata.Machine, d *component.Desired) error {
	config, flags := b.on(kubeletFolder+"/config.yaml"), b.on(kubeletFlags)
	text, err := os.ReadFile(config)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		right, changed, err := b.image.CheckKubelet(text)
		if err != nil {
			return err
		}
		if len(changed) > 0 {
			if err := machine.WriteFile(config, right, 0o644, 0o755); err != nil {
				return err
			}
			b.found(ctx, kubeletFolder+"/config.yaml", "put right: "+strings.Join(changed, ", "))
		}
	}
	text, err = os.ReadFile(flags)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && !b.image.CheckKubeletFlags(text) {
		if err := machine.WriteFile(flags, kubeadm.KubeletFlags(nodeOf(meta)), 0o644, 0o755); err != nil {
			return err
		}
		b.found(ctx, kubeletFlags, "written anew")
	}
	if err := b.checkKubeconfig(ctx, meta, d); err != nil {
		return err
	}
	const bootstrap = kubernetesFolder + "/bootstrap-kubelet.conf" // no node of Muster's has one once it is a node
	if err := os.Remove(b.on(bootstrap)); err == nil {
		b.found(ctx, bootstrap, "removed")
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// recallSandbox tells containerd of the sandbox's image after a reboot. A machine that was adopted has installed nothing, and keeps its own.
func (b *Bootstrapper) recallSandbox(ctx context.Context) error {
	list, err := component.ListFile(b.on(component.KeptList)).Load()
	if err != nil || list == nil {
		return err
	}
	images, err := versions.ParseImages(list.Images)
	if err != nil {
		return err
	}
	return b.pinSandbox(ctx, images[versions.Pause])
}
