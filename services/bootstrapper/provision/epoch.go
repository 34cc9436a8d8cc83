package provision

import (
	"context"

	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
)

func (n *Node) epoch() epoch.Keeper {
	return epoch.Keeper{Dir: n.On(epoch.Folder), TPM: n.TPM}
}

// BeginEpoch starts a new record for a machine that becomes a control plane, and ignores the counter value of an earlier disk. After that, an older copy
// of this disk is detected, also one from a step of the join.
func (n *Node) BeginEpoch(ctx context.Context) error {
	meta, err := n.Metadata()
	if err != nil {
		return err
	}
	if meta.Role != metadata.RoleControlPlane {
		return nil
	}
	return n.begin(ctx)
}

func (n *Node) begin(ctx context.Context) error {
	n.newest.Store(false)
	if err := n.epoch().Begin(ctx, epoch.Record{Written: n.Now()}); err != nil {
		return err
	}
	n.newest.Store(true)
	return nil
}

// CheckEpoch returns nil on a control plane whose state disk is the newest. If the disk is an earlier copy, it waits for the owner: nothing of the
// cluster is served before that (B7). It checks once: a disk can only be replaced while the machine is off, and a join that waits for a ticket calls it
// with each attempt, which would wear out the counter's memory.
func (n *Node) CheckEpoch(ctx context.Context) error {
	meta, err := n.Metadata()
	if err != nil {
		return err
	}
	if n.newest.Load() {
		return nil
	}
	if meta.Role != metadata.RoleControlPlane { // an attacker with root rights may have moved the authority away
		if is, err := renewal.IsControlPlane(n.Root); !is {
			return err
		}
	}
	s, err := n.epoch().Check(ctx)
	if err != nil {
		return err
	}
	if s.Err == nil {
		if s.Record == nil { // of a version that kept no record
			return n.begin(ctx)
		}
		if err := n.epoch().Renew(ctx); err != nil {
			return err
		}
		n.newest.Store(true)
		return nil
	}
	rec := n.Lock.Record()
	n.Joins.WithLabelValues(attest.ReasonName(attest.ReasonOf(s.Err))).Inc() // R1
	n.Attempts.Refused(s.Err)
	n.older.Store(true)
	defer n.older.Store(false)
	n.Log.ErrorContext(ctx, "this control plane does not start: its state disk is not the newest", "reason", attest.ReasonName(attest.ReasonOf(s.Err)), "err", s.Err, "remedy", rpc.RemedyFrom(s.Err))
	n.Console.Print("this control plane does not start: " + attest.ReasonName(attest.ReasonOf(s.Err)) + ". Its state disk is an older copy, or its TPM has lost its counter: docs/recovery.md has the steps for its owner")
	// On an image whose systemd starts the kubelet by itself, the kubelet already runs.
	if err := n.Machine.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return err
	}
	l, err := serve.Listen(ctx, "listen.recover", n.Image.Listen.Recover)
	if err != nil {
		return err
	}
	// Only the image's owner keys count: the journal is on the disk.
	owner := n.Image.OwnerKeys
	w := &epoch.Waiting{Keeper: n.epoch(), Standing: s, Cluster: [32]byte(rec.ClusterID), Machine: n.MachineID, Owner: owner, Attester: n.Attester, Calls: n.Calls, Log: n.Log}
	if err := w.Wait(ctx, l); err != nil {
		return err
	}
	n.newest.Store(true)
	n.Console.Print("the owner has accepted this control plane's state disk")
	return nil
}
