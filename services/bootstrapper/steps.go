package bootstrapper

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/podsecurity"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Where things are on a machine.
const (
	kubernetesFolder = "/etc/kubernetes"
	adminConf        = kubernetesFolder + "/admin.conf"
	pkiFolder        = kubernetesFolder + "/pki"
	kubeletFolder    = "/var/lib/kubelet"
	kubeletPKI       = kubeletFolder + "/pki"
	etcdFolder       = "/var/lib/etcd"
	configFile       = "/run/muster/kubeadm.yaml"
)

// say tells whoever watches what is being done.
type say func(phase initv1.Phase, text string)

// openDisk gives the state disk its key.
func (b *Bootstrapper) openDisk(ctx context.Context, key keys.Disk, tell say) error {
	tell(initv1.Phase_PHASE_LOCKED, "opening the state disk")
	if err := b.disk.SetKey(ctx, key); err != nil {
		return err
	}
	if err := b.lock.advance(journal.StepDisk); err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_DISK, "the state disk is open")
	return nil
}

// install installs components and images.
func (b *Bootstrapper) install(ctx context.Context, s *software, controlPlane bool, tell say) error {
	in := component.New(b.cfg.Root, b.cfg.Components, b.log)
	defer in.Close()
	if err := in.Install(ctx, s.components, func(text string) { tell(initv1.Phase_PHASE_DISK, text) }); err != nil {
		return err
	}
	if err := b.prepareImages(ctx, s.images, controlPlane, tell); err != nil {
		return err
	}
	if err := component.ListFile(b.on(component.KeptList)).Save(s.list); err != nil {
		return err
	}
	if err := b.lock.advance(journal.StepComponents); err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_COMPONENTS, "components are installed")
	return nil
}

// stayOut is for machines that were never in anybody's etcd.
func stayOut(context.Context) error { return nil }

// clean removes what an unfinished kubeadm run left, if there was one (B3). It needs
// kubeadm itself, so components come first. leave takes the machine out of the cluster's etcd.
func (b *Bootstrapper) clean(ctx context.Context, tell say, leave func(context.Context) error) error {
	if b.lock.record().Step < journal.StepConfigured {
		// A machine whose disk was replaced has left what its journal does not know of.
		return leave(ctx)
	}
	tell(initv1.Phase_PHASE_COMPONENTS, "cleaning up after an earlier try")
	return b.reset(ctx, leave)
}

func (b *Bootstrapper) reset(ctx context.Context, leave func(context.Context) error) error {
	if err := leave(ctx); err != nil { // J8
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.Timing.Reset)
	defer cancel()
	var tail kubeadm.Tail
	if err := b.cfg.Machine.Kubeadm(ctx, b.output(ctx, "kubeadm reset", &tail), kubeadm.Reset(b.image)...); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm reset: %w\n%s", err, tail.String())
	}
	// What kubeadm leaves, or does not find. The cluster never came to life on this
	// machine, or knows nothing of it any more, so nothing of value is in there.
	for _, dir := range []string{etcdFolder, kubeletPKI} {
		if err := machine.EmptyDir(b.on(dir)); err != nil {
			return err
		}
	}
	for _, file := range []string{kubeadm.KubeletConf, kubeadm.DiscoveryConf, configFile} {
		if err := os.Remove(b.on(file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := renewal.Discard(b.cfg.Root); err != nil {
		return err
	}
	return b.lock.cleaned()
}

// runKubeadm writes the configuration and runs kubeadm with it, whose static pods name the images. The journal says so
// before, since a run that was cut off can't be continued, and after.
func (b *Bootstrapper) runKubeadm(ctx context.Context, verb string, config []byte, images versions.Images, tell say, leave func(context.Context) error) error {
	if err := b.writePatches(images); err != nil {
		return err
	}
	if err := machine.WriteFile(b.on(configFile), config, 0o600, 0o755); err != nil {
		return err
	}
	if err := b.beginEpoch(ctx); err != nil {
		return err
	}
	if err := b.letKubeletStart(); err != nil { // kubeadm starts it
		return err
	}
	if err := b.lock.advance(journal.StepKubeadm); err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_CONFIGURED, "running kubeadm "+verb)
	run, cancel := context.WithTimeout(ctx, b.cfg.Timing.Kubeadm)
	defer cancel()
	var tail kubeadm.Tail
	line := b.output(ctx, "kubeadm "+verb, &tail)
	at := ""
	err := b.cfg.Machine.Kubeadm(run, func(l string) {
		line(l)
		if name, ok := kubeadm.Phase(l); ok && name != at {
			at = name
			tell(initv1.Phase_PHASE_CONFIGURED, "kubeadm "+verb+": "+name)
		}
	}, verb, "--config", b.on(configFile))
	// K3: there may be a token in it. If we are killed before, it is gone with the next clean-up, or the next boot.
	for _, file := range []string{configFile, kubeadm.DiscoveryConf} {
		if rerr := os.Remove(b.on(file)); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			return rerr
		}
	}
	if rerr := os.RemoveAll(b.on(kubeadm.PatchesFolder)); rerr != nil {
		return rerr
	}
	if err != nil {
		err = attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm %s: %w\n%s", verb, err, tail.String())
		if ctx.Err() != nil {
			return err // stopping; the journal says what to clean up
		}
		tell(initv1.Phase_PHASE_CONFIGURED, "kubeadm failed; cleaning up")
		if rerr := b.reset(ctx, leave); rerr != nil {
			b.log.ErrorContext(ctx, "can't clean up after kubeadm; trying again before the next run", "err", rerr)
		}
		return err
	}
	// B3: kubeadm leaves its files to the kernel's caches, and the journal never looks at them again.
	if err := machine.Sync(b.on(kubernetesFolder), b.on(kubeletFolder)); err != nil {
		return err
	}
	if err := b.lock.advance(journal.StepKubeadmRan); err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_KUBEADM, "kubeadm "+verb+" has finished")
	return nil
}

// output logs each line of a program, redacted, and keeps the last ones.
func (b *Bootstrapper) output(ctx context.Context, program string, tail *kubeadm.Tail) func(string) {
	return func(l string) {
		tail.Add(l)
		if l = strings.TrimSpace(kubeadm.Redact(l)); l != "" {
			b.log.InfoContext(ctx, "output", "program", program, "line", l)
		}
	}
}

// writeAuthz places the API server's configuration of authorization and admission.
func (b *Bootstrapper) writeAuthz() error {
	if err := machine.WriteFile(b.on(kubeadm.AuthzFile), []byte(kubeadm.AuthzConfig), 0o600, 0o755); err != nil {
		return err
	}
	return machine.WriteFile(b.on(kubeadm.AdmissionFile), []byte(podsecurity.Config), 0o600, 0o755)
}

// namedDisk gives the error of a disk that takes nothing its own reason, which also reaches an init's
// caller: such an error is no fault of ours, and who frees the disk may go on.
func namedDisk(err error) error {
	if attest.ReasonOf(err) != attestv1.Reason_REASON_INTERNAL {
		return err
	}
	for _, e := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS} {
		if errors.Is(err, e) {
			return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "this machine's disk takes nothing: %w; make room on it", err)
		}
	}
	return err
}

// finish starts what a node needs and notes that all is done.
func (b *Bootstrapper) finish(ctx context.Context) error {
	if err := b.notRolledBack(ctx); err != nil { // B7: it may be a copy of before, of the middle of a join
		return err
	}
	if err := b.startNode(ctx); err != nil {
		return err
	}
	return b.lock.advance(journal.StepDone)
}
