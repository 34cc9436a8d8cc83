// Package joinlease manages the Lease that lets machines become control planes one after another, since etcd accepts one
// new member at a time (J8).
package joinlease

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// writeAttempts bounds the attempts of a write that conflicts with another one.
const writeAttempts = 4

const (
	// Name is the Lease that lets machines become control planes one after another: etcd accepts one new member at a time.
	// A control plane holds it also while it renews its certificates.
	Name = clusterinfo.ControlPlaneLease
	// Life is the duration of the Lease after each renewal.
	Life = 40 * time.Second

	// maxLife bounds how long a Lease that another program wrote can make machines wait.
	maxLife = 10 * time.Minute
	// retryLease is the pause that is sent to a machine that must wait: short, so that of several that wait one starts soon
	// after another has ended.
	retryLease = 3 * time.Second
	// ticketAnnotation names the ticket of the holder.
	ticketAnnotation = "muster.dev/ticket"
)

// leaseView stores when this process first saw the Lease as it is. Whether the Lease has expired is measured from then, by
// this process's clock only: the times in the object are by another machine's clock, which may be hours off.
type leaseView struct {
	mu      sync.Mutex
	version string
	since   time.Time
}

// age returns how long l has not changed, as far as this process has seen.
func (v *leaseView) age(l *coordinationv1.Lease, now time.Time) time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.version != l.ResourceVersion {
		v.version, v.since = l.ResourceVersion, now
	}
	return now.Sub(v.since)
}

// Manager reads and writes the cluster's join Lease.
type Manager struct {
	cluster *clusterview.Cluster
	log     *slog.Logger
	view    leaseView
}

// New returns a Manager.
func New(c *clusterview.Cluster, log *slog.Logger) *Manager { return &Manager{cluster: c, log: log} }

// Acquisition is the result of a check that the join Lease is free for the machine that asked.
type Acquisition struct {
	manager        *Manager
	lease          *coordinationv1.Lease // as it was read; without a resource version if it does not exist
	holder, ticket string
	abandoned      string // the holder that let it expire
}

// Check returns an Acquisition if the machine may have the join Lease, and CONTROL_PLANE_BUSY if another machine has it. It
// writes nothing; [Acquisition.Take] does. The holder may have the Lease again with another ticket.
func (k *Manager) Check(ctx context.Context, m attest.MachineID, node, ticket string) (*Acquisition, error) {
	t := &Acquisition{manager: k, holder: m.String() + "/" + node, ticket: ticket}
	l, err := k.lease(ctx)
	if apierrors.IsNotFound(err) {
		t.lease = newLease()
		return t, nil
	}
	if err != nil {
		return nil, clusterview.Unavailable("read Lease "+Name, err)
	}
	t.lease = l
	holder := holderOf(l)
	if _, mine := nodeOf(holder, m); mine || holder == "" {
		return t, nil
	}
	age, life := k.view.age(l, time.Now()), lifeOf(l)
	if age <= life { // J8
		return nil, attest.RefuseFor(retryLease, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "%s is becoming a control plane, or renews its certificates; its join Lease was renewed %s ago and expires after %s without renewal", holder, age.Round(time.Second), life)
	}
	t.abandoned = holder
	return t, nil
}

// Take acquires the Lease by compare-and-swap: CONTROL_PLANE_BUSY if another machine was first.
func (t *Acquisition) Take(ctx context.Context) error {
	l, now := t.lease.DeepCopy(), metav1.NowMicro()
	if holderOf(l) != t.holder {
		l.Spec.LeaseTransitions = new(transitions(l) + 1)
		l.Spec.AcquireTime = &now
	}
	l.Spec.HolderIdentity, l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = &t.holder, &now, new(int32(Life/time.Second))
	metav1.SetMetaDataAnnotation(&l.ObjectMeta, ticketAnnotation, t.ticket)
	var err error
	if l.ResourceVersion == "" {
		err = t.manager.cluster.Client.Create(ctx, l)
	} else {
		err = t.manager.cluster.Client.Update(ctx, l) // J8: a compare-and-swap
	}
	switch {
	case err == nil:
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
		return attest.RefuseFor(retryLease, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "another machine took the join Lease at the same time")
	default:
		return clusterview.Unavailable("write Lease "+Name, err)
	}
	if t.abandoned != "" {
		t.manager.log.WarnContext(ctx, "a join Lease has expired and another machine takes it", "lease", Name, "from", t.abandoned, "to", t.holder)
	}
	t.lease = l
	return nil
}

// Release releases a Lease that is not used. It also works after ctx has ended; a Lease that cannot be released expires.
func (t *Acquisition) Release(ctx context.Context) {
	ctx, cancel := clusterview.Outlive(ctx)
	defer cancel()
	l := t.lease.DeepCopy()
	free(l)
	if err := t.manager.cluster.Client.Update(ctx, l); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		t.manager.log.WarnContext(ctx, "a join Lease could not be released; it expires", "lease", Name, "holder", t.holder, "after", Life.String(), "err", err)
	}
}

// Renew extends the machine's Lease by [Life], and returns its node's name. It returns TICKET_UNKNOWN if the machine has no
// Lease with that ticket, CONTROL_PLANE_BUSY if another machine has it now.
func (k *Manager) Renew(ctx context.Context, m attest.MachineID, ticket string) (node string, err error) {
	// If the machine was removed or banned since, it cannot renew the Lease, which expires.
	mine := func(n *v1alpha1.AttestedNode) bool {
		return n.Spec.MachineID == m.String() && n.Spec.Role == v1alpha1.RoleControlPlane && !n.ShutOut()
	}
	if !slices.ContainsFunc(k.cluster.Nodes.ByMachine(m), mine) {
		return "", attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "machine %s is enrolled as no control plane", m)
	}
	return k.update(ctx, m, ticket, func(l *coordinationv1.Lease) {
		l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = new(metav1.NowMicro()), new(int32(Life/time.Second))
	})
}

// End releases the machine's Lease: the next machine may have it at once. Its errors are those of [Manager.Renew].
func (k *Manager) End(ctx context.Context, m attest.MachineID, ticket string) (node string, err error) {
	return k.update(ctx, m, ticket, free)
}

func (k *Manager) update(ctx context.Context, m attest.MachineID, ticket string, change func(*coordinationv1.Lease)) (string, error) {
	for range writeAttempts {
		l, err := k.lease(ctx)
		if apierrors.IsNotFound(err) {
			return "", attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "there is no Lease %s", Name)
		}
		if err != nil {
			return "", clusterview.Unavailable("read Lease "+Name, err)
		}
		holder := holderOf(l)
		node, mine := nodeOf(holder, m)
		switch {
		case !mine && holder != "":
			return "", attest.Refuse(attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "machine %s has the join Lease now", holder)
		case !mine || l.Annotations[ticketAnnotation] != ticket:
			return node, attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "machine %s has no join Lease with this ticket", m)
		}
		change(l)
		if err = k.cluster.Client.Update(ctx, l); err == nil {
			return node, nil
		}
		if !apierrors.IsConflict(err) {
			return node, clusterview.Unavailable("write Lease "+Name, err)
		}
	}
	return "", clusterview.Unavailable("write Lease "+Name, fmt.Errorf("it changed %d times meanwhile", writeAttempts))
}

func (k *Manager) lease(ctx context.Context) (*coordinationv1.Lease, error) {
	l := newLease()
	return l, k.cluster.Client.Get(ctx, client.ObjectKeyFromObject(l), l)
}

func newLease() *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: Name}}
}

// free clears the Lease as client-go does.
func free(l *coordinationv1.Lease) {
	l.Spec.HolderIdentity = nil
	delete(l.Annotations, ticketAnnotation)
}

func holderOf(l *coordinationv1.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

// nodeOf reports whether a holder is the machine, and returns its node name.
func nodeOf(holder string, m attest.MachineID) (string, bool) {
	prefix := m.String() + "/"
	if len(holder) <= len(prefix) || holder[:len(prefix)] != prefix {
		return "", false
	}
	return holder[len(prefix):], true
}

func lifeOf(l *coordinationv1.Lease) time.Duration {
	if l.Spec.LeaseDurationSeconds == nil || *l.Spec.LeaseDurationSeconds <= 0 {
		return Life
	}
	return min(time.Duration(*l.Spec.LeaseDurationSeconds)*time.Second, maxLife)
}

func transitions(l *coordinationv1.Lease) int32 {
	if l.Spec.LeaseTransitions == nil {
		return 0
	}
	return *l.Spec.LeaseTransitions
}
