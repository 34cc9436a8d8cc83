// Package joinlease keeps the Lease that lets machines become control planes one after another, since etcd takes one new member at a time (J8).
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

// writeAttempts bounds how often a write is repeated that met another one.
const writeAttempts = 4

const (
	// Name is the Lease that gives machines their turn to become a control plane, one after
	// another: etcd takes one new member at a time. A control plane that renews its certificates holds it as well.
	Name = clusterinfo.ControlPlaneLease
	// Life is how long a turn lasts that is not renewed.
	Life = 40 * time.Second

	// maxLife bounds what a Lease that somebody else wrote can make everybody wait.
	maxLife = 10 * time.Minute
	// retryTurn is what a machine is told to wait that is not next: short, so that of several that
	// wait one begins soon after another has ended.
	retryLease = 3 * time.Second
	// ticketAnnotation names the ticket that the turn came with.
	ticketAnnotation = "muster.dev/ticket"
)

// leaseView remembers when this process first saw the Lease as it is. Whether a turn has run out is
// measured from then, by our clock alone: the times in the object were written by another machine's
// clock, which may be hours off.
type leaseView struct {
	mu      sync.Mutex
	version string
	since   time.Time
}

// age says for how long l has not changed, as far as was seen.
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

// Acquisition is the join Lease that is free for the machine that asked.
type Acquisition struct {
	manager        *Manager
	lease          *coordinationv1.Lease // as it was read; without a resource version: there is none
	holder, ticket string
	abandoned      string // who let it run out
}

// Check returns whether the machine may have the join Lease; nothing is written
// until [Acquisition.Take]. It returns CONTROL_PLANE_BUSY if another machine has it. The machine that has it may have it
// again, with another ticket.
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
		return nil, attest.RefuseFor(retryLease, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "%s is becoming a control plane, or renews its certificates; its turn was renewed %s ago and ends after %s without", holder, age.Round(time.Second), life)
	}
	t.abandoned = holder
	return t, nil
}

// Take takes the turn by compare-and-swap: CONTROL_PLANE_BUSY if another machine was faster.
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
		return attest.RefuseFor(retryLease, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "another machine took the turn at the same time")
	default:
		return clusterview.Unavailable("write Lease "+Name, err)
	}
	if t.abandoned != "" {
		t.manager.log.WarnContext(ctx, "a machine's turn to become a control plane has run out and goes to another", "lease", Name, "from", t.abandoned, "to", t.holder)
	}
	t.lease = l
	return nil
}

// Release gives a turn back that came to nothing. It goes on when ctx has ended; a turn that cannot
// be given back runs out.
func (t *Acquisition) Release(ctx context.Context) {
	ctx, cancel := clusterview.Outlive(ctx)
	defer cancel()
	l := t.lease.DeepCopy()
	free(l)
	if err := t.manager.cluster.Client.Update(ctx, l); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		t.manager.log.WarnContext(ctx, "a turn to become a control plane could not be given back; it runs out", "lease", Name, "holder", t.holder, "after", Life.String(), "err", err)
	}
}

// Renew prolongs the machine's turn by [Life], and gives its node's name. TICKET_UNKNOWN if
// it has none with that ticket, CONTROL_PLANE_BUSY if another machine has it by now.
func (k *Manager) Renew(ctx context.Context, m attest.MachineID, ticket string) (node string, err error) {
	// Who was forgotten or banned since keeps no turn: it runs out.
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

// End ends the machine's turn: the next machine may have it at once. Its errors are those of
// [Manager.Renew].
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
			return "", attest.Refuse(attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "the turn is that of machine %s by now", holder)
		case !mine || l.Annotations[ticketAnnotation] != ticket:
			return node, attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "machine %s has no turn with such a ticket", m)
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

// free is how client-go gives a lease back, too.
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

// nodeOf says whether a holder is the machine, and under which node name.
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
