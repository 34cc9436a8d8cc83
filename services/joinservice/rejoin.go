package joinservice

import (
	"context"
	"encoding/hex"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// IssueRejoinTicket implements the RPC. Its only side effects are its records, including that of the machine's boot.
func (s *Service) IssueRejoinTicket(ctx context.Context, req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
	a := &attempt{id: newTicketID(), began: s.now()}
	t, err := s.rejoin(ctx, a, req)
	role := roleName(req.GetRole())
	s.rejoins.WithLabelValues(role, reasonOf(err)).Inc()
	if err != nil {
		s.refuse(ctx, a, "rejoin refused", err)
		s.waits(ctx, a, err)
		return nil, err
	}
	s.cfg.Log.InfoContext(ctx, "rejoin ticket issued", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node, "role", role, "disk", a.record.Disk, "seconds", s.now().Sub(a.began).Seconds(), "image", a.record.Image, "class", a.record.Class)
	return t.toWire(), nil
}

// rejoinTicket is the answer to a machine that has rebooted.
type rejoinTicket struct {
	id          string
	disk        keys.Disk
	info        *clusterinfo.Info
	authorities []*joinv1.ControlPlaneFile
	rotation    *joinv1.KeyRotation
}

func (t *rejoinTicket) toWire() *joinv1.IssueRejoinTicketResponse {
	id, _ := hex.DecodeString(t.id) // generated here, so valid hex
	var other *joinv1.Release
	if o := t.info.Other(); o != nil {
		other = &joinv1.Release{Components: versions.NewList(o.Components...).Wire(), Images: o.Images}
	}
	return &joinv1.IssueRejoinTicketResponse{
		TicketId: id, DiskKey: t.disk.Expose(), ClusterId: t.info.ClusterID[:],
		Components: versions.NewList(t.info.Components...).Wire(), Images: t.info.Images, Other: other, Adopted: t.info.Adopted, // B8
		ControlPlaneEndpoint: t.info.ControlPlaneEndpoint, Authorities: t.authorities, Rotation: t.rotation,
	}
}

// parseRejoin checks the form of a request: REQUEST_INVALID.
func parseRejoin(req *joinv1.IssueRejoinTicketRequest) (c enroll.Claim, disk keys.DiskID, err error) {
	invalid := func(format string, args ...any) (enroll.Claim, keys.DiskID, error) {
		return enroll.Claim{}, keys.DiskID{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, format, args...)
	}
	if !nodecert.IsName(req.GetNodeName()) {
		return invalid("node_name is no DNS label of at most 63 characters")
	}
	role := v1alpha1.Role(roleName(req.GetRole()))
	if role != v1alpha1.RoleWorker && role != v1alpha1.RoleControlPlane {
		return invalid("role %d is neither worker nor control plane", req.GetRole())
	}
	if disk, err = keys.ParseDiskID(req.GetDiskId()); err != nil {
		return invalid("disk_id: %w", err)
	}
	// A plain disk has no key that opens it.
	return enroll.Claim{Node: req.GetNodeName(), Role: role, Disk: disk.String(), DiskMode: v1alpha1.DiskModeLUKS}, disk, nil
}

// rejoin returns a ticket or a refusal; it does not use the errors of the protocol.
func (s *Service) rejoin(ctx context.Context, a *attempt, req *joinv1.IssueRejoinTicketRequest) (*rejoinTicket, error) {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return nil, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	a.record.Role = roleName(req.GetRole())
	if nodecert.IsName(req.GetNodeName()) {
		a.record.Node = req.GetNodeName()
	}
	claim, disk, err := parseRejoin(req)
	if err != nil {
		return nil, err
	}
	a.record.Disk = claim.Disk
	claim.Machine = peer.Machine() // J1: the peer's
	if claim.Boot, err = bootOf(ctx, peer, req.GetBootSecret()); err != nil {
		return nil, err
	}
	claim.AK = hex.EncodeToString(peer.Claims().AKName())
	rejoining, err := s.mayRejoin(ctx, a, peer, claim)
	if err != nil {
		s.undoVerdict(ctx, a, peer, err)
		return nil, err
	}
	if err := s.limits.rejoins.Take(peer.Machine(), a.began); err != nil {
		return nil, err
	}
	info, err := s.cfg.Cluster()
	if err != nil {
		return nil, err
	}
	if err := s.confirmCluster(ctx, info); err != nil {
		return nil, err
	}
	authorities, err := s.authorities(claim.Role)
	if err != nil {
		return nil, err
	}
	if err := rejoining.AwaitPreviousBootEnd(ctx); err != nil { // J11
		return nil, err
	}
	end, err := s.limits.granting.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := fresh(peer.VerifiedAt(), s.now()); err != nil { // J2: the wait may have taken long
		return nil, err
	}
	if err := rejoining.Record(ctx); err != nil { // J11: before the key is sent
		return nil, err
	}
	key, err := s.cfg.Keys.Disk(ctx, disk, rejoining.Salt)
	if err != nil {
		return nil, err
	}
	if err := s.write(a, "rejoin ticket issued"); err != nil { // J3
		return nil, err
	}
	if err := s.cfg.Enrollments.RecheckDisk(ctx, claim, rejoining.Salt); err != nil { // K4: after all steps that take time
		return nil, err
	}
	if err := s.stillAccepted(ctx, a, s.cfg.Rejoiners, peer, claim.Role, func(p *attest.Policy) error { return roleListed(p, claim.Role) }); err != nil { // J2, J6
		return nil, err
	}
	s.cfg.Records.Accepted(peer.Machine())
	t := &rejoinTicket{id: a.id, disk: key, info: info, authorities: authorities}
	if claim.Role == v1alpha1.RoleControlPlane {
		t.authorities, t.rotation = withRotation(authorities, info.Rotation)
	}
	return t, nil
}

// mayRejoin compares the machine with the policy in force and with its enrollment.
func (s *Service) mayRejoin(ctx context.Context, a *attempt, peer attest.Peer, claim enroll.Claim) (*enroll.Rejoining, error) {
	// A key must be given to the machine as it is now, not as it was a while ago.
	if err := fresh(peer.VerifiedAt(), a.began); err != nil { // J2
		return nil, err
	}
	appraisal, err := s.cfg.Rejoiners.Appraise(ctx, peer.Claims())
	if err != nil {
		return nil, err
	}
	a.record.PolicySerial, a.record.PolicyGeneration = appraisal.PolicySerial, appraisal.Generation
	a.record.Image, a.record.Class = appraisal.Image, appraisal.Class
	p, err := s.cfg.Policy.Current()
	if err != nil {
		return nil, err
	}
	if err := roleListed(p.Policy, claim.Role); err != nil {
		return nil, err
	}
	rejoining, err := s.cfg.Enrollments.Rejoin(ctx, claim)
	if err != nil {
		return nil, err
	}
	if err := machineListed(p.Policy, claim.Role, peer.Machine()); err != nil { // J6: the CA's keys are on its disk
		return nil, err
	}
	return rejoining, nil
}
