package enroll

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// Rejoining is the decision that a machine may have the key of its disk, with its enrollment as it was then.
type Rejoining struct {
	enrollments *Enrollments
	node        *v1alpha1.AttestedNode
	claim       Claim
	// Salt is the disk's, from its AttestedDisk.
	Salt Salt
}

// AwaitPreviousBootEnd waits until it is known that the machine's previous boot has ended, at most about 20 s, longer if the API
// server is slow. Errors are refusals: MACHINE_CLONED, BUSY, API_UNAVAILABLE.
func (r *Rejoining) AwaitPreviousBootEnd(ctx context.Context) error {
	return r.enrollments.awaitPreviousBootEnd(ctx, r.node, r.claim.Machine, &r.claim.Boot)
}

// Record records the boot, by compare-and-swap: of two machines with the same TPM one gets the key (J11). It fails after a
// ban or another change of the enrollment. Errors are refusals.
func (r *Rejoining) Record(ctx context.Context) error {
	if r.claim.Boot.previousEnded == nil {
		return clusterview.Unavailable("record the boot of node "+r.node.Name, errors.New("it was not checked whether the previous boot has ended"))
	}
	return r.enrollments.WriteStatus(ctx, r.node, func(s *v1alpha1.AttestedNodeStatus) error {
		return r.claim.Boot.record(r.node, s, r.enrollments.state.HasNode(r.node.Name), true)
	})
}

// Rejoin checks that the claim, whose addresses are ignored, matches the machine's enrollment. It reads the enrollment from
// the API, so that after the owner has given a name to another machine, no replica opens a disk for the old one. A released
// enrollment counts while it is held for its machine, which could get the same key by joining. A disk without an
// AttestedDisk has no salt, so no key for it can be derived. Errors are refusals: NOT_ENROLLED, NAME_TAKEN, NAME_MISMATCH,
// BANNED, ROLE_REFUSED, DISK_MISMATCH, DISK_ERASED, MACHINE_CLONED, CLOCK_WENT_BACK, VERDICT_OLD, API_UNAVAILABLE. It
// changes nothing: [Rejoining.Record] must be called before the key is sent.
func (es *Enrollments) Rejoin(ctx context.Context, c Claim) (*Rejoining, error) {
	own, err := es.readTicketed(ctx, c.Node)
	if err != nil {
		return nil, err
	}
	if own == nil || own.Spec.MachineID != c.Machine.String() {
		return nil, es.refuseUnenrolled(c, own)
	}
	if own.Spec.DiskID == "" && !own.ShutOut() { // J2: its disk is not known, so it has none
		return nil, attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine is enrolled, but has not joined with a disk yet; it asks for the key of %s", c.Disk)
	}
	if err := checkOwn(c, own); err != nil { // J2
		return nil, err
	}
	for _, other := range es.state.Cluster.Nodes.ByDisk(c.Disk) { // J2
		if other.Name != c.Node && !es.Expired(other) && !es.ownOutranks(own, other) {
			return nil, attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is also enrolled to node %q", c.Disk, other.Name)
		}
	}
	salt, held, err := es.readDisk(ctx, c) // J2
	if err == nil && !held {               // K4: the key of a new salt would open nothing
		err = attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "disk %s has no AttestedDisk, so its salt is gone; your known.json may have it", c.Disk)
	}
	if err != nil {
		return nil, err
	}
	return &Rejoining{enrollments: es, node: own, claim: c, Salt: salt}, nil
}

// readTicketed reads the enrollment of a name from the API; nil if there is none with an issued ticket.
func (es *Enrollments) readTicketed(ctx context.Context, node string) (*v1alpha1.AttestedNode, error) {
	n := &v1alpha1.AttestedNode{}
	err := es.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: node}, n)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil //nolint:nilnil // none is no error
	case err != nil:
		return nil, clusterview.Unavailable("read AttestedNode "+node, err)
	case es.Expired(n) || es.Unfinished(n):
		return nil, nil //nolint:nilnil // as above
	}
	return n, nil
}

// refuseUnenrolled refuses a machine that is not enrolled under the name; own is the enrollment of the name, or nil.
func (es *Enrollments) refuseUnenrolled(c Claim, own *v1alpha1.AttestedNode) error {
	for _, other := range es.state.Cluster.Nodes.ByMachine(c.Machine) {
		if other.Name != c.Node && !es.Expired(other) && !es.Unfinished(other) {
			return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "the machine is enrolled as %q, and asks as %q", other.Name, c.Node)
		}
	}
	if own != nil { // J4
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "node name %q is enrolled to machine %s", c.Node, own.Spec.MachineID)
	}
	return attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "neither machine %s nor node %q is enrolled: to let it join as new, erase its state disk", c.Machine, c.Node)
}
