package joinservice

import (
	"context"
	"encoding/hex"

	"golang.org/x/sync/errgroup"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// RenewNodeCertificates implements the RPC, for a machine whose kubelet can no longer renew its certificates.
func (s *Service) RenewNodeCertificates(ctx context.Context, req *joinv1.RenewNodeCertificatesRequest) (*joinv1.RenewNodeCertificatesResponse, error) {
	a := &attempt{id: newTicketID(), began: s.now()}
	client, serving, err := s.renewCertificates(ctx, a, req)
	if err != nil {
		s.refuse(ctx, a, "renewal refused", err)
		s.waits(ctx, a, err)
		return nil, err
	}
	s.cfg.Log.InfoContext(ctx, "node certificates renewed", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node, "seconds", s.now().Sub(a.began).Seconds(), "image", a.record.Image, "class", a.record.Class)
	id, _ := hex.DecodeString(a.id) // generated here, so valid hex
	ca, _ := s.diskAuthorities(ctx) // the machine may trust neither the authority that has signed nor a cross certificate for it
	return &joinv1.RenewNodeCertificatesResponse{RenewalId: id, KubeletClientCertificate: client.PEM, KubeletServingCertificate: serving.PEM, CaCertificate: ca}, nil
}

// renewCertificates returns certificates or a refusal; it does not use the errors of the protocol.
func (s *Service) renewCertificates(ctx context.Context, a *attempt, req *joinv1.RenewNodeCertificatesRequest) (client, serving certificates.Certificate, err error) {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return client, serving, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	asked, err := parseRenewal(req)
	if err != nil {
		return client, serving, err
	}
	a.record.Node = asked.client.Node
	renewal, err := s.mayRenew(ctx, a, peer, enroll.Claim{Node: asked.client.Node, Addresses: asked.serving.Addresses}, req.GetBootSecret())
	s.undoVerdict(ctx, a, peer, err)
	if err != nil {
		return client, serving, err
	}
	end, err := s.limits.granting.Begin(ctx)
	if err != nil {
		return client, serving, err
	}
	defer end()
	if err := fresh(peer.VerifiedAt(), s.now()); err != nil { // J7: the wait may have taken long
		return client, serving, err
	}
	if err := s.limits.certificates.Take(peer.Machine(), a.began); err != nil {
		return client, serving, err
	}
	// Except for the verdict, side effects start here, after the record that announces them is stable.
	if err := s.write(a, "renewal decided"); err != nil { // J3
		return client, serving, err
	}
	both, issueCtx := errgroup.WithContext(ctx)
	both.Go(func() (err error) { client, err = s.cfg.Certificates.Issue(issueCtx, asked.client); return err }) // J5: for keys that never leave the machine
	both.Go(func() (err error) { serving, err = s.cfg.Certificates.Issue(issueCtx, asked.serving); return err })
	if err := both.Wait(); err != nil {
		return client, serving, err
	}
	if err := renewal.Allow(ctx, client.Leaf); err != nil { // J4, J7: a ban meanwhile counts
		return client, serving, err
	}
	a.record.Serials = []string{client.Leaf.SerialNumber.Text(16), serving.Leaf.SerialNumber.Text(16)}
	if err := s.write(a, "certificates renewed"); err != nil { // J3
		return client, serving, err
	}
	s.cfg.Records.Admitted(peer.Machine(), a.record.Node, client.Leaf.NotAfter, serving.Leaf.NotAfter)
	return client, serving, nil
}

// renewalRequest is a pair of well-formed requests for one node.
type renewalRequest struct{ client, serving *nodecert.Request }

// parseRenewal checks the form of a request: CSR_INVALID.
func parseRenewal(req *joinv1.RenewNodeCertificatesRequest) (r renewalRequest, err error) {
	if r.client, err = nodecert.Parse(nodecert.Client, req.GetKubeletClientCsr()); err != nil {
		return r, err
	}
	if r.serving, err = nodecert.Parse(nodecert.Serving, req.GetKubeletServingCsr()); err != nil {
		return r, err
	}
	if r.client.Node != r.serving.Node {
		return r, attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "the two requests are for nodes %q and %q", r.client.Node, r.serving.Node)
	}
	return r, nil
}

// mayRenew compares the machine with the policy in force and with the enrollment of the claimed name and addresses. The verdict is that of this session
// (J7).
func (s *Service) mayRenew(ctx context.Context, a *attempt, peer attest.Peer, claim enroll.Claim, secret []byte) (*enroll.Renewal, error) {
	if err := fresh(peer.VerifiedAt(), a.began); err != nil {
		return nil, err
	}
	appraisal, err := s.cfg.Members.Appraise(ctx, peer.Claims())
	if err != nil {
		return nil, err
	}
	a.record.PolicySerial, a.record.PolicyGeneration = appraisal.PolicySerial, appraisal.Generation
	a.record.Image, a.record.Class = appraisal.Image, appraisal.Class
	boot, err := bootOf(ctx, peer, secret)
	if err != nil {
		return nil, err
	}
	claim.Machine, claim.Boot = peer.Machine(), boot // J1: the peer's
	renewal, err := s.cfg.Enrollments.BeginRenewal(ctx, claim, statusOf(a, peer))
	if err != nil {
		return nil, err
	}
	if _, err := s.cfg.Members.Appraise(ctx, peer.Claims()); err != nil { // J6, J7: the wait for the end of the boot before may have taken long
		return nil, err
	}
	return renewal, nil
}
