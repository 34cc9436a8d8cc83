package joinclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
)

// joinLease is the lease by which this machine becomes a control plane. The machine renews it.
type joinLease struct {
	node   *provision.Node
	ticket []byte
	life   time.Duration // as in the last answer of the joinservice

	order discovery.Order
	over  *discovery.Session // nil: to be opened
	own   bool               // this type has to close over
}

// keepLease renews the lease that t came with until end is called: first over s, and if that fails over a connection of its own to any of the endpoints.
// The join itself moves API servers and etcd, and the joinservice that issued the ticket may be gone. A lost lease is logged as a warning and does not
// stop the join: stopping kubeadm in the middle would do more harm than a second joiner, which etcd refuses while a member is being added.
//
// end ends the lease, so that the next machine need not wait until it expires.
func (c *Client) keepLease(ctx context.Context, t *ticket, s *discovery.Session, order discovery.Order) (end func()) {
	if !t.controlPlane {
		return func() {}
	}
	k := &joinLease{node: c.node, ticket: t.id, life: t.leaseLife, order: order, over: s}
	k.order.Served(s.Endpoint)
	keep, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { k.keep(keep) }) // J8
	return func() {
		stop()
		wg.Wait()
		if ctx.Err() == nil { // not in a shutdown: the machine continues with its lease, or the lease expires
			k.end(ctx)
		}
		k.hangUp()
	}
}

// keep renews until ctx ends or another machine has the lease.
func (k *joinLease) keep(ctx context.Context) {
	last, warned := time.Now(), false
	pause := retry.Backoff{Min: k.node.Timing.RetryMin, Max: k.life / 8}
	wait := k.between()
	for retry.Wait(ctx, wait) == nil {
		err := k.call(ctx, false)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			last, warned = time.Now(), false
			pause.Reset()
			wait = k.between()
			continue
		case lost(err):
			k.node.Log.WarnContext(ctx, "this machine's join lease was lost; its join continues", "reason", attest.ReasonName(discovery.ReasonOf(err)), "err", err)
			return
		}
		k.node.Log.WarnContext(ctx, "this machine's join lease could not be renewed; trying again", "reason", attest.ReasonName(discovery.ReasonOf(err)), "err", err, "renewed", time.Since(last).Round(time.Second).String()+" ago")
		if !warned && time.Since(last) > k.life {
			warned = true
			k.node.Log.WarnContext(ctx, "this machine's join lease may have been lost: it was not renewed in time; its join continues", "lifetime", k.life.String())
		}
		wait = pause.Next(rpc.RetryAfterFrom(err))
	}
}

// between returns the pause between two renewals.
func (k *joinLease) between() time.Duration { return cmp.Or(k.node.Timing.LeaseRenewal, k.life/3) }

// lost reports whether a joinservice has answered that there is nothing to renew.
func lost(err error) bool {
	r := discovery.ReasonOf(err)
	return r == attestv1.Reason_REASON_TICKET_UNKNOWN || r == attestv1.Reason_REASON_CONTROL_PLANE_BUSY
}

// endAttempts bounds the attempts to end a lease; after that it expires by itself.
const endAttempts = 3

func (k *joinLease) end(ctx context.Context) {
	pause := retry.Backoff{Min: k.node.Timing.RetryMin, Max: k.life / 8}
	var err error
	for range endAttempts {
		if err = k.call(ctx, true); err == nil || lost(err) {
			return
		}
		if retry.Wait(ctx, pause.Next(0)) != nil {
			break
		}
	}
	k.node.Log.WarnContext(ctx, "this machine's join lease could not be ended; it expires by itself", "after", k.life.String(), "err", err)
}

// call renews or ends the lease. A session that failed is not used again.
func (k *joinLease) call(ctx context.Context, done bool) error {
	ctx, cancel := context.WithTimeout(ctx, min(k.node.Timing.Dial, k.life/3))
	defer cancel()
	if k.over == nil {
		if err := k.reopen(ctx); err != nil {
			return err
		}
	}
	resp, err := k.over.RenewJoinLease(ctx, &joinv1.RenewJoinLeaseRequest{TicketId: k.ticket, Done: done})
	if err != nil {
		err = fmt.Errorf("%s: %w", k.over.Endpoint, err)
		k.order.Failed(k.over.Endpoint)
		k.hangUp()
		return err
	}
	if life, ok := leaseLife(resp.GetLifetime()); ok {
		k.life = life
	}
	return nil
}

func (k *joinLease) reopen(ctx context.Context) error {
	if meta, err := k.node.Metadata(); err == nil { // which may have other endpoints by now
		if err := k.order.Update(ctx, meta, nil, k.node.Log); err != nil {
			return err
		}
	}
	if len(k.order.List()) == 0 {
		return discovery.ErrNoJoinservice
	}
	t := k.node.Timing
	endpoint, first, err := discovery.Race(ctx, k.order.List(), t.Stagger, t.Dial)
	if err != nil {
		return errors.Join(discovery.ErrUnreachable, err)
	}
	if k.over, err = k.node.OpenSession(ctx, endpoint, first); err != nil {
		_ = first.Close()
		k.order.Failed(endpoint)
		return err
	}
	k.own = true
	return nil
}

func (k *joinLease) hangUp() {
	if k.own {
		k.over.Close()
	}
	k.over, k.own = nil, false
}
