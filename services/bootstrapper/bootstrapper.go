// Package bootstrapper turns a freshly booted machine into a node: the first one of a new cluster, if its owner requests that over init.v1, or another
// one of a running cluster, if a joinservice issues a ticket.
//
// Both are attempted at the same time, and the first to take the node lock proceeds. The code keeps three invariants and names them where it keeps them:
//
//	B1  unlocked becomes locked, once;
//	B2  init and join never both proceed;
//	B3  killed at any step, the machine ends as a node, or cleanly retryable, or locked
//	    with a named way out.
//
// For B3, a journal is written before each step that can't be repeated and after each step that can: at any entry of the journal, the next step is safe
// to repeat. The bootstrapper ends once the machine is a node.
package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/initserver"
	"github.com/muster-k8s/muster/services/bootstrapper/joinclient"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/services/bootstrapper/statecheck"
	"github.com/muster-k8s/muster/trust/attest"
)

// Config lists what a Bootstrapper needs. All fields but Console and Now are required.
type Config struct {
	provision.Config
	// WriteClusterState writes Muster's objects into the new cluster: [clusterobjects.Write].
	WriteClusterState func(ctx context.Context, kubeconfig []byte, s clusterobjects.State) error
	// CleanEtcd removes members that unfinished joins left in the cluster's etcd: [etcd.Clean].
	CleanEtcd func(ctx context.Context, t etcd.Target) ([]etcd.Member, error)
}

// Bootstrapper runs the two components that race for the node lock.
type Bootstrapper struct {
	node *provision.Node
	init *initserver.Server
	join *joinclient.Client
}

// New reads the journal and checks the disk and the TPM. It returns an error that names the fields of cfg that are missing or wrong, or the reason why
// this machine can't continue.
func New(ctx context.Context, cfg Config) (*Bootstrapper, error) {
	if err := required.Fields("bootstrapper.New", cfg, "Console", "Now"); err != nil {
		return nil, err
	}
	n, err := provision.New(ctx, cfg.Config)
	if err != nil {
		return nil, err
	}
	s, err := initserver.New(initserver.Config{Node: n, WriteClusterState: cfg.WriteClusterState, Metrics: cfg.Metrics})
	if err != nil {
		return nil, err
	}
	return &Bootstrapper{node: n, init: s, join: joinclient.New(n, cfg.CleanEtcd)}, nil
}

// InitServer returns the handler of init.v1's InitService.
func (b *Bootstrapper) InitServer() *initserver.Server { return b.init }

// Run joins a cluster unless an init comes first, and returns nil once the machine is a node. It returns after all running inits have ended.
func (b *Bootstrapper) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var joining sync.WaitGroup
	defer func() {
		cancel()
		b.init.Wait()
		joining.Wait()
	}()
	if err := b.recall(); err != nil {
		return err
	}
	// PCR 15 is zero after a reboot; services use it to prove their cluster.
	if err := b.node.Lock.Relock(ctx); err != nil {
		return err
	}
	moved, err := b.node.Lock.Moved()
	if err != nil {
		return err
	}
	if err := statecheck.Run(ctx, b.node); err != nil { // B8: at every step of the journal
		return fmt.Errorf("compare what is on the state disk with the cluster's list: %w", err)
	}
	b.loadImages(ctx)
	b.init.Start(ctx)
	rec := b.node.Lock.Record()
	if moved {
		b.node.Log.WarnContext(ctx, "the node on this disk had another TPM: joining as new", "node", rec.NodeName, "remedy", "If you exchanged it: `muster replace "+rec.NodeName+" --tpm "+b.node.MachineID.String()+"`")
	}
	b.node.Log.InfoContext(ctx, "bootstrapper is running", "step", rec.Step.String(), "lock", string(rec.Kind))
	if rec.Step == journal.StepDone {
		if err := b.node.CheckEpoch(ctx); err != nil { // B7: before etcd and the API server start
			return err
		}
		if err := b.node.StartNode(ctx); err != nil {
			return err
		}
		b.node.Console.Print("this machine is the node " + rec.NodeName)
		if rec.Kind == journal.KindJoin || rec.ResultSent {
			return nil
		}
		return b.linger(ctx)
	}
	b.node.Console.Print("this machine has the ID " + b.node.MachineID.String()) // the owner compares it with the one that is signed (A7)
	b.node.Console.Print("the state disk has the UUID " + b.node.DiskID.String())
	joined := make(chan error, 1)
	if !rec.Kind.ByOwner() {
		joining.Go(func() { joined <- b.join.Run(ctx) })
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-b.init.Finished():
			return b.linger(ctx)
		case err := <-joined:
			if err == nil || !errors.Is(err, joinclient.ErrLostRace) {
				return err
			}
			b.node.Log.InfoContext(ctx, "the owner has taken the node lock; not joining any more")
		}
	}
}

// imagesOfRoot exists if the machine's root has container images for [machine.UnitImages].
const imagesOfRoot = "/usr/share/muster/images/index.json"

// loadImages makes containerd load the images of the machine's root, after its store was renewed. Pods whose images are missing are reported by the
// cluster: a failure does not keep the machine from its owner.
func (b *Bootstrapper) loadImages(ctx context.Context) {
	if _, err := os.Stat(b.node.On(imagesOfRoot)); err != nil {
		return
	}
	if err := b.node.Machine.Unit(ctx, "start", machine.UnitImages); err != nil {
		b.node.Log.ErrorContext(ctx, "the container images of the machine image are not loaded; it is tried again every 10 s", "unit", machine.UnitImages, "err", err)
		b.node.Console.Print("the container images of the machine image are not loaded; it is tried again every 10 s. " + checkup.Journal("NODE", machine.UnitImages))
	}
}

// recall adds to the journal the policies that other processes of this machine have accepted since the journal was written. It returns POLICY_INVALID if
// one of them is older than the journal's: a joinservice that the owner has since removed may have opened the disk.
func (b *Bootstrapper) recall() error {
	known := b.node.Lock.Record().Policy
	newest, err := discovery.Recall(b.node.Root, known, b.node.OwnerKeys)
	if err != nil {
		b.node.Console.Print("this machine does not start as a node: " + attest.ReasonName(attest.ReasonOf(err)) + ". Restart it; its disk was opened under a policy that is older than one it has accepted before")
		return err
	}
	if newest != known {
		if err := b.node.Lock.Update(func(r *journal.Record) { r.Policy = newest }); err != nil {
			return err
		}
	}
	// The policy has been compared. A later policy of this boot can't be older.
	if err := os.Remove(b.node.On(journal.UnlockPolicy)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// linger keeps an init's result for a client whose connection was lost at the end.
func (b *Bootstrapper) linger(ctx context.Context) error {
	wait := time.NewTimer(b.node.Timing.Unclaimed)
	defer wait.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wait.C:
		b.node.Log.WarnContext(ctx, "no client fetched the init's result", "kubeconfig", machine.AdminConf)
		return nil
	case <-b.init.Sent():
	}
	if !b.node.Lock.Record().ResultSent {
		if err := b.node.Lock.Update(func(r *journal.Record) { r.ResultSent = true }); err != nil {
			return err
		}
	}
	again := time.NewTimer(b.node.Timing.Linger)
	defer again.Stop()
	select {
	case <-ctx.Done():
	case <-again.C:
	}
	return nil
}
