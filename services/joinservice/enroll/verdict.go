package enroll

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/trust/attest"
)

// Reattest records a current verdict on an enrolled machine, whose ID comes from attestation only (J1), with its report of an
// order. It returns the AttestedNode before and after; both are nil if the machine has none, and after is nil if nothing was
// written. Other fields of status are ignored. Errors are refusals: NOT_ENROLLED, BANNED, MACHINE_CLONED, CLOCK_WENT_BACK,
// VERDICT_OLD, API_UNAVAILABLE.
func (es *Enrollments) Reattest(ctx context.Context, m attest.MachineID, boot Boot, status v1alpha1.AttestedNodeStatus) (before, after *v1alpha1.AttestedNode, err error) {
	// Enrollments that a ticket only began do not count; their replica may have stopped.
	own := slices.DeleteFunc(es.state.Cluster.Nodes.ByMachine(m), es.Unfinished)
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
		if err := boot.record(n, s, es.state.HasNode(n.Name), false); err != nil { // J11
			return err
		}
		mergeVerdict(s, status)
		if status.Order != nil {
			s.Order = status.Order
		}
		return nil
	}); err != nil {
		return own[0], nil, err
	}
	return own[0], n, nil
}

func resetCountWentBack(n *v1alpha1.AttestedNode, now, before int64) error {
	return attest.Refuse(attestv1.Reason_REASON_CLOCK_WENT_BACK, "the TPM's reset counter is %d, but was %d before: the TPM was cleared. If that was you, `muster replace %s --tpm ID` with the machine's own ID, which its console shows, admits it again", now, before, n.Name)
}

// Has reports whether a machine has an AttestedNode.
func (es *Enrollments) Has(m attest.MachineID) bool {
	return len(es.state.Cluster.Nodes.ByMachine(m)) > 0
}

// WriteVerdict writes a verdict into the status of a machine's AttestedNode, if it has one, and that of the policy's candidate; nil:
// there is none.
func (es *Enrollments) WriteVerdict(ctx context.Context, m attest.MachineID, v v1alpha1.Verdict, candidate *v1alpha1.CandidateVerdict) error {
	for _, n := range es.state.Cluster.Nodes.ByMachine(m) {
		if err := es.WriteStatus(ctx, n.DeepCopy(), func(s *v1alpha1.AttestedNodeStatus) error {
			if !storedIsNewer(s.LastVerdict, v) {
				s.LastVerdict, s.Candidate = &v, candidate
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

// storedIsNewer reports whether the stored verdict was made after v. Replicas and queues may write out of order; an older verdict
// never replaces a newer one, unless the time of the newer one is in the future.
func storedIsNewer(stored *v1alpha1.Verdict, v v1alpha1.Verdict) bool {
	// The API stores whole seconds.
	return stored != nil && stored.Time.Unix() > v.Time.Unix() && time.Until(stored.Time.Time) < maxSkew
}

// mergeVerdict copies the fields about evidence from next into s, unless s has a newer verdict.
func mergeVerdict(s *v1alpha1.AttestedNodeStatus, next v1alpha1.AttestedNodeStatus) {
	if next.LastVerdict == nil || storedIsNewer(s.LastVerdict, *next.LastVerdict) {
		return
	}
	n := next.DeepCopy()
	s.LastVerdict, s.PolicyGeneration, s.PolicySerial = n.LastVerdict, n.PolicyGeneration, n.PolicySerial
	s.EvidenceDigest, s.PCRs, s.AKName, s.EKPublic, s.Candidate, s.OwnerKeys = n.EvidenceDigest, n.PCRs, n.AKName, n.EKPublic, n.Candidate, n.OwnerKeys
	s.Authorities, s.KubeletAuthorities = n.Authorities, n.KubeletAuthorities
	if n.Certificates != nil { // those of its kubelet, which may differ from those of the ticket
		s.Certificates = n.Certificates
	}
}
