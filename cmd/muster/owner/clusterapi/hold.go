package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/internal/printable"
)

// RolloutLease is the Lease in [Namespace] of the one rollout that restarts nodes.
const RolloutLease = "muster-rollout"

const (
	// holdLife is the duration of the lease after its last renewal, holdEvery the pause between two renewals.
	holdLife  = 2 * time.Minute
	holdEvery = 20 * time.Second
	// releaseWithin bounds the release of a lease.
	releaseWithin = 5 * time.Second
)

// HeldError is returned if another program holds the lease.
type HeldError struct {
	// By is the holder, in printable characters. Since is the time at which the holder took the lease, Until its expiry
	// without a renewal, both by the API server's clock.
	By           string
	Since, Until time.Time
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("another rollout restarts nodes: that of %s, since %s", e.By, e.Since.Local().Format(time.DateTime))
}

// holderOf returns the holder of a lease at the given time; nil if there is none, or the lease has expired.
func holderOf(l *coordinationv1.Lease, now time.Time) *HeldError {
	s := l.Spec
	if s.HolderIdentity == nil || *s.HolderIdentity == "" {
		return nil
	}
	out := &HeldError{By: printable.ASCII(*s.HolderIdentity, maxWhy)}
	if s.AcquireTime != nil {
		out.Since = s.AcquireTime.Time
	}
	if s.RenewTime != nil && s.LeaseDurationSeconds != nil {
		if out.Until = s.RenewTime.Add(time.Duration(*s.LeaseDurationSeconds) * time.Second); now.After(out.Until) {
			return nil
		}
	}
	return out
}

// Hold takes the lease of rollouts, and renews it until end is called, which releases it. The returned context ends if another program takes the
// lease meanwhile (the cause is a [HeldError]), or if it could not be renewed for holdLife, because another program may hold it then.
func (c *Client) Hold(ctx context.Context, by string) (held context.Context, end func(), err error) {
	return c.hold(ctx, by, holdEvery)
}

func (c *Client) hold(ctx context.Context, by string, every time.Duration) (held context.Context, end func(), err error) {
	if err := c.take(ctx, by); err != nil {
		return nil, nil, err
	}
	held, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		renewed := time.Now()
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-held.Done():
				return
			case <-t.C:
			}
			try, stop := context.WithTimeout(held, holdEvery)
			err := c.take(try, by)
			stop()
			switch _, other := errors.AsType[*HeldError](err); {
			case err == nil:
				renewed = time.Now()
			case other, time.Since(renewed) > holdLife:
				cancel(fmt.Errorf("the lease %s/%s of rollouts is lost: %w", Namespace, RolloutLease, err))
				return
			}
		}
	}()
	return held, func() {
		cancel(nil)
		<-done
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), releaseWithin)
		defer stop()
		_ = c.giveBack(ctx, by) // otherwise it expires
	}, nil
}

// take takes or renews the lease. It returns a [HeldError] if another program holds it.
func (c *Client) take(ctx context.Context, by string) error {
	return once(ctx, func(ctx context.Context) error {
		now, err := c.serverTime(ctx)
		if err != nil {
			return err
		}
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: RolloutLease}}
		err = c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: RolloutLease}, l)
		absent := Absent(err)
		if err != nil && !absent {
			return err
		}
		has := holderOf(l, now)
		if has != nil && *l.Spec.HolderIdentity != by {
			return has
		}
		l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds, l.Spec.RenewTime = &by, new(int32(holdLife/time.Second)), new(metav1.NewMicroTime(now))
		if has == nil {
			l.Spec.AcquireTime = l.Spec.RenewTime
		}
		if !absent {
			return c.client.Update(ctx, l) // a conflict is tried again
		}
		if err := c.client.Create(ctx, l); apierrors.IsAlreadyExists(err) {
			return errors.Join(errPending, err)
		} else if err != nil {
			return err
		}
		return nil
	})
}

// giveBack releases the lease.
func (c *Client) giveBack(ctx context.Context, by string) error {
	return once(ctx, func(ctx context.Context) error {
		l := &coordinationv1.Lease{}
		if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: RolloutLease}, l); err != nil {
			return err
		}
		if h := l.Spec.HolderIdentity; h == nil || *h != by {
			return nil
		}
		l.Spec.HolderIdentity = nil
		return c.client.Update(ctx, l)
	})
}
