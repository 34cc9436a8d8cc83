package joinservice

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// adminPoll is the pause after which the owner's program asks again for a certificate. Control planes look for requests
// every ten seconds.
const adminPoll = 2 * time.Second

// RenewAdministrator implements the RPC, for an owner who has no valid administrator's certificate any more. Its caller is
// not attested: only the owner's signature counts (J9).
func (s *Service) RenewAdministrator(ctx context.Context, req *joinv1.RenewAdministratorRequest) (*joinv1.RenewAdministratorResponse, error) {
	remote := ""
	if call, ok := connect.CallInfoForHandlerContext(ctx); ok {
		remote = call.Peer().Addr
	}
	cert, err := s.administrator(ctx, remote, req.GetOrder())
	if err != nil {
		s.cfg.UnattestedRefusals.Call(joinv1connect.JoinServiceRenewAdministratorProcedure, remote, "", err)
		return nil, err
	}
	if cert.Leaf == nil {
		return &joinv1.RenewAdministratorResponse{RetryAfter: durationpb.New(adminPoll)}, nil
	}
	ca, _ := s.diskAuthorities(ctx)
	return &joinv1.RenewAdministratorResponse{Certificate: cert.PEM, CaCertificate: ca}, nil
}

// administrator returns a certificate, a zero one if the caller must wait for it, or a refusal; it does not use the errors
// of the protocol.
func (s *Service) administrator(ctx context.Context, remote string, wire *joinv1.AdministratorOrder) (certificates.Certificate, error) {
	now := s.now()
	if err := s.limits.admin.Allow(peerlimit.SourceOfAddress(remote), now); err != nil {
		return certificates.Certificate{}, attest.RefuseFor(time.Second, attestv1.Reason_REASON_BUSY, "%w", err)
	}
	order, err := ownerorder.Parse(wire)
	if err != nil {
		return certificates.Certificate{}, err
	}
	info, err := s.cfg.Cluster()
	if err != nil {
		return certificates.Certificate{}, err
	}
	if err := order.Verify(s.cfg.Owner, info.ClusterID, now); err != nil { // J9
		return certificates.Certificate{}, err
	}
	a := &attempt{id: newTicketID(), began: now}
	a.record.Request = order.Name()
	cert, filed, err := s.cfg.Certificates.Ordered(ctx, order)
	switch {
	case err != nil:
		return certificates.Certificate{}, err
	case cert.Leaf != nil:
		a.record.Serials = []string{cert.Leaf.SerialNumber.Text(16)}
		if err := s.write(a, "administrator renewed"); err != nil { // J3
			return certificates.Certificate{}, err
		}
		s.cfg.Log.InfoContext(ctx, "an administrator's certificate is handed out by the owner's order", "request", order.Name(), "remote", remote, "serial", a.record.Serials[0])
		return cert, nil
	case filed:
		return certificates.Certificate{}, nil
	}
	if err := s.write(a, "administrator ordered"); err != nil { // J3: nothing is filed without a record
		return certificates.Certificate{}, err
	}
	s.cfg.Log.InfoContext(ctx, "the owner has ordered an administrator's certificate", "request", order.Name(), "remote", remote)
	return certificates.Certificate{}, s.cfg.Certificates.FileOrder(ctx, order)
}
