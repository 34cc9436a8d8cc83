package provision

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/objects/podsecurity"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Progress reports the present step to clients and the console.
type Progress func(phase initv1.Phase, text string)

// OpenDisk sets the state disk's key.
func (n *Node) OpenDisk(ctx context.Context, key keys.Disk, report Progress) error {
	report(initv1.Phase_PHASE_LOCKED, "opening the state disk")
	if err := n.Disk.SetKey(ctx, key); err != nil {
		return err
	}
	if err := n.Lock.Advance(journal.StepDisk); err != nil {
		return err
	}
	report(initv1.Phase_PHASE_DISK, "the state disk is open")
	return nil
}

// Install installs components and images.
func (n *Node) Install(ctx context.Context, s *component.Software, controlPlane bool, report Progress) error {
	in := component.New(n.Root, n.Components, n.Log)
	defer in.Close()
	if err := in.Install(ctx, s.Components, func(text string) { report(initv1.Phase_PHASE_DISK, text) }); err != nil {
		return err
	}
	if err := n.prepareImages(ctx, s.Images, controlPlane, report); err != nil {
		return err
	}
	if err := component.ListFile(n.On(component.KeptList)).Save(s.List); err != nil {
		return err
	}
	if err := n.Lock.Advance(journal.StepComponents); err != nil {
		return err
	}
	report(initv1.Phase_PHASE_COMPONENTS, "components are installed")
	return nil
}

// NoEtcd is the leave function of a machine that was never in a cluster's etcd.
func NoEtcd(context.Context) error { return nil }

// Clean removes what an unfinished kubeadm run left, if there was one (B3). It needs kubeadm itself, so components come first. leave removes the machine
// from the cluster's etcd.
func (n *Node) Clean(ctx context.Context, report Progress, leave func(context.Context) error) error {
	if n.Lock.Record().Step < journal.StepConfigured {
		// A machine whose disk was replaced may have left a member that its journal does not know.
		return leave(ctx)
	}
	report(initv1.Phase_PHASE_COMPONENTS, "cleaning up after an earlier try")
	return n.reset(ctx, leave)
}

func (n *Node) reset(ctx context.Context, leave func(context.Context) error) error {
	if err := leave(ctx); err != nil { // J8
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, n.Timing.Reset)
	defer cancel()
	var tail kubeadm.Tail
	if err := n.Machine.Kubeadm(ctx, n.Output(ctx, "kubeadm reset", &tail), kubeadm.Reset(n.Kubeadm)...); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm reset: %w\n%s", err, tail.String())
	}
	// kubeadm leaves these folders, or does not find them. The cluster never ran on this machine, or no longer knows it, so they have no data of value.
	for _, dir := range []string{machine.EtcdFolder, machine.KubeletPKI} {
		if err := machine.EmptyDir(n.On(dir)); err != nil {
			return err
		}
	}
	for _, file := range []string{kubeadm.KubeletConf, kubeadm.DiscoveryConf, machine.KubeadmConfig} {
		if err := os.Remove(n.On(file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := renewal.Discard(n.Root); err != nil {
		return err
	}
	return n.Lock.Cleaned()
}

// RunKubeadm writes the configuration and runs kubeadm with it; its static pods name the images. The journal is written before, since an interrupted run
// can't be continued, and after.
func (n *Node) RunKubeadm(ctx context.Context, verb string, config []byte, images versions.Images, report Progress, leave func(context.Context) error) error {
	if err := n.writePatches(images); err != nil {
		return err
	}
	if err := machine.WriteFile(n.On(machine.KubeadmConfig), config, 0o600, 0o755); err != nil {
		return err
	}
	if err := n.BeginEpoch(ctx); err != nil {
		return err
	}
	if err := n.LetKubeletStart(); err != nil { // kubeadm starts it
		return err
	}
	if err := n.Lock.Advance(journal.StepKubeadm); err != nil {
		return err
	}
	report(initv1.Phase_PHASE_CONFIGURED, "running kubeadm "+verb)
	run, cancel := context.WithTimeout(ctx, n.Timing.Kubeadm)
	defer cancel()
	var tail kubeadm.Tail
	line := n.Output(ctx, "kubeadm "+verb, &tail)
	at := ""
	err := n.Machine.Kubeadm(run, func(l string) {
		line(l)
		if name, ok := kubeadm.Phase(l); ok && name != at {
			at = name
			report(initv1.Phase_PHASE_CONFIGURED, "kubeadm "+verb+": "+name)
		}
	}, verb, "--config", n.On(machine.KubeadmConfig))
	// K3: the configuration may have a token. If the bootstrapper is killed before this, the next clean-up or the next boot removes it.
	for _, file := range []string{machine.KubeadmConfig, kubeadm.DiscoveryConf} {
		if rerr := os.Remove(n.On(file)); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			return rerr
		}
	}
	if rerr := os.RemoveAll(n.On(kubeadm.PatchesFolder)); rerr != nil {
		return rerr
	}
	if err != nil {
		err = attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm %s: %w\n%s", verb, err, tail.String())
		if ctx.Err() != nil {
			return err // stopping; by the journal, the next start cleans up
		}
		report(initv1.Phase_PHASE_CONFIGURED, "kubeadm failed; cleaning up")
		if rerr := n.reset(ctx, leave); rerr != nil {
			n.Log.ErrorContext(ctx, "can't clean up after kubeadm; trying again before the next run", "err", rerr)
		}
		return err
	}
	// B3: kubeadm leaves its files in the kernel's caches, and the journal does not check them again.
	if err := machine.Sync(n.On(machine.KubernetesFolder), n.On(machine.KubeletFolder)); err != nil {
		return err
	}
	if err := n.Lock.Advance(journal.StepKubeadmRan); err != nil {
		return err
	}
	report(initv1.Phase_PHASE_KUBEADM, "kubeadm "+verb+" has finished")
	return nil
}

// Output returns a function that logs each line of a program, redacted, and keeps the last ones in tail.
func (n *Node) Output(ctx context.Context, program string, tail *kubeadm.Tail) func(string) {
	return func(l string) {
		tail.Add(l)
		if l = strings.TrimSpace(kubeadm.Redact(l)); l != "" {
			n.Log.InfoContext(ctx, "output", "program", program, "line", l)
		}
	}
}

// WriteAuthz writes the API server's configuration of authorization and admission.
func (n *Node) WriteAuthz() error {
	if err := machine.WriteFile(n.On(kubeadm.AuthzFile), []byte(kubeadm.AuthzConfig), 0o600, 0o755); err != nil {
		return err
	}
	return machine.WriteFile(n.On(kubeadm.AdmissionFile), []byte(podsecurity.Config), 0o600, 0o755)
}

// DiskError gives a reason to the error of a disk that takes no writes, for the init's caller too: the owner can free space and continue.
func DiskError(err error) error {
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

// KubeadmNode returns the machine's data for kubeadm.
func KubeadmNode(m *metadata.Machine) kubeadm.Node {
	n := kubeadm.Node{Name: m.Name, Addresses: slices.Clone(m.Addresses), ProviderID: m.ProviderID, Labels: maps.Clone(m.Labels)}
	for _, t := range m.Taints {
		n.Taints = append(n.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}
	return n
}

// Finish starts the units of a node and sets the journal's last step.
func (n *Node) Finish(ctx context.Context) error {
	if err := n.CheckEpoch(ctx); err != nil { // B7: it may be an earlier copy, from the middle of a join
		return err
	}
	if err := n.StartNode(ctx); err != nil {
		return err
	}
	return n.Lock.Advance(journal.StepDone)
}
