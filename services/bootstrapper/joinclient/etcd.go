package joinclient

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
)

// etcdManifest makes the kubelet run this machine's etcd.
const etcdManifest = "/etc/kubernetes/manifests/etcd.yaml"

// leaveEtcd takes this machine out of the cluster's etcd, if an earlier try has put it in. It comes
// before kubeadm's reset, which empties the member's disk: a member with a vote whose disk is gone
// counts as one that is down, and with one of two down nothing can be repaired any more.
//
// learners is for the beginning of its turn, when no other machine joins (J8). Later its turn may have
// been lost, and a learner be that of the next.
func (c *Client) leaveEtcd(ctx context.Context, t *ticket, meta *metadata.Machine, report provision.Progress, learners bool) error {
	ctx, cancel := context.WithTimeout(ctx, c.node.Timing.Reset)
	defer cancel()
	file := func(name string) []byte {
		i := slices.IndexFunc(t.files, func(f *joinv1.ControlPlaneFile) bool { return f.GetPath() == name })
		return t.files[i].GetContent() // all eight were checked to exist
	}
	removed, err := c.cleanEtcd(ctx, etcd.Target{
		ControlPlanes: t.controlPlanes, CACert: file("etcd/ca.crt"), CAKey: file("etcd/ca.key"), Own: slices.Clone(meta.Addresses), Learners: learners,
	})
	for _, m := range removed {
		report(initv1.Phase_PHASE_COMPONENTS, "removed an etcd member that an unfinished join had left: "+m.String())
	}
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "look for etcd members that an unfinished join has left: %w", err)
	}
	return nil
}

// revive starts the kubelet of a control plane whose join was interrupted, or whose TPM was exchanged. Its etcd may already vote: without that member,
// the cluster may be unable to issue a ticket, and so to repair anything.
func (c *Client) revive(ctx context.Context) error {
	rec := c.node.Lock.Record()
	if rec.Kind != journal.KindJoin || rec.Step != journal.StepKubeadm {
		return nil
	}
	if _, err := os.Stat(filepath.Clean(c.node.On(etcdManifest))); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	c.node.Log.InfoContext(ctx, "starting what the unfinished join has left, until it can be taken back")
	if err := c.node.CheckEpoch(ctx); err != nil { // B7
		return err
	}
	return c.node.ServeAgain(ctx)
}
