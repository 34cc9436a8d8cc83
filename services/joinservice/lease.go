package joinservice

import (
	"context"
	"encoding/hex"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/joinlease"
	"github.com/muster-k8s/muster/trust/attest"
)

// retryUpgrade is the pause that is sent to a control plane while the others are upgraded, each of which takes minutes.
const retryUpgrade = 10 * time.Second

// joinLease returns the join Lease for a control plane, if it is free; nil for a worker. It refuses with CONTROL_PLANE_BUSY while control planes are
// upgraded to another release than that with which machines join, or get a new key one after another.
func (s *Service) joinLease(ctx context.Context, a *attempt, c enroll.Claim) (*joinlease.Acquisition, error) {
	if c.Role != v1alpha1.RoleControlPlane {
		return nil, nil //nolint:nilnil // workers may join at any time
	}
	info, err := s.cfg.Cluster()
	if err != nil {
		return nil, err
	}
	if info.Next != nil {
		return nil, attest.RefuseFor(retryUpgrade, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "the control planes are being upgraded to Kubernetes %s: a new one joins after them", info.Next.KubernetesVersion)
	}
	if !info.Rotation.Joins() {
		return nil, attest.RefuseFor(retryUpgrade, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "the control planes get another %s: a new one joins when all have it", info.Rotation.Key)
	}
	return s.cfg.JoinLease.Check(ctx, c.Machine, c.Node, a.id)
}

// RenewJoinLease implements the RPC.
func (s *Service) RenewJoinLease(ctx context.Context, req *joinv1.RenewJoinLeaseRequest) (*joinv1.RenewJoinLeaseResponse, error) {
	a := &attempt{id: hex.EncodeToString(req.GetTicketId()), began: s.now()}
	err := s.renew(ctx, a, req)
	s.renewals.WithLabelValues(reasonOf(err)).Inc()
	if err != nil {
		s.refuse(ctx, a, "lease refused", err)
		return nil, err
	}
	if req.GetDone() {
		s.cfg.Log.InfoContext(ctx, "a control plane's join Lease was released", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node)
		return &joinv1.RenewJoinLeaseResponse{}, nil
	}
	s.cfg.Log.DebugContext(ctx, "a control plane's join Lease was renewed", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node)
	return &joinv1.RenewJoinLeaseResponse{Lifetime: durationpb.New(joinlease.Life)}, nil
}

func (s *Service) renew(ctx context.Context, a *attempt, req *joinv1.RenewJoinLeaseRequest) error {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	if len(req.GetTicketId()) != ticketIDSize {
		a.id = ""
		return attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "a ticket ID has %d bytes, not %d", ticketIDSize, len(req.GetTicketId()))
	}
	// As with the return of a ticket, the evidence of the connection's start is sufficient: nothing secret is sent.
	if err := s.limits.leases.Take(peer.Machine(), a.began); err != nil {
		return err
	}
	// A machine that was banned, or that the policy no longer accepts or lists, cannot make others wait.
	if _, err := s.cfg.Appraiser.Appraise(ctx, peer.Claims()); err != nil {
		return err
	}
	p, err := s.cfg.Policy.Current()
	if err != nil {
		return err
	}
	if err := p.Policy.MayServe(peer.Machine()); err != nil { // A7
		return err
	}
	if !req.GetDone() {
		a.record.Node, err = s.cfg.JoinLease.Renew(ctx, peer.Machine(), a.id)
		return err
	}
	if a.record.Node, err = s.cfg.JoinLease.End(ctx, peer.Machine(), a.id); err != nil {
		return err
	}
	a.record.Role = string(v1alpha1.RoleControlPlane)
	if err := s.write(a, "turn ended"); err != nil {
		// The Lease is released, and the next machine may continue: only the record is missing.
		s.cfg.Log.ErrorContext(ctx, "the audit record of a released join Lease cannot be written", "ticket", a.id, "err", err)
	}
	return nil
}
