package joinservice

import (
	"context"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/trust/attest"
)

// refusedMachine is a refusal of a machine whose evidence is genuine, so the claims identify it.
type refusedMachine struct {
	entry waiting.Entry // without reason, address and time
	err   error
}

func (r *refusedMachine) Error() string { return r.err.Error() }
func (r *refusedMachine) Unwrap() error { return r.err }

// waits lists for the owner a machine that was refused a ticket, and why. Only attested machines are listed.
func (s *Service) waits(ctx context.Context, a *attempt, err error) {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok || attest.ReasonOf(err) == attestv1.Reason_REASON_PEER_NOT_ATTESTED {
		return
	}
	e := waiting.Entry{Machine: peer.Machine().String(), Node: a.record.Node, Role: a.record.Role, Reason: reasonOf(err), Last: time.Now()}
	e.Address, e.Endorsement = caller(ctx), peer.Claims().Endorsement()
	if i := peer.Claims().Instance(); i.Provider != "" {
		e.Instance = i.String()
	}
	e.Image, e.Class = peer.Appraisal().Image, peer.Appraisal().Class
	s.cfg.Records.Refused(e)
}

// admitted removes a machine from that list, and notes when its certificates end.
func (s *Service) admitted(ctx context.Context, a *attempt, t *ticket) {
	if peer, ok := attest.PeerFrom(ctx); ok {
		s.cfg.Records.Admitted(peer.Machine(), a.record.Node, t.client.Leaf.NotAfter, t.serving.Leaf.NotAfter)
	}
}
