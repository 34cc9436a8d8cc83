package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/seek"
	"github.com/muster-k8s/muster/trust/attest"
)

// errLostRace ends the join loop: the machine belongs to an init.
var errLostRace = errors.New("an init has taken the node lock")

// joinLoop tries to join until the machine is a node, an init has taken the lock
// (errLostRace) or ctx ends.
func (b *Bootstrapper) joinLoop(ctx context.Context) error {
	// B2: an init that wins ends waits and dials at once. A ticket that was asked for is
	// waited for all the same, so that it can be given back.
	racing, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	over := make(chan struct{})
	defer close(over)
	b.work.Go(func() {
		select {
		case <-b.lock.taken:
			if b.lock.record().Kind.ByOwner() {
				lost(errLostRace)
			}
		case <-over:
		}
	})
	pauses := seek.NewPauses(b.cfg.Timing.RetryMin, b.cfg.Timing.RetryMax)
	t := &joinTry{}
	for {
		failed, err := b.joinOnce(ctx, racing, t)
		switch {
		case errors.Is(context.Cause(racing), errLostRace) || errors.Is(err, errLostRace):
			return errLostRace
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			b.metrics.joins.WithLabelValues(attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)).Inc()
			return nil
		}
		if failed {
			reason := attest.ReasonName(seek.ReasonOf(err))
			b.metrics.joins.WithLabelValues(reason).Inc()
			b.tries.Refused(err)
			b.log.WarnContext(ctx, "not joined yet", "reason", reason, "err", err, "remedy", rpc.RemedyFrom(err), "retry_after", rpc.RetryAfterFrom(err).String())
		}
		wait := pauses.Next(err)
		b.tries.Wait(wait)
		b.cfg.Console.Waits(t.wait(err, wait))
		if err := retry.Wait(racing, wait); errors.Is(err, errLostRace) {
			return errLostRace
		} else if err != nil {
			return ctx.Err()
		}
	}
}

// joinTry is what one try to join leaves to the next, and to the console.
type joinTry struct {
	order []string // endpoints, those that failed last
	by    string   // who answered; empty if nobody did
	init  bool     // whether the metadata allow an init
}

// wait says what the machine waits for after the try.
func (t *joinTry) wait(err error, next time.Duration) console.Wait {
	w := console.Wait{For: "waiting to join a cluster", Err: err, By: t.by, Asked: t.order, Next: next}
	if t.init {
		w.Also = "`muster init` can make it the first of a new one"
	}
	return w
}

// joinOnce makes one try. failed is false if there was nobody to ask.
func (b *Bootstrapper) joinOnce(ctx, racing context.Context, t *joinTry) (failed bool, err error) {
	tell := func(phase initv1.Phase, text string) {
		b.log.InfoContext(ctx, "progress", "phase", phase.String(), "text", text)
		if phase > initv1.Phase_PHASE_WAITING { // before, the line would come with each try
			b.cfg.Console.Say(text)
		}
	}
	t.by = ""
	if rec := b.lock.record(); rec.Step >= journal.StepKubeadmRan {
		return true, namedDisk(b.finish(ctx)) // nothing but this was left when the machine went down
	}
	if err := b.revive(ctx); err != nil {
		return true, err
	}
	meta, err := b.cfg.Metadata()
	if err != nil {
		return true, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	t.order, t.init = seek.Merge(t.order, meta.JoinEndpoints), meta.InitSecretHash != nil
	b.tries.Begin(t.order)
	if len(t.order) == 0 {
		return false, seek.ErrNobody
	}
	endpoint, first, err := seek.Race(racing, t.order, b.cfg.Timing.Stagger, b.cfg.Timing.Dial)
	if err != nil {
		return true, fmt.Errorf("%w: %w", seek.ErrUnreachable, err)
	}
	defer first.Close()
	t.by = endpoint
	if err := b.joinBy(ctx, endpoint, first, meta, tell); err != nil {
		t.order = seek.Demote(t.order, endpoint)
		return true, fmt.Errorf("%s: %w", endpoint, namedDisk(err))
	}
	return true, nil
}

// joinBy asks one joinservice for a ticket and uses it.
func (b *Bootstrapper) joinBy(ctx context.Context, endpoint string, first net.Conn, meta *metadata.Machine, tell say) error {
	client, err := b.open(ctx, endpoint, first)
	if err != nil {
		return err
	}
	defer client.Close()

	k, err := newNodeKeys()
	if err != nil {
		return err
	}
	req, err := askFor(meta, b.cfg.Image.StateDisk.Mode, b.diskID, k)
	if err != nil {
		return err
	}
	secret, err := bootsecret.Load(b.cfg.Root)
	if err != nil {
		return err
	}
	req.BootSecret = secret.Expose() // J11
	ask, cancel := context.WithTimeout(ctx, b.cfg.Timing.Ticket)
	defer cancel()
	tell(initv1.Phase_PHASE_WAITING, "asking "+endpoint+" for a ticket")
	resp, err := client.IssueJoinTicket(ask, req)
	if err != nil {
		return err
	}
	t, err := parseTicket(resp, k, meta, b.cfg.Now())
	if err == nil {
		err = client.Belongs(t.clusterID)
	}
	if err != nil {
		b.giveBack(ctx, client, resp.GetTicketId())
		return err
	}
	err = b.lock.acquire(ctx, journal.Record{
		Kind: journal.KindJoin, ClusterID: t.clusterID[:], Ticket: t.id, NodeName: meta.Name, DiskID: b.diskID.String(), OwnerKey: journal.Hex(b.ownerKey),
	})
	if err != nil {
		// B2: the ticket of a machine that won't use it is undone.
		if b.lock.record().Kind != journal.KindJoin {
			b.giveBack(ctx, client, t.id)
		}
		if b.lock.record().Kind.ByOwner() {
			return fmt.Errorf("%w: %w", errLostRace, err)
		}
		return err
	}
	tell(initv1.Phase_PHASE_LOCKED, fmt.Sprintf("the machine is locked to cluster %x", t.clusterID[:8]))
	defer b.takeTurn(ctx, t, client, meta.JoinEndpoints)()
	return b.useTicket(ctx, t, meta, tell)
}

// giveBack returns a ticket; what goes wrong then is for the log, since joinservice also
// undoes tickets that nobody used.
func (b *Bootstrapper) giveBack(ctx context.Context, client joinv1connect.JoinServiceClient, id []byte) {
	// Also when the machine is being shut down.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.cfg.Timing.Dial)
	defer cancel()
	if _, err := client.ReturnJoinTicket(ctx, &joinv1.ReturnJoinTicketRequest{TicketId: id}); err != nil {
		b.log.WarnContext(ctx, "can't give the ticket back", "err", err)
		return
	}
	b.log.InfoContext(ctx, "ticket given back")
}

// useTicket is the order of a join after the lock. Each step is safe to take again with
// another ticket of the same cluster (B3).
func (b *Bootstrapper) useTicket(ctx context.Context, t *ticket, meta *metadata.Machine, tell say) error {
	if err := b.openDisk(ctx, t.diskKey, tell); err != nil {
		return err
	}
	if err := b.install(ctx, t.software, t.controlPlane, tell); err != nil {
		return err
	}
	before, after := stayOut, stayOut
	if t.controlPlane {
		before = func(ctx context.Context) error { return b.leaveEtcd(ctx, t, meta, tell, true) }
		after = func(ctx context.Context) error { return b.leaveEtcd(ctx, t, meta, tell, false) }
	}
	if err := b.clean(ctx, tell, before); err != nil {
		return err
	}
	// Noted first: what is placed now must be cleaned up if it is not used.
	if err := b.lock.advance(journal.StepConfigured); err != nil {
		return err
	}
	if err := b.place(t); err != nil {
		return err
	}
	config, err := kubeadm.Join(b.image, nodeOf(meta), t.controlPlane, t.token)
	if err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_CONFIGURED, "certificates and configuration are in place")
	if err := b.runKubeadm(ctx, "join", config, t.software.images, tell, after); err != nil {
		return err
	}
	if err := b.finish(ctx); err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_DONE, "this machine is a node")
	return nil
}
