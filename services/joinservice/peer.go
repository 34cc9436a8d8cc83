package joinservice

import (
	"context"
	"net"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// maxEvidenceAge is how old evidence may be to count as current.
const maxEvidenceAge = time.Minute

// fresh requires current evidence (J7): a connection can stay open long after the evidence was shown.
func fresh(verified, now time.Time) error {
	if age := now.Sub(verified); age > maxEvidenceAge {
		return attest.Refuse(attestv1.Reason_REASON_VERDICT_OLD, "the connection's evidence is %s old, and may be %s", age.Round(time.Second), maxEvidenceAge)
	}
	return nil
}

// stillAccepted compares a machine with the policy once more, right before keys are sent. The steps before that take up to a minute, and the owner may have
// removed the machine, its image, role or network from the policy meanwhile.
func (s *Service) stillAccepted(ctx context.Context, a *attempt, appraiser attest.Appraiser, peer attest.Peer, role v1alpha1.Role, permitted func(*attest.Policy) error) error {
	if _, err := appraiser.Appraise(ctx, peer.Claims()); err != nil {
		s.undoVerdict(ctx, a, peer, err)
		return err
	}
	p, err := s.cfg.Policy.Current()
	if err != nil {
		return err
	}
	if err := permitted(p.Policy); err != nil {
		return err
	}
	return machineListed(p.Policy, role, peer.Machine())
}

// roleListed returns ROLE_REFUSED unless the policy lists the role.
func roleListed(p *attest.Policy, role v1alpha1.Role) error {
	if !p.AllowsRole(string(role)) {
		return attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "the policy lists no role %s", role)
	}
	return nil
}

// machineListed returns SERVER_NOT_LISTED for a control plane that the policy does not list: a CA's keys need the owner's signature, not only an object of the
// cluster (J6).
func machineListed(p *attest.Policy, role v1alpha1.Role, machine attest.MachineID) error {
	if role != v1alpha1.RoleControlPlane {
		return nil
	}
	return p.MayServe(machine)
}

// bootOf returns the machine's boot from the peer's evidence, with the secret of that boot. It returns REQUEST_INVALID if
// the secret is malformed.
func bootOf(ctx context.Context, p attest.Peer, secret []byte) (enroll.Boot, error) {
	s, err := keys.ParseBootSecret(secret)
	if err != nil {
		return enroll.Boot{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "boot_secret: %w", err)
	}
	clock := p.Claims().Clock() // J1: the peer's
	b := enroll.Boot{Reset: clock.ResetCount, Restart: clock.RestartCount, Clock: clock.Clock, Secret: s, Verified: p.VerifiedAt()}
	if ip, err := netip.ParseAddr(caller(ctx)); err == nil {
		b.Address = ip.Unmap().WithZone("").String()
	}
	return b, nil
}

// caller returns the source address of a request; empty if it is not known.
func caller(ctx context.Context) string {
	call, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return ""
	}
	return host(call.Peer().Addr)
}

func host(addr string) string {
	if h, _, err := net.SplitHostPort(addr); err == nil {
		return h
	}
	return addr
}
