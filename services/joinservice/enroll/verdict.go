package enroll

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// Reattest records a current verdict on an enrolled machine, whose ID comes from attestation only (J1), with its report of an
// order. It returns the AttestedNode before and after; both are nil if the machine has none, and after is nil if nothing was
// written. Other fields of status are ignored. Errors are refusals: NOT_ENROLLED, BANNED, MACHINE_CLONED, CLOCK_WENT_BACK,
// VERDICT_OLD, API_UNAVAILABLE.
func (es *Enrollments) Reattest(ctx context.Context, m attest.MachineID, boot Boot, status v1alpha1.AttestedNodeStatus) (before, after *v1alpha1.AttestedNode, err error) {
	// Enrollments that a ticket only began do not count; their replica may have stopped.
	own := slices.DeleteFunc(es.state.Cluster.Nodes.ByMachine(m), es.Begun)
	switch {
	case len(own) == 0:
		return nil, nil, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "machine %s is not enrolled", m)
	case len(own) > 1: // two replicas wrote at the same time: one of them is about to remove its own
		return nil, nil, clusterview.Unavailable("attest again", fmt.Errorf("machine %s is enrolled %d times", m, len(own)))
	}
	if err := access.CheckShutOut(own[0]); err != nil {
		return own[0], nil, err
	}
	n := own[0].DeepCopy()
	if err := es.WriteStatus(ctx, n, func(s *v1alpha1.AttestedNodeStatus) error {
		if err := boot.record(n, s, false); err != nil { // J11
			return err
		}
		takeVerdict(s, status)
		if status.Order != nil {
			s.Order = status.Order
		}
		return nil
	}); err != nil {
		return own[0], nil, err
	}
	return own[0], n, nil
}

func clockWentBack(n *v1alpha1.AttestedNode, now, before int64) error {
	return attest.Refuse(attestv1.Reason_REASON_CLOCK_WENT_BACK, "the TPM counts %d resets, and counted %d before: it was cleared; if that was you, `muster replace %s --tpm %s` lets it go on", now, before, n.Name, n.Spec.MachineID)
}

// WriteVerdict writes a verdict into the status of a machine's AttestedNode, if it has one.
func (es *Enrollments) WriteVerdict(ctx context.Context, m attest.MachineID, v v1alpha1.Verdict) error {
	for _, n := range es.state.Cluster.Nodes.ByMachine(m) {
		if err := es.WriteStatus(ctx, n.DeepCopy(), func(s *v1alpha1.AttestedNodeStatus) error {
			if !newer(s.LastVerdict, v) {
				s.LastVerdict = &v
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// maxSkew is how far the clocks of two control planes may differ.
const maxSkew = time.Minute

// newer reports whether the stored verdict was made after v. Replicas and queues may write out of order; an older verdict
// never replaces a newer one, unless the time of the newer one is in the future.
func newer(stands *v1alpha1.Verdict, v v1alpha1.Verdict) bool {
	// The API stores whole seconds.
	return stands != nil && stands.Time.Unix() > v.Time.Unix() && time.Until(stands.Time.Time) < maxSkew
}

// takeVerdict copies the fields about evidence from next into s, unless s has a newer verdict.
func takeVerdict(s *v1alpha1.AttestedNodeStatus, next v1alpha1.AttestedNodeStatus) {
	if next.LastVerdict == nil || newer(s.LastVerdict, *next.LastVerdict) {
		return
	}
	n := next.DeepCopy()
	s.LastVerdict, s.PolicyGeneration, s.PolicySerial = n.LastVerdict, n.PolicyGeneration, n.PolicySerial
	s.EvidenceDigest, s.PCRs, s.AKName, s.EKPublic, s.Candidate, s.OwnerKeys = n.EvidenceDigest, n.PCRs, n.AKName, n.EKPublic, n.Candidate, n.OwnerKeys
	if n.Certificates != nil { // those of its kubelet, which may differ from those of the ticket
		s.Certificates = n.Certificates
	}
}

// WriteStatus is a compare-and-swap on the enrollment that was checked: after a ban between check and write, or its
// deletion, it fails. After a concurrent status write of another replica it does not: it calls change again with the new
// status. Errors are refusals, including those of change.
func (es *Enrollments) WriteStatus(ctx context.Context, n *v1alpha1.AttestedNode, change func(*v1alpha1.AttestedNodeStatus) error) error {
	spec, retires, what := n.Spec, n.Retires(), "write the status of AttestedNode "+n.Name
	for range state.WriteAttempts {
		if err := change(&n.Status); err != nil {
			return err
		}
		e, _ := es.list.Entry(n.Name)
		enrollment.SetConditions(n, e.Suspended)
		err := es.state.Cluster.Client.Status().Update(ctx, n)
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return clusterview.Unavailable(what, err)
		}
		uid := n.UID
		if err := es.state.Cluster.Client.Get(ctx, client.ObjectKeyFromObject(n), n); err != nil {
			return clusterview.Unavailable(what, err)
		}
		if n.UID != uid || n.Leaving() || !specEqual(n.Spec, spec) || retires && !n.Retires() { // J4: it is about to be deleted
			return clusterview.Unavailable(what, fmt.Errorf("AttestedNode %s was changed at the same time", n.Name))
		}
	}
	return clusterview.Unavailable(what, fmt.Errorf("it changed %d times meanwhile", state.WriteAttempts))
}

// Expiry is when a node's certificates end.
type Expiry struct{ Client, Serving time.Time }

// WriteExpiry writes the ends into the node's status, unless they are there: each replica sees the same certificates.
func (es *Enrollments) WriteExpiry(ctx context.Context, node string, e Expiry) error {
	n := es.state.Cluster.Nodes.ByName(node)
	if n == nil || !withExpiry(n.Status.DeepCopy(), e) {
		return nil
	}
	return es.WriteStatus(ctx, n.DeepCopy(), func(st *v1alpha1.AttestedNodeStatus) error {
		withExpiry(st, e)
		return nil
	})
}

// withExpiry sets the values that are later than the present ones, and reports whether any was. Values that the machine
// itself reports replace them.
func withExpiry(s *v1alpha1.AttestedNodeStatus, e Expiry) (changed bool) {
	set := func(to **metav1.Time, end time.Time) {
		if !end.IsZero() && (*to == nil || end.Unix() > (*to).Unix()) {
			*to, changed = new(metav1.NewTime(end)), true
		}
	}
	if s.Certificates == nil {
		s.Certificates = &v1alpha1.NodeCertificates{}
	}
	set(&s.Certificates.ClientExpiresAt, e.Client)
	set(&s.Certificates.ServingExpiresAt, e.Serving)
	return changed
}
