package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
)

// reserve is the room in bytes that an upgrade leaves on the disk of /etc/kubernetes.
const reserve = 256 << 20

// controlPlane runs kubeadm while no control plane joins or renews its certificates (J8), and this machine does not either. It waits for that until the
// context waiting ends; begin ends the wait.
func (u *Upgrader) controlPlane(ctx, waiting context.Context, begin func() error, r *release, in *component.Installer) error {
	resume, err := renewal.Pause(waiting, u.Root, u.Timing.Poll)
	if err != nil {
		return err
	}
	defer resume()
	return u.withCluster(func(c Cluster) error {
		return c.Exclusively(waiting, func(leased context.Context) error {
			if err := begin(); err != nil {
				return err
			}
			// A kubeadm that is killed leaves a control plane without a part. It is not killed because the lease is lost, as with a control plane whose API
			// server is the only one.
			stop := context.AfterFunc(leased, func() {
				if ctx.Err() == nil {
					u.Log.WarnContext(ctx, "the lease of control planes is lost during the upgrade, which continues")
				}
			})
			defer stop()
			// etcd must not lose two members at a time. It can have one whose control plane the cluster does not know.
			err := u.await(ctx, "not started, since not all control planes are healthy", func(ctx context.Context) error {
				bad, err := c.Unhealthy(ctx)
				switch {
				case err != nil:
					return err
				case len(bad) > 0:
					return fmt.Errorf("these are not Ready: %s", strings.Join(bad, ", "))
				}
				return u.Etcd(ctx)
			})
			if err != nil {
				return err
			}
			if err := u.forgetCopies(); err != nil { // of an earlier attempt: all of it is in place
				return err
			}
			if err := u.room(); err != nil {
				return err
			}
			if r.apply() {
				if err := c.SetTags(ctx, r.software.Images); err != nil {
					return err
				}
			}
			if err := u.kubeadm(ctx, r, in); err != nil {
				return err
			}
			return u.checkPods(r)
		})
	})
}

// room returns an error if kubeadm's copy of etcd's data would fill the disk.
func (u *Upgrader) room() error {
	var need int64 = reserve
	err := filepath.WalkDir(u.on(machine.EtcdFolder), func(_ string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // etcd has removed it meanwhile
			return nil
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			need += info.Size()
		}
		return err
	})
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(u.on(machine.KubernetesFolder), &st); err != nil {
		return err
	}
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Errorf("the disk of %s has %d MiB free, and an upgrade needs %d MiB for a copy of etcd's data: make room on it", machine.KubernetesFolder, free>>20, need>>20)
	}
	return nil
}

// kubeadm installs the new kubeadm and upgrades the node with it.
func (u *Upgrader) kubeadm(ctx context.Context, r *release, in *component.Installer) error {
	if err := u.await(ctx, "not started, since the kubelet does not run", u.Healthy); err != nil {
		return err
	}
	if err := in.Install(ctx, []component.Component{r.kubeadm}, u.progress(ctx)); err != nil {
		return err
	}
	if err := u.isVersion(ctx, "kubeadm", r.version); err != nil {
		return err
	}
	if err := u.keepKubelet(); err != nil {
		return err
	}
	config, err := kubeadm.Upgrade(u.Kubeadm, r.version)
	if err != nil {
		return err
	}
	if is, err := renewal.IsControlPlane(u.Root); err != nil {
		return err
	} else if is {
		if err := clusterca.WriteSigner(u.on(machine.PKIFolder)); err != nil { // the new controller manager reads it
			return err
		}
	}
	if err := u.writePatches(r); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(u.on(kubeadm.PatchesFolder)) }()
	if err := machine.WriteFile(u.on(machine.KubeadmConfig), config, 0o600, 0o755); err != nil {
		return err
	}
	defer func() { _ = os.Remove(u.on(machine.KubeadmConfig)) }()
	run, cancel := context.WithTimeout(ctx, kubeadm.UpgradeTime)
	defer cancel()
	args := kubeadm.UpgradeArgs(r.apply(), u.on(machine.KubeadmConfig))
	var tail kubeadm.Tail
	err = u.Machine.Kubeadm(run, func(l string) {
		tail.Add(l)
		if l = strings.TrimSpace(kubeadm.Redact(l)); l != "" {
			u.Log.InfoContext(ctx, "output", "program", "kubeadm upgrade", "line", l)
		}
	}, args...)
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm %s %s: %w\n%s", args[0], args[1], err, tail.String())
	}
	if err := u.checkKubelet(ctx); err != nil {
		return err
	}
	return machine.Sync(u.on(machine.KubernetesFolder), u.on(machine.KubeletFolder)) // kubeadm leaves its files in the kernel's caches
}

// writePatches writes the patches by which kubeadm's static pods name their images by digest (B9), and keep the note of the certificates that they run
// with: without it, a renewal would restart them once more.
func (u *Upgrader) writePatches(r *release) error {
	for name, patch := range kubeadm.Patches(r.software.Images) {
		component, _, _ := strings.Cut(name, "+")
		note, err := renewal.NoteOf(u.Root, component)
		if err != nil {
			return err
		}
		if note != "" {
			patch = kubeadm.WithAnnotation(name, patch, renewal.Annotation, note)
		}
		if err := machine.WriteFile(u.on(path.Join(kubeadm.PatchesFolder, name)), patch, 0o600, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// checkPods returns an error unless all static pods are those of the release.
func (u *Upgrader) checkPods(r *release) error {
	for _, name := range kubeadm.StaticPods() {
		file := kubeadm.Manifests + "/" + name + ".yaml"
		text, err := os.ReadFile(u.on(file))
		if err != nil {
			return err
		}
		if err := u.Kubeadm.CheckStaticPod(u.Root, name, text, r.software.Images); err != nil {
			return fmt.Errorf("kubeadm has not upgraded %s: %w", file, err)
		}
	}
	return nil
}

// keepKubelet copies the kubelet's configuration, unless a copy is there and the configuration is not whole.
func (u *Upgrader) keepKubelet() error {
	text, err := os.ReadFile(u.on(kubeletConfig))
	if err != nil {
		return err
	}
	if _, _, err := u.Kubeadm.CheckKubelet(text); err != nil {
		return fmt.Errorf("%w; reset the machine, which then joins as new", err)
	}
	return machine.WriteFile(u.on(kubeletCopy), text, 0o600, 0o700)
}

// checkKubelet corrects the files of the kubelet that kubeadm has written with objects of the cluster: what could make the kubelet run programs, or take
// pods from another source (B8).
func (u *Upgrader) checkKubelet(ctx context.Context) error {
	text, err := os.ReadFile(u.on(kubeletConfig))
	if err != nil {
		return err
	}
	right, changed, err := u.Kubeadm.CheckKubelet(text)
	if err != nil {
		return err
	}
	if len(changed) > 0 {
		u.Log.ErrorContext(ctx, "the cluster's configuration of kubelets has fields that a machine does not take from it", "fields", strings.Join(changed, ", "))
		if err := machine.WriteFile(u.on(kubeletConfig), right, 0o644, 0o755); err != nil {
			return err
		}
	}
	if text, err = read(u.on(InstanceConfig)); err == nil && text != nil && !u.Kubeadm.CheckInstanceConfig(text) {
		err = machine.WriteFile(u.on(InstanceConfig), u.Kubeadm.InstanceConfig(), 0o644, 0o755)
	}
	return err
}

// InstanceConfig is merged by kubeadm into the kubelet's configuration.
const InstanceConfig = machine.KubeletFolder + "/instance-config.yaml"
