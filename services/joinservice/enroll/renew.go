package enroll

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/trust/attest"
)

// Renewal is the decision that a machine may have new certificates, with its enrollment as it was then.
type Renewal struct {
	enrollments *Enrollments
	node        *v1alpha1.AttestedNode
}

// BeginRenewal checks that the claim, whose role and disk are ignored, matches the machine's enrollment, and records the
// current verdict on which the certificates will be issued (J7). It reads the enrollment from the API, so that a ban, or a
// name that the owner has just removed, counts at every replica. Errors are refusals: NOT_ENROLLED, NAME_TAKEN,
// NAME_MISMATCH, BANNED, ADDRESS_REFUSED, MACHINE_CLONED, CLOCK_WENT_BACK, VERDICT_OLD, BUSY, API_UNAVAILABLE. It takes at
// most about 20 s if the machine has booted since it was last checked, longer if the API server is slow.
func (es *Enrollments) BeginRenewal(ctx context.Context, c Claim, status v1alpha1.AttestedNodeStatus) (*Renewal, error) {
	own, err := es.readTicketed(ctx, c.Node)
	if err != nil {
		return nil, err
	}
	if own == nil || own.Spec.MachineID != c.Machine.String() { // J1, J4
		return nil, es.refuseUnenrolled(c, own)
	}
	if err := access.CheckShutOut(own); err != nil {
		return nil, err
	}
	switch {
	case own.Status.ReleasedAt != nil: // J4: nothing that is valid longer than the name is held for its machine
		return nil, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "the enrollment of node %q is released", c.Node)
	case own.Status.Ticket == nil && own.Status.LastVerdict == nil:
		return nil, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "node %q has not joined yet: it gets its first certificates with a ticket", c.Node)
	}
	for _, ip := range c.Addresses {
		if !slices.Contains(own.Spec.Addresses, ip.String()) {
			return nil, attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is not in the enrollment of node %q, which has %s", ip, c.Node, strings.Join(own.Spec.Addresses, ", "))
		}
	}
	if err := es.awaitPreviousBootEnd(ctx, own, c.Machine, &c.Boot); err != nil { // J11
		return nil, err
	}
	if err := es.WriteStatus(ctx, own, func(s *v1alpha1.AttestedNodeStatus) error {
		if err := c.Boot.record(own, s, es.state.HasNode(own.Name), true); err != nil { // J11
			return err
		}
		mergeVerdict(s, status)
		return nil
	}); err != nil {
		return nil, err
	}
	return &Renewal{enrollments: es, node: own}, nil
}

// Role is the machine's role by its enrollment.
func (r *Renewal) Role() v1alpha1.Role { return r.node.Spec.Role }

// Allow checks that the machine may still have the certificate, which was signed meanwhile, and lets it write if older ones
// of the node's name are revoked (J4). Errors are refusals.
func (r *Renewal) Allow(ctx context.Context, c *x509.Certificate) error {
	return r.enrollments.list.Allow(ctx, r.node, c)
}
