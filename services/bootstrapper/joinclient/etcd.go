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

// leaveEtcd removes this machine from the cluster's etcd, if an earlier attempt has added it. It runs before kubeadm's reset, which empties the member's
// disk: a voting member without its disk counts as down, and with one of two members down etcd can't be repaired.
//
// learners is for the beginning of the join lease, when no other machine joins (J8). Later the lease may be lost, and a learner may be the next
// machine's.
func (c *Client) leaveEtcd(ctx context.Context, t *ticket, meta *metadata.Machine, report provision.Progress, learners bool) error {
	ctx, cancel := context.WithTimeout(ctx, c.node.Timing.Reset)
	defer cancel()
	file := func(name string) []byte {
		i := slices.IndexFunc(t.files, func(f *joinv1.ControlPlaneFile) bool { return f.GetPath() == name })
		return t.files[i].GetContent() // all were checked to exist
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
