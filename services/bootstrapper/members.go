package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
)

// etcdManifest is what makes the kubelet run this machine's etcd.
const etcdManifest = "/etc/kubernetes/manifests/etcd.yaml"

// leaveEtcd takes this machine out of the cluster's etcd, if an earlier try has put it in. It comes
// before kubeadm's reset, which empties the member's disk: a member with a vote whose disk is gone
// counts as one that is down, and with one of two down nothing can be repaired any more.
//
// learners is for the beginning of its turn, when no other machine joins (J8). Later its turn may have
// been lost, and a learner be that of the next.
func (b *Bootstrapper) leaveEtcd(ctx context.Context, t *ticket, meta *metadata.Machine, tell say, learners bool) error {
	ctx, cancel := context.WithTimeout(ctx, b.cfg.Timing.Reset)
	defer cancel()
	file := func(name string) []byte {
		i := slices.IndexFunc(t.files, func(f *joinv1.ControlPlaneFile) bool { return f.GetPath() == name })
		return t.files[i].GetContent() // all eight were checked to be there
	}
	removed, err := b.cfg.CleanEtcd(ctx, etcd.Target{
		ControlPlanes: t.controlPlanes, CACert: file("etcd/ca.crt"), CAKey: file("etcd/ca.key"), Own: slices.Clone(meta.Addresses), Learners: learners,
	})
	for _, m := range removed {
		tell(initv1.Phase_PHASE_COMPONENTS, "removed an etcd member that an unfinished join had left: "+m.String())
	}
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "look for etcd members that an unfinished join has left: %w", err)
	}
	return nil
}

// revive starts the kubelet of a control plane that was cut off in the middle of its join, or whose TPM was exchanged. Its
// etcd may have a vote already: the cluster may be unable to give a ticket, and so to repair anything,
// until that member is back.
func (b *Bootstrapper) revive(ctx context.Context) error {
	rec := b.lock.record()
	if rec.Kind != journal.KindJoin || rec.Step != journal.StepKubeadm {
		return nil
	}
	if _, err := os.Stat(filepath.Clean(b.on(etcdManifest))); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	b.log.InfoContext(ctx, "starting what the unfinished join has left, until it can be taken back")
	if err := b.notRolledBack(ctx); err != nil { // B7
		return err
	}
	return b.serveAgain(ctx)
}

// serveAgain starts the kubelet of a control plane that is not noted as a node yet, and with it what kubeadm has made of etcd and API server: after a power cut nobody else does (B8), and
// what is left to do needs them (B3). What is on the disk has been compared by then (B7, B8). If the machine was off for so long that its certificates have ended, it signs new ones itself, for
// there may be nobody else to do so; certificates that serve it for now are left to startNode.
func (b *Bootstrapper) serveAgain(ctx context.Context) error {
	if err := b.renewControlPlane(ctx); err != nil {
		b.log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
	}
	node := b.lock.record().NodeName
	if how, why := b.kubeletNeeds(node, controlPlaneShare); how == needNow {
		if err := b.renewByAuthority(ctx, node, why); err != nil {
			b.log.ErrorContext(ctx, "this control plane can't sign its kubelet's certificates", "node", node, "err", err)
		}
	}
	if err := b.letKubeletStart(); err != nil {
		return err
	}
	if err := b.cfg.Machine.Unit(ctx, "start", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	return nil
}

// parseAddresses reads what a ticket says of other control planes.
func parseAddresses(list []string) ([]netip.Addr, error) {
	out := make([]netip.Addr, 0, len(list))
	for _, s := range list {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, badTicket("control_plane_addresses: %w", err)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}
