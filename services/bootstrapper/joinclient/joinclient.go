// Package joinclient makes the machine a node of a running cluster: it finds a joinservice, requests a ticket, and takes the node lock.
//
// It competes with package initserver for the node lock.
package joinclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
)

// ErrLostRace ends the join loop: an init has taken the node lock.
var ErrLostRace = errors.New("an init has taken the node lock")

// Client joins a cluster.
type Client struct {
	node      *provision.Node
	cleanEtcd func(ctx context.Context, t etcd.Target) ([]etcd.Member, error)
}

// New returns a Client. cleanEtcd removes members that unfinished joins left in the cluster's etcd: [etcd.Clean].
func New(n *provision.Node, cleanEtcd func(ctx context.Context, t etcd.Target) ([]etcd.Member, error)) *Client {
	return &Client{node: n, cleanEtcd: cleanEtcd}
}

// Run tries to join until the machine is a node, an init has taken the lock ([ErrLostRace]) or ctx ends.
func (c *Client) Run(ctx context.Context) error {
	// B2: an init that wins ends waits and dials at once. The answer to a ticket request is still awaited, so that the ticket can be returned.
	racing, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	over := make(chan struct{})
	var watching sync.WaitGroup
	defer watching.Wait()
	defer close(over)
	watching.Go(func() {
		select {
		case <-c.node.Lock.Taken():
			if c.node.Lock.Record().Kind.ByOwner() {
				lost(ErrLostRace)
			}
		case <-over:
		}
	})
	pauses := discovery.NewPauses(c.node.Timing.RetryMin, c.node.Timing.RetryMax)
	t := &joinTry{}
	for {
		failed, err := c.joinOnce(ctx, racing, t)
		switch {
		case errors.Is(context.Cause(racing), ErrLostRace) || errors.Is(err, ErrLostRace):
			return ErrLostRace
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			c.node.Joins.WithLabelValues(attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)).Inc()
			return nil
		}
		if failed {
			reason := attest.ReasonName(discovery.ReasonOf(err))
			c.node.Joins.WithLabelValues(reason).Inc()
			c.node.Attempts.Refused(err)
			c.node.Log.WarnContext(ctx, "not joined yet", "reason", reason, "err", err, "remedy", rpc.RemedyFrom(err), "retry_after", rpc.RetryAfterFrom(err).String())
		}
		wait := pauses.Next(err)
		c.node.Attempts.Wait(wait)
		c.node.Console.Waits(t.wait(err, wait))
		if err := retry.Wait(racing, wait); errors.Is(err, ErrLostRace) {
			return ErrLostRace
		} else if err != nil {
			return ctx.Err()
		}
	}
}

// joinTry is the state that one attempt leaves to the next, and to the console.
type joinTry struct {
	order discovery.Order
	by    string // the endpoint that answered; empty if none did
	init  bool   // whether the metadata allow an init
}

// wait returns what the machine waits for after the attempt.
func (t *joinTry) wait(err error, next time.Duration) console.Wait {
	w := console.Wait{For: "waiting to join a cluster", Err: err, By: t.by, Asked: t.order.List(), Next: next}
	if t.init {
		w.Also = "`muster init` can make it the first of a new one"
	}
	return w
}

// joinOnce makes one attempt. failed is false if there was no joinservice to ask.
func (c *Client) joinOnce(ctx, racing context.Context, t *joinTry) (failed bool, err error) {
	report := func(phase initv1.Phase, text string) {
		c.node.Log.InfoContext(ctx, "progress", "phase", phase.String(), "text", text)
		if phase > initv1.Phase_PHASE_WAITING { // before that phase, each attempt would print the line
			c.node.Console.Print(text)
		}
	}
	t.by = ""
	if rec := c.node.Lock.Record(); rec.Step >= journal.StepKubeadmRan {
		return true, provision.DiskError(c.node.Finish(ctx)) // only this step was left when the machine stopped
	}
	if err := c.revive(ctx); err != nil {
		return true, err
	}
	meta, err := c.node.Metadata()
	if err != nil {
		return true, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	if err := t.order.Update(racing, meta, nil, c.node.Log); err != nil {
		return true, err
	}
	t.init = meta.InitSecretHash != nil
	c.node.Attempts.Begin(t.order.List())
	if len(t.order.List()) == 0 {
		return false, discovery.ErrNoJoinservice
	}
	endpoint, first, err := discovery.Race(racing, t.order.List(), c.node.Timing.Stagger, c.node.Timing.Dial)
	if err != nil {
		return true, fmt.Errorf("%w: %w", discovery.ErrUnreachable, err)
	}
	defer first.Close()
	t.by = endpoint
	if err := c.joinBy(ctx, endpoint, first, meta, t.order, report); err != nil {
		t.order.Failed(endpoint)
		return true, fmt.Errorf("%s: %w", endpoint, provision.DiskError(err))
	}
	return true, nil
}

// joinBy requests a ticket from one joinservice and uses it.
func (c *Client) joinBy(ctx context.Context, endpoint string, first net.Conn, meta *metadata.Machine, order discovery.Order, report provision.Progress) error {
	client, err := c.node.OpenSession(ctx, endpoint, first)
	if err != nil {
		return err
	}
	defer client.Close()

	k, err := kubelet.NewKeys()
	if err != nil {
		return err
	}
	req, err := askFor(meta, c.node.Image.StateDisk.Mode, c.node.DiskID, k)
	if err != nil {
		return err
	}
	secret, err := bootsecret.Load(c.node.Root)
	if err != nil {
		return err
	}
	req.BootSecret = secret.Expose() // J11
	ask, cancel := context.WithTimeout(ctx, c.node.Timing.Ticket)
	defer cancel()
	report(initv1.Phase_PHASE_WAITING, "asking "+endpoint+" for a ticket")
	resp, err := client.IssueJoinTicket(ask, req)
	if err != nil {
		return err
	}
	t, err := parseTicket(resp, k, meta, c.node.Now())
	if err == nil {
		err = client.Belongs(t.clusterID)
	}
	if err != nil {
		c.giveBack(ctx, client, resp.GetTicketId())
		return err
	}
	err = c.node.Lock.Acquire(ctx, journal.Record{
		Kind: journal.KindJoin, ClusterID: t.clusterID[:], Ticket: t.id, NodeName: meta.Name, DiskID: c.node.DiskID.String(), OwnerKeys: journal.OwnerKeys(c.node.OwnerKeys),
	})
	if err != nil {
		// B2: a ticket that the machine won't use is returned.
		if c.node.Lock.Record().Kind != journal.KindJoin {
			c.giveBack(ctx, client, t.id)
		}
		if c.node.Lock.Record().Kind.ByOwner() {
			return fmt.Errorf("%w: %w", ErrLostRace, err)
		}
		return err
	}
	report(initv1.Phase_PHASE_LOCKED, fmt.Sprintf("the machine is locked to cluster %x", t.clusterID[:8]))
	defer c.keepLease(ctx, t, client, order)()
	return c.useTicket(ctx, t, meta, report)
}

// giveBack returns a ticket. A failure is only logged: an enrollment whose machine never becomes a node
// ends by itself when its certificates have expired.
func (c *Client) giveBack(ctx context.Context, client joinv1connect.JoinServiceClient, id []byte) {
	// The ticket is also returned during a shutdown.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.node.Timing.Dial)
	defer cancel()
	if _, err := client.ReturnJoinTicket(ctx, &joinv1.ReturnJoinTicketRequest{TicketId: id}); err != nil {
		c.node.Log.WarnContext(ctx, "can't give the ticket back", "err", err)
		return
	}
	c.node.Log.InfoContext(ctx, "ticket given back")
}

// useTicket runs the steps of a join after the lock, in order. Each step is safe to repeat with another ticket of the same cluster (B3).
func (c *Client) useTicket(ctx context.Context, t *ticket, meta *metadata.Machine, report provision.Progress) error {
	if err := c.node.OpenDisk(ctx, t.diskKey, report); err != nil {
		return err
	}
	if err := c.node.Install(ctx, t.software, t.controlPlane, report); err != nil {
		return err
	}
	before, after := provision.NoEtcd, provision.NoEtcd
	if t.controlPlane {
		before = func(ctx context.Context) error { return c.leaveEtcd(ctx, t, meta, report, true) }
		after = func(ctx context.Context) error { return c.leaveEtcd(ctx, t, meta, report, false) }
	}
	if err := c.node.Clean(ctx, report, before); err != nil {
		return err
	}
	// The step is recorded first: files that are placed from now on must be cleaned up if they are not used.
	if err := c.node.Lock.Advance(journal.StepConfigured); err != nil {
		return err
	}
	if err := c.place(t); err != nil {
		return err
	}
	config, err := kubeadm.Join(c.node.Kubeadm, provision.KubeadmNode(meta), t.controlPlane, t.token)
	if err != nil {
		return err
	}
	report(initv1.Phase_PHASE_CONFIGURED, "certificates and configuration are in place")
	if err := c.node.RunKubeadm(ctx, "join", config, t.software.Images, report, after); err != nil {
		return err
	}
	if err := c.node.Finish(ctx); err != nil {
		return err
	}
	report(initv1.Phase_PHASE_DONE, "this machine is a node")
	return nil
}
