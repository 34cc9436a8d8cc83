package enroll

import (
	"cmp"
	"context"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxWatch bounds how long a Lease with a long duration is watched: less than the maximum age of evidence at its use.
	maxWatch = 45 * time.Second
	// leasePoll is the pause between two reads. A shorter watch has shorter ones, but none below leastPoll.
	leasePoll, leastPoll = time.Second, 50 * time.Millisecond
	// maxLeaseWaits bounds how many machines wait at the same time.
	maxLeaseWaits = 64
	// retryWait is the pause that is sent to a machine if no such place is free.
	retryWait = 5 * time.Second
	// writesLease is the Lease in Muster's namespace of [Enrollments.awaitWrites]. Nobody holds it.
	writesLease = "muster-boot-watch"
)

// LeaseTimings are the waits for kubelets' Leases, which distinguish a running machine from one that has stopped (J11).
type LeaseTimings struct {
	// First is the maximum time from a machine's ticket, or from the key of its disk, to the first Lease of its kubelet:
	// until then no later boot of it is accepted. 0: one is accepted at once.
	First time.Duration
	// Watch is how long at least the Lease of a node is watched after its machine has booted again: longer than its
	// kubelet's renewal interval, which is 10 s by default. A Lease with a longer duration is watched longer.
	Watch time.Duration
}

// DefaultLeaseTimings fit kubelets with their default settings.
var DefaultLeaseTimings = LeaseTimings{First: 2 * time.Minute, Watch: 15 * time.Second}

// leaseWaits are the machines whose earlier boot is being checked, each at most once: an attacker with a copy of one
// machine must not take the places of others.
type leaseWaits struct {
	mu  sync.Mutex
	set map[attest.MachineID]bool
}

func (w *leaseWaits) begin(m attest.MachineID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.set[m] || len(w.set) >= maxLeaseWaits {
		return false
	}
	if w.set == nil {
		w.set = map[attest.MachineID]bool{}
	}
	w.set[m] = true
	return true
}

func (w *leaseWaits) end(m attest.MachineID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.set, m)
}

// AwaitPreviousBootEnd waits until it is known that the machine's previous boot has ended, and returns the claim with that result.
// It is for a machine that asks for a ticket, before anything is written. Errors are those of [Rejoining.AwaitPreviousBootEnd] and
// the refusals of the enrollment.
func (es *Enrollments) AwaitPreviousBootEnd(ctx context.Context, c Claim) (Claim, error) {
	if es.state.Cluster.Nodes.ByName(c.Node) == nil {
		return c, nil // with an outdated view, recording the boot fails, and the machine asks again
	}
	n := &v1alpha1.AttestedNode{}
	if err := es.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: c.Node}, n); apierrors.IsNotFound(err) {
		return c, nil
	} else if err != nil {
		return c, clusterview.Unavailable("read AttestedNode "+c.Node, err)
	}
	if n.Spec.MachineID != c.Machine.String() || es.Expired(n) {
		return c, nil // the write of the claim checks that
	}
	err := es.awaitPreviousBootEnd(ctx, n, c.Machine, &c.Boot)
	return c, err
}

// awaitPreviousBootEnd checks that the machine's boot before b has ended: while its kubelet still renews the node's Lease, the machine
// that shows b is a copy (J11). Only the node's kubelet writes that Lease. A missing Lease is watched too: if it was
// deleted, a running kubelet creates it again at its next renewal, as long as its Node exists.
//
// A boot that is already recorded is checked too if that was not done before: re-attestation records a later boot without
// this check.
func (es *Enrollments) awaitPreviousBootEnd(ctx context.Context, n *v1alpha1.AttestedNode, m attest.MachineID, b *Boot) error {
	later, err := checkBoot(n, &n.Status, *b)
	if err != nil {
		return err
	}
	last := idOf(n.Status.Boot)
	b.previousEnded = &last
	lease, slow, err := es.nodeLease(ctx, n.Name)
	if err != nil {
		return err
	}
	if !previousMayRun(&n.Status, lease != nil || es.state.HasNode(n.Name), later) {
		return nil
	}
	began, previous := time.Now(), n.Status.Boot
	if !later && previous.EarlierSince != nil { // b is recorded already
		previous = &v1alpha1.Boot{Since: *previous.EarlierSince}
	}
	if left := es.startupGraceLeft(previous, lease, began); left > 0 {
		return attest.RefuseFor(left, attestv1.Reason_REASON_BUSY, "%s of node %s: the boot at %s got its key or ticket, or attested, at %s, and its kubelet has not come yet. If that was this machine, and it went down again, it is let in after %s; if not, one of the two is a copy",
			b, n.Name, cmp.Or(previous.Address, "an unknown address"), state.UTC(previous.Since.Time), left.Round(time.Second))
	}
	if !es.waits.begin(m) {
		return attest.RefuseFor(retryWait, attestv1.Reason_REASON_BUSY, "whether an earlier boot of node %s still runs is being looked at, or that of %d other machines", n.Name, maxLeaseWaits)
	}
	defer es.waits.end(m)
	es.state.Log.InfoContext(ctx, "a machine connects in a later boot; checking whether the kubelet of its previous boot still renews the Lease", "node", n.Name, "machine", m.String(), "boot", b.String())
	tick := time.NewTicker(es.leases.poll())
	defer tick.Stop()
	written := false // what the kubelet had written when the watch was over is in etcd
	for {
		select {
		case <-ctx.Done():
			return clusterview.Unavailable("read Lease "+n.Name, ctx.Err())
		case <-tick.C:
		}
		asked := time.Since(began)
		now, took, err := es.nodeLease(ctx, n.Name)
		switch slow = max(slow, took); {
		case err != nil:
			return err
		case now != nil && (lease == nil || now.UID != lease.UID || !now.Spec.RenewTime.Equal(lease.Spec.RenewTime)):
			return refuseClone(n, n.Status.Boot, *b, "a later boot can't be true while the kubelet of the last one still renews its Lease")
		case asked <= es.leases.watch(lease)+2*slow:
			written = false // a slow read makes the watch longer: what is written until its end counts too
		case written:
			return nil
		default: // the Lease is read once more after that
			if err := es.awaitWrites(ctx); err != nil {
				return err
			}
			written = true
		}
	}
}

// awaitWrites returns when etcd has committed the writes that it had got before, such as a kubelet's of its Lease: if its disk is slow, they take much longer
// than reads. It creates a Lease that exists. etcd orders that among the writes, since it does not know before that nothing is to be written.
func (es *Enrollments) awaitWrites(ctx context.Context) error {
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: writesLease}}
	if err := es.state.Cluster.Client.Create(ctx, l); err != nil && !apierrors.IsAlreadyExists(err) {
		return clusterview.Unavailable("create Lease "+writesLease, err)
	}
	return nil
}

// watch returns how long a Lease is watched: one and a half times the kubelet's renewal interval, which is a quarter of the
// Lease's duration (plus any delay of the API server). The time of the last write is not used: it is by the clock of
// another machine.
func (l LeaseTimings) watch(lease *coordinationv1.Lease) time.Duration {
	if lease == nil || lease.Spec.LeaseDurationSeconds == nil {
		return l.Watch
	}
	return max(l.Watch, min(time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second*3/8, maxWatch))
}

// poll returns the pause between two reads of a Lease: four or more of them fit into a watch.
func (l LeaseTimings) poll() time.Duration { return min(leasePoll, max(l.Watch/4, leastPoll)) }

// startupGraceLeft returns how long no boot later than the last one is accepted, since the last one's kubelet has not had the time
// to write its Lease (J11).
func (es *Enrollments) startupGraceLeft(last *v1alpha1.Boot, lease *coordinationv1.Lease, now time.Time) time.Duration {
	if last == nil || lease != nil && writtenAt(lease, now).After(last.Since.Time) {
		return 0
	}
	return es.leases.First - now.Sub(last.Since.Time)
}

// nodeLease reads a node's Lease, and returns how long that took; the Lease is nil if there is none.
func (es *Enrollments) nodeLease(ctx context.Context, node string) (*coordinationv1.Lease, time.Duration, error) {
	l, began := &coordinationv1.Lease{}, time.Now()
	err := es.state.Cluster.Client.Get(ctx, client.ObjectKey{Namespace: corev1.NamespaceNodeLease, Name: node}, l)
	switch took := time.Since(began); {
	case apierrors.IsNotFound(err):
		return nil, took, nil
	case err != nil:
		return nil, took, clusterview.Unavailable("read Lease "+node, err)
	default:
		return l, took, nil
	}
}

// writtenAt returns when the Lease was last written, by the API server's clock: the time in its spec is the node's own,
// which may be wrong. A Lease without that time counts as written now.
func writtenAt(l *coordinationv1.Lease, now time.Time) time.Time {
	var last *metav1.Time
	for _, f := range l.ManagedFields {
		if f.Time != nil && (last == nil || f.Time.After(last.Time)) {
			last = f.Time
		}
	}
	if last == nil {
		return now
	}
	return last.Time
}
