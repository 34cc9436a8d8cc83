package joinservice

import (
	"context"
	"crypto/ed25519"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxReattestInterval is how often nodes attest if the maximum age of verdicts has its default.
	maxReattestInterval = 5 * time.Minute
)

// reattestEvery returns an interval that gives nodes three attempts within the maximum age of a verdict.
func reattestEvery(maxAge time.Duration) time.Duration { return min(maxReattestInterval, maxAge/3) }

// Reattest implements the RPC.
func (s *Service) Reattest(ctx context.Context, req *joinv1.ReattestRequest) (*joinv1.ReattestResponse, error) {
	a := &attempt{began: s.now()}
	order, err := s.reattest(ctx, a, req)
	if err != nil {
		s.refuse(ctx, a, "verdict refused", err)
		return nil, err
	}
	interval := s.cfg.Interval
	if order != nil {
		interval = min(interval, orderInterval)
	}
	s.cfg.Log.DebugContext(ctx, "machine attested again", "machine", a.record.Machine, "node", a.record.Node, "policy_generation", a.record.PolicyGeneration, "image", a.record.Image, "class", a.record.Class)
	resp := &joinv1.ReattestResponse{PolicySerial: a.record.PolicySerial, Interval: durationpb.New(interval), Order: order}
	s.addAuthorities(ctx, req, resp)
	return resp, nil
}

// reattest returns the order that the machine is to get.
func (s *Service) reattest(ctx context.Context, a *attempt, req *joinv1.ReattestRequest) (order *joinv1.OwnerOrder, err error) {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return nil, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	if err := fresh(peer.VerifiedAt(), a.began); err != nil {
		return nil, err
	}
	appraisal, err := s.cfg.Members.Appraise(ctx, peer.Claims())
	var boot enroll.Boot
	if err == nil {
		boot, err = bootOf(ctx, peer, req.GetBootSecret())
	}
	if err == nil {
		err = s.limits.verdicts.Take(peer.Machine(), a.began)
	}
	var owner attest.OwnerKeys
	if err == nil {
		owner, err = ownerKeys(req.GetOwnerKeys())
	}
	var reports v1alpha1.AttestedNodeStatus
	if err == nil {
		err = setAuthorities(req, &reports)
	}
	if err == nil {
		a.record.PolicySerial, a.record.PolicyGeneration = appraisal.PolicySerial, appraisal.Generation
		a.record.Image, a.record.Class = appraisal.Image, appraisal.Class
		status := statusOf(a, peer)
		status.Certificates, status.Order, status.Candidate = reported(req), orderReport(req.GetOrder()), byCandidate(s.cfg.Policy.Candidate(), peer.Claims(), a.began, attest.AnyLock())
		status.OwnerKeys = owner.Strings()
		status.Authorities, status.KubeletAuthorities = reports.Authorities, reports.KubeletAuthorities
		var end func()
		if end, err = s.limits.recording.Begin(ctx); err == nil {
			var before, after *v1alpha1.AttestedNode
			before, after, err = s.cfg.Enrollments.Reattest(ctx, peer.Machine(), boot, status)
			end()
			if before != nil {
				a.record.Node = before.Name
			}
			if err == nil {
				s.recordOrder(ctx, a, peer.Machine(), before, after)
				order = orderFor(after, a.began)
			}
		}
	}
	s.undoVerdict(ctx, a, peer, err)
	if err == nil {
		s.cfg.Records.Accepted(peer.Machine())
	}
	return order, err
}

// ownerKeys reads the owner's keys in a machine's image; an older bootstrapper sends none. It refuses with REQUEST_INVALID.
func ownerKeys(list [][]byte) (out attest.OwnerKeys, err error) {
	if len(list) > attest.MaxOwnerKeys {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "owner_keys: %d keys, want at most %d", len(list), attest.MaxOwnerKeys)
	}
	for i, key := range list {
		if len(key) != ed25519.PublicKeySize || out.Has(key) {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "owner_keys: key %d has %d bytes, want %d, or is there twice", i+1, len(key), ed25519.PublicKeySize)
		}
		out = append(out, key)
	}
	return out, nil
}

// maxVerdictMessage is the limit of the AttestedNode, in bytes.
const maxVerdictMessage = 1 << 10

// verdictOf returns the verdict of an appraisal. Its message is for the owner, and is never sent to the machine (R1).
func verdictOf(err error, at time.Time) v1alpha1.Verdict {
	v := v1alpha1.Verdict{Accepted: err == nil, Reason: reasonOf(err), Time: metav1.NewTime(at)}
	if err != nil {
		v.Message = printable.Line(err.Error(), maxVerdictMessage)
	}
	return v
}

// byCandidate returns the verdict of the owner's next policy on the claims; nil if there is none.
func byCandidate(next *policy.Candidate, c attest.Claims, now time.Time, locks ...attest.Lock) *v1alpha1.CandidateVerdict {
	if next == nil {
		return nil
	}
	_, err := next.Policy.Appraise(c, locks...)
	return &v1alpha1.CandidateVerdict{Digest: next.Digest, Verdict: verdictOf(err, now)}
}

// reported returns the machine's report of its kubelet's certificates, which is shown to the owner; nil if there is none.
func reported(req *joinv1.ReattestRequest) *v1alpha1.NodeCertificates {
	end := func(t *timestamppb.Timestamp) *metav1.Time {
		if !t.IsValid() { // nor is it set
			return nil
		}
		return new(metav1.NewTime(t.AsTime()))
	}
	out := &v1alpha1.NodeCertificates{ClientExpiresAt: end(req.GetKubeletClientExpiresAt()), ServingExpiresAt: end(req.GetKubeletServingExpiresAt())}
	if *out == (v1alpha1.NodeCertificates{}) {
		return nil
	}
	return out
}

// undoVerdict writes a refusal that refutes the good verdict before it into the machine's AttestedNode.
func (s *Service) undoVerdict(ctx context.Context, a *attempt, peer attest.Peer, err error) {
	if !refutes(err) {
		return
	}
	v := verdictOf(err, a.began)
	next := byCandidate(s.cfg.Policy.Candidate(), peer.Claims(), a.began, attest.AnyLock())
	if werr := s.cfg.Enrollments.WriteVerdict(ctx, peer.Machine(), v, next); werr != nil {
		s.cfg.Log.ErrorContext(ctx, "a bad verdict could not be written to the machine's AttestedNode", "machine", a.record.Machine, "reason", v.Reason, "err", werr)
	}
}

// refutes reports whether a refusal of genuine evidence replaces the verdict before it. A lock that does not fit is not
// among them here: a machine that gets this far is at worst unlocked, as after a reboot, until its bootstrapper has run.
// Its verdict expires meanwhile.
func refutes(err error) bool {
	if _, hardware := errors.AsType[*attest.HardwareError](err); hardware { // A10, J7
		return true
	}
	r := attest.ReasonOf(err)
	return r == attestv1.Reason_REASON_POLICY_REFUSED || r == attestv1.Reason_REASON_EK_UNTRUSTED || r == attestv1.Reason_REASON_CLOCK_WENT_BACK
}
